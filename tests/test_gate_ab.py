"""Paired timing of two revisions of a small repository: silent without a change, naming the slowed kernel alone, faults caught.

How often it alarms on this project's own kernels: `triaxis gate trial`.
"""
from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from suite.gate import ab
from suite.gate.finding import FAULT, FINE, MISSING, NEW, UNSURE, WORSE, Finding
from suite.workload import ROOT

REGISTRY = """
import time
from collections import namedtuple
import torch

Entry = namedtuple("Entry", "name reference make traffic launch", defaults=(0, None))
kept = {}

def make(device, seed):
    return {"x": torch.randn(1 << 15, generator=torch.Generator().manual_seed(seed))}

def kernel(operation, extra="pass"):
    scope = {"torch": torch, "time": time, "kept": kept}
    exec(f"def run(x):\\n begun = time.perf_counter()\\n y = x.{operation}()\\n {extra}\\n return y", scope)
    return scope["run"]

ENTRIES = [Entry(name, kernel(*how), make) for name, how in KERNELS.items()]
"""
PLAIN = {"exp": ("exp",), "sin": ("sin",)}
SLOWER = "end = begun + (time.perf_counter() - begun) * (1 + {}); [None for _ in iter(lambda: time.perf_counter() < end, False)]"
SEEDED = {  # a kernel's name -> (what the head does to it, what is said)
    "zeros": ("y = torch.zeros_like(y)", FAULT, "nothing but zeros"), "nan": ("y = y * float('nan')", FAULT, "NaN"),
    "reused": ("y = kept.setdefault(0, y)", FAULT, "same result for other inputs"),
    "throws": ("raise OSError('broken')", FAULT, "OSError: broken"), "sleeps": ("time.sleep(0.001)", WORSE, "again"),
    "double": ("y = y.double().exp().sin().float()", WORSE, "again"), "slower": (SLOWER.format(0.5), WORSE, "again"),
}


def git(folder: Path, *words: str) -> str:
    names = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}
    return subprocess.run(["git", *words], cwd=folder, env=os.environ | names, capture_output=True, text=True, check=True).stdout


def repository(folder: Path, kernels: Mapping[str, Sequence[str]] = PLAIN) -> Path:
    """One commit with a registry of kernels: name -> (operation, what else it does)."""
    (folder / "kernels").mkdir()
    (folder / "kernels/__init__.py").touch()
    change(folder, kernels)
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "base")
    return folder


def change(folder: Path, kernels: Mapping[str, Sequence[str]]) -> None:
    (folder / "kernels/registry.py").write_text(f"KERNELS = {dict(kernels)!r}\n{REGISTRY}", encoding="utf-8")


def found(folder: Path) -> dict[str, Finding]:
    return {one.kernel.partition(":")[2]: one for one in ab.gate(folder, "HEAD", None, "cpu")}


def test_the_same_revision_does_not_alarm_and_leaves_no_trace(tmp_path):
    folder = repository(tmp_path)
    assert {one.verdict for one in found(folder).values()} <= {FINE, UNSURE}
    assert git(folder, "status", "--porcelain") == "" and git(folder, "worktree", "list").count("\n") == 1


def test_every_seeded_fault_is_named_and_nothing_else(tmp_path):
    base = {"exp": ("exp",), "renamed": ("exp",)} | dict.fromkeys(SEEDED, ("sin",))
    folder = repository(tmp_path, base)
    change(folder, {"exp": ("exp",), "renamed2": ("exp",)} | {name: ("sin", extra) for name, (extra, *_) in SEEDED.items()})
    said = found(folder)
    assert said["exp"].verdict in (FINE, UNSURE) and (said["renamed"].verdict, said["renamed2"].verdict) == (MISSING, NEW)
    for name, (_, verdict, words) in SEEDED.items():
        assert said[name].verdict == verdict and words in said[name].text, said[name]
    assert git(folder, "status", "--porcelain").split() == ["M", "kernels/registry.py"]


def test_kernels_are_checked_beforehand_each_once_a_side_in_processes_that_end(tmp_path):
    """What a GPU's gate does so that compilers run side by side: here with kernels that tell a file of every call."""
    folder = repository(tmp_path)
    told = tmp_path / "told"
    change(folder, {name: ("exp", f"open({str(told)!r}, 'a').write({name!r} + chr(10))") for name in ("k1", "k2", "k3", "k4")}
           | {"bad5": ("exp", "raise OSError('broken')")})
    assert ab.compiled(folder, folder, "cpu", ["k1", "k2", "k3", "bad5"], 1 << 20, tmp_path / "caches", 2) == 2 * 4
    calls = told.read_text().split()
    assert set(calls) == {"k1", "k2", "k3"} and all(calls.count(name) > 2 for name in set(calls))
    assert ab.compiled(folder, tmp_path / "nothing", "cpu", [], 1 << 20, tmp_path / "caches", 0) == 0, "no core to spare"


def test_a_kernel_is_checked_once_and_timed_in_every_round(tmp_path):
    folder, told = repository(tmp_path), tmp_path / "told"
    change(folder, {"exp": ("exp", f"open({str(told)!r}, 'a').write(str(float(x[0])) + chr(10))")})
    turns = list(ab.rounds(folder, folder, "cpu", ["exp"], times=3))
    assert [one.verdict in (FINE, UNSURE) for findings in turns for one in findings] == [True] * 3
    others = [line for line in told.read_text().split() if line != told.read_text().split()[0]]
    assert len(others) == 2, "other inputs are tried once on each side, not once in each round"


def test_unknown_revision_is_one_line(tmp_path):
    with pytest.raises(ValueError, match="git rev-parse"):
        ab.gate(repository(tmp_path), "nosuch", None, "cpu")


def test_the_worktree_goes_after_ctrl_c(tmp_path):
    folder = repository(tmp_path)
    code = (f"import time; from pathlib import Path; from suite.gate import ab\n"
            f"with ab.worktree(Path({str(folder)!r}), 'HEAD') as tree:\n"
            "    print(tree, flush=True); time.sleep(60)")
    for how in (signal.SIGINT, signal.SIGTERM):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, text=True, **pipes) as one:
            tree = Path(one.stdout.readline().strip())
            assert tree.is_dir()
            one.send_signal(how)
            one.wait(60)
        assert not tree.parent.exists() and git(folder, "worktree", "list").count("\n") == 1


def test_interval_covers_the_median_as_often_as_it_says():
    dice = random.Random(0)
    hits = sum(low <= 1.0 <= high for low, high in (
        ab.interval([dice.lognormvariate(0.0, 0.2) for _ in range(15)], 0.9) for _ in range(2000)))
    assert 0.88 <= hits / 2000 <= 0.98
    assert ab.interval([1.0] * 7, 0.999)[0] == float("-inf") and ab.interval([1.0] * 7, 0.98) == (1.0, 1.0)
    with pytest.raises(ValueError, match="no positive number"):
        ab.interval([1.0, float("nan")], 0.9)


def alarms(shift: float, times: int = 2000) -> float:
    """How often one of pure noise (a tenth, heavy-tailed: one in ten pairs doubled) alarms in one round, at ten kernels."""
    dice = random.Random(1)

    def pair(_: int) -> float:
        return (1 + shift) * dice.lognormvariate(0.0, 0.1) * dice.choice([1] * 8 + [2, 0.5])

    return sum(ab.decide(pair, 0.05, 0.999)[0] == WORSE for _ in range(times)) / times


def test_noise_alone_alarms_rarely():
    assert alarms(0.0, 300) <= 0.01
    assert alarms(0.3, 100) >= 0.95


def test_no_verdict_where_noise_hides_the_answer():
    flips = iter(range(1000))
    assert ab.decide(lambda _: 2.0 if next(flips) % 2 else 0.5, 0.05, 0.99)[0] == UNSURE
