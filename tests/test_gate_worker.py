"""What times the kernels is itself attacked: on a GPU another stream, a sleep, a capture that fails; a wrong sum; and the
trials that say how often the paired timing is right."""
from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from kernels.registry import ENTRIES
from suite.gate import slower, steps, trial, worker
from suite.gate.finding import FINE, UNSURE, WORSE, Finding


def given(device: str, seed: int) -> dict:
    return {"x": torch.randn(64, generator=torch.Generator().manual_seed(seed)), "out": torch.zeros(64)}


def returns(x, out):
    return x.exp()


def in_place(x, out):
    out.copy_(x.exp())


class Pretended(worker.Bench):
    """A GPU's side of a check played on the CPU: seconds by events, and a graph that does the work again, or does not."""

    def __init__(self, function, seconds: float = 1e-5, captured: bool = True, error: str = ""):
        super().__init__(function, given, "cuda", None)
        self.told, self.works, self.error = seconds, captured, error

    def events(self, call):
        call()
        return self.told

    def captured(self):
        if self.error:
            return None, worker.ASIDE if "unjoined" in self.error else None
        made = list(worker.leaves(self.function(**self.given)))

        def replay():
            if self.works:
                for x, y in zip(made, worker.leaves(self.function(**self.given))):
                    x.copy_(y)

        return SimpleNamespace(replay=replay), made


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)


@pytest.mark.parametrize("function", [returns, in_place])
def test_work_on_another_stream_is_not_in_the_graph_of_the_call(no_gpu, function):
    bench = Pretended(function)
    assert bench.check() is None and bench.graph is not None, "short: timed by replay"
    assert Pretended(function, captured=False).check() == worker.ASIDE
    assert Pretended(function, seconds=1e-3, captured=False).check() == worker.ASIDE, "also where no graph is needed"
    assert Pretended(function, error="capture has unjoined work").check() == worker.ASIDE


def test_device_time_must_cover_the_call_and_a_short_kernel_be_captured(no_gpu):
    def sleeping(x, out):
        time.sleep(0.01)
        return x.exp()

    assert "does not cover the call" in Pretended(sleeping).check()
    assert Pretended(sleeping, seconds=0.01).check() is None, "a sleep that events see is time as any other"
    assert "cannot be captured" in Pretended(returns, error="not permitted").check()
    assert Pretended(returns, seconds=1e-3, error="not permitted").check() is None


@pytest.mark.gpu
def test_faults_on_a_gpu():
    aside = torch.cuda.Stream()

    def make(device, seed):
        return {"x": torch.randn(1 << 24, device=device, generator=torch.Generator(device).manual_seed(seed))}

    def elsewhere(x):
        made = torch.empty_like(x)
        with torch.cuda.stream(aside):
            torch.exp(x, out=made)
        return made

    def check(function):
        return worker.Bench(function, make, "cuda", lambda x: x.exp()).check()

    assert check(lambda x: x.exp()) is None
    assert check(elsewhere) is not None
    assert "zeros" in check(torch.zeros_like) and "differs" in check(torch.sin)


def test_a_released_bench_holds_nothing():
    bench = worker.Bench(returns, given, "cpu")
    assert bench.check() is None and bench.given
    bench.release()
    assert not bench.given and not bench.kept


def test_a_training_step_is_checked_and_timed():
    step = steps.Step("cpu")
    assert step.check() is None and step.seconds(1) > 0
    real = steps.Step._build
    steps.Step._build = lambda self, seed: real(self, 0)
    try:
        assert "same loss" in step.check()
    finally:
        steps.Step._build = real


def test_an_all_reduce_of_two_processes():
    exact = sum(steps.message(index, 3).double() for index in (0, 1))
    assert steps.checked(exact, 3) == "" and "zeros" in steps.checked(0 * exact, 3) and "off" in steps.checked(1.5 * exact, 3)
    one = steps.Collective()
    assert one.check() is None and one.seconds(2) > 0
    one.release()
    assert [rank.returncode for rank in one.ranks] == [0, 0]


def test_one_entry_alone_becomes_slower():
    name = min(ENTRIES, key=lambda e: e.traffic).name
    for slow, changed in ((f"reference:{name}", "reference"), (f"host:{name.partition('/')[0]}", "launch")):
        made = slower.slower(ENTRIES, slow, 1.0)
        for old, new in zip(ENTRIES, made):
            same = old.name != name if changed == "reference" else old.name.partition("/")[0] != name.partition("/")[0]
            assert (new is old) == same and new.name == old.name
    with pytest.raises(ValueError, match="nosuch"):
        slower.slower(ENTRIES, "nosuch", 1.0)

    def clock(function) -> float:
        begun = time.perf_counter()
        function(0.002)
        return time.perf_counter() - begun

    assert min(clock(slower.spun(time.sleep, 1.0)) for _ in range(3)) > 1.8 * min(clock(time.sleep) for _ in range(3))


def test_a_trial_counts_what_the_runs_say(tmp_path, monkeypatch):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/registry.py").write_text("ENTRIES = []\n")
    seen = []

    def rounds(base, head, device, only, times, kept):
        slowed = (head / "kernels/slower.py").exists()
        text = (head / "kernels/registry.py").read_text()
        seen.append((base.name != head.name, slowed, text.count("slower(ENTRIES, 'a', 0.15)")))
        for _ in range(times):
            yield [Finding("a", WORSE if slowed else FINE), Finding("b", WORSE if len(seen) == 5 else UNSURE), Finding("c", FINE)]

    monkeypatch.setattr(trial, "rounds", rounds)
    told = []
    rows = trial.trial(tmp_path, "cpu", (0.0, 0.15), "a", 3, (), dict.fromkeys(trial.HEADER[:4], "x"), told.append)
    assert rows == told and all(set(row) == set(trial.HEADER) for row in rows)
    assert seen == [(True, False, 0)] * 3 + [(True, True, 1)] * 3
    quiet, caught = trial.summary(rows)
    assert quiet == ("A/A; false alarms: 0 in 9 comparisons of 3 runs", True)
    assert caught == ("+15% in a: alarm in 3 of 3; false alarms: 1 in 9 comparisons of 3 runs (b)", False)
    missed = [row | {"alarms": ""} for row in rows if row["share"]]
    assert not trial.summary(missed)[0][1] and trial.summary([row | {"alarms": "a"} for row in missed])[0][1]
    assert not trial.summary([row | {"faults": "c"} for row in rows if not row["share"]])[0][1]
    held = [rows[0], rows[2], rows[4]]
    again = trial.trial(tmp_path, "cpu", (0.0, 0.15), "a", 3, (), dict.fromkeys(trial.HEADER[:4], "x"), told.append, held)
    assert [(row["share"], row["run"]) for row in again] == [(0.0, 1), (0.15, 0), (0.15, 2)], "only what was not made"
    for change in ({"torch": "y"}, {"device": "cuda"}, {"slowed": "b"}):
        with pytest.raises(ValueError, match=f"the table holds runs of .*{next(iter(change.values()))}"):
            trial.trial(tmp_path, "cpu", (0.15,), "a", 3, (), dict.fromkeys(trial.HEADER[:4], "x"), told.append, [rows[0] | change])
    with pytest.raises(ValueError, match="runs over 7 kernels, this one is over 3"):
        other = [rows[0] | {"kernels": 7}]
        trial.trial(tmp_path, "cpu", (0.0,), "a", 3, (), dict.fromkeys(trial.HEADER[:4], "x"), told.append, other)
    with pytest.raises(ValueError, match="nosuch: not among the 3"):
        trial.trial(tmp_path, "cpu", (0.15,), "nosuch", 1, (), {}, told.append)
