"""Codec error on captured tensors: what is captured at the wire, and numbers that are known otherwise."""
import math
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError
from ranks import run_ranks
from wires import build, mine, wire_on

from suite.case import Case
from suite.measure import captured
from suite.measure.captured import Message, cancellation, errors, histogram, split_error, sum_error, synthetic

GAUSSIAN = torch.randn(256, 1024, generator=torch.Generator().manual_seed(3))


def capture_on(mesh):
    """Sends one message of each kind inside the captured step, and one after it."""
    wire = wire_on(mesh, "bf16")
    x = mine(mesh, 4, 8)

    def step():
        wire.run("all_reduce", x, site=(3, "out"))
        wire.run("all_gather", x, site=(2, "in"), way="backward")
        wire.run("all_reduce", x, site=(-1, "loss"), way="step", purpose="loss")
        wire.run("all_reduce", x, purpose="statistic")

    found = captured.capture(wire, step)
    wire.run("all_reduce", x)
    return [(m.way, m.layer, m.name, m.op, m.parts) for m in found], "start" in vars(wire)


def test_a_capture_holds_what_codecs_would_see_and_the_partial_sums_of_all_ranks():
    for rank, (found, left) in enumerate(run_ranks(capture_on, 2)):
        assert [m[:4] for m in found] == [("forward", 3, "out", "all_reduce"), ("backward", 2, "in", "all_gather")] and not left
        every = [mine(SimpleNamespace(rank=r), 4, 8) for r in (0, 1)]
        assert torch.equal(found[0][4], torch.stack(every)) and torch.equal(found[1][4], every[rank][None])


@pytest.mark.parametrize("codec, options, low, high", [
    ("taco", {}, 2.4, 2.7), ("taco", {"group": 32}, 2.29, 2.49), ("taco", {"format": "e5m2"}, 5.0, 5.3),
    ("taco", {"axis": "token"}, 2.4, 2.7), ("int8-hadamard", {}, 0.6, 0.7), ("bf16", {}, 0.1, 0.2)])
def test_errors_of_a_gaussian_are_those_of_the_paper_notes(codec, options, low, high):
    found = errors(build(codec, **options), GAUSSIAN)
    assert low < found["l2_error"] < high and found["nan"] == 0 and found["nonzero"] == GAUSSIAN.numel()
    assert found["rms"] == pytest.approx(1, rel=0.02) and found["peak"] == GAUSSIAN.abs().max().item()


def test_values_that_a_cast_loses_and_values_that_are_no_numbers_are_counted():
    small = 1e-6 * GAUSSIAN[:2]
    lost = errors(build("fp8-cast"), small)
    assert lost["lost"] == lost["nonzero"] == small.numel() and lost["l2_error"] == 100
    zeros = errors(build("taco"), torch.zeros(2, 128))
    assert (zeros["l2_error"], zeros["nonzero"], zeros["lost"]) == (0, 0, 0)
    assert errors(_Broken(), torch.ones(2, 128))["nan"] == 256


class _Broken:
    native, group = None, 128

    def nbytes(self, n):
        return n

    def encode(self, x, out, key):
        out.zero_()

    def decode(self, wire, out):
        out.fill_(math.nan)


@pytest.mark.parametrize("n", captured.SPLITS)
def test_two_shots_of_independent_parts_cost_3_6_percent_whatever_their_number(n):
    assert 3.3 < split_error(build("taco"), Message("forward", 0, "o", "all_reduce", GAUSSIAN[None]), n) < 3.9
    assert split_error(build("taco"), Message("forward", 0, "o", "all_reduce", GAUSSIAN[None, :1]), n) is None


def test_parts_that_cancel_are_told():
    parts = GAUSSIAN.view(2, -1, 1024)
    assert cancellation(parts) == pytest.approx(1, abs=0.02)
    assert cancellation(torch.stack([parts[0]] * 2)) == pytest.approx(math.sqrt(2))
    close = torch.stack([parts[0], parts[1] * 0.05 - parts[0]])
    assert cancellation(close) < 0.05 and sum_error(build("taco"), close) > 20 and cancellation(torch.zeros(2, 1, 4)) == 0


def test_the_histogram_counts_every_value_once():
    found = histogram(torch.tensor([[8.0, -4.0, 4.0, 0.0, 8.0 * 2.0**-30, 3.9, 8.0 * 2.0**-3, 0.0]]))
    assert sum(found.values()) == pytest.approx(1) and found["zeros"] == 0.25 and found["octave_below"] == 0.125
    assert [found[f"octave_{i}"] for i in range(4)] == [0.125, 0.375, 0.0, 0.125]
    assert histogram(torch.zeros(1, 4))["zeros"] == 1


def test_synthetic_rows_show_what_the_transform_is_for():
    with_h, without = ({m.name: m.value for m in synthetic(build(name), torch.device("cpu"))}
                       for name in ("int8-hadamard", "int8"))
    assert len(with_h) == 2 * len(captured.DRAWS)
    assert with_h["synthetic_heavy_l2_error"] < without["synthetic_heavy_l2_error"]
    assert with_h["synthetic_gaussian_l2_error"] == pytest.approx(without["synthetic_gaussian_l2_error"], rel=0.05)


def study_on(mesh):
    trained = []
    cases = [Case(model="gpt-tiny", mesh={"tp": 2}, comm=c, measure="codec", steps=2) for c in ("taco", "int8")]
    x = mine(mesh, 64, 128)

    def train(case):
        trained.append(case.comm.tp.forward.name)
        wire = wire_on(mesh, "bf16")
        return wire, lambda: [wire.run("all_reduce", x, site=(0, "o"), way=way) for way in ("forward", "backward")]

    outcomes = [SimpleNamespace(metrics=[], tables={}, phases={}) for _ in cases]
    for case, outcome in zip(cases, outcomes):
        captured.study(case, mesh, train, outcome)
    return trained, [({m.name: m for m in o.metrics}, o.tables) for o in outcomes]


def test_cases_that_differ_in_their_codec_share_one_capture_on_plain_wires():
    (trained, both), (_, empty) = run_ranks(study_on, 2)
    assert trained == ["bf16"] and empty[0] == ({}, {})
    (taco, tables), (int8, _) = both
    assert 2.3 < taco["codec_l2_error"].value < 2.8 and taco["codec_l2_error"].n == 2 and taco["codec_bytes"].value == 1.03125
    assert int8["codec_l2_error"].value < 1 and taco["zero_fraction"].value == 0 and taco["true_sum_error"].value > 3
    assert [(r["way"], r["name"]) for r in tables["messages"]] == [("forward", "o"), ("backward", "o")]


@pytest.mark.parametrize("measure", ["codec", "collective"])
def test_a_study_of_one_process_is_refused(measure):
    with pytest.raises(ValidationError, match=f"measure: {measure} needs mesh.tp of at least 2"):
        Case(model="gpt-tiny", measure=measure)
