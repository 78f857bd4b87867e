"""One collective timed: runs take turns, a wrong sum is not timed, numbers add up."""
import time
from types import SimpleNamespace

import pytest
import torch
from ranks import run_ranks
from wires import build

from suite.case import Case
from suite.measure import collective, turns
from suite.record import CaseFailed


def test_runs_take_turns_and_only_what_lies_between_the_marks_is_counted():
    order = []
    times = turns.timed(
        {"slow": lambda: (order.append("slow"), time.sleep(0.004)), "fast": lambda: order.append("fast")}, torch.device("cpu"), 3,
        prepare=lambda: (order.append("prepare"), time.sleep(0.004)))
    assert order == ["prepare", "slow", "prepare", "fast"] * (turns.WARM + 3)
    assert [len(t) for t in times.values()] == [3, 3] and min(times["slow"]) >= 0.004 > max(times["fast"])


def study_on(mesh, codec, batch):
    case = Case(model="gpt-tiny", mesh={"tp": 2}, comm=codec, measure="collective", data={"batch": batch}, steps=3)
    outcome = SimpleNamespace(metrics=[], tables={}, phases={}, traffic=[], facts={})
    collective.study(case, mesh, outcome)
    return {m.name: m for m in outcome.metrics}, outcome.traffic


@pytest.mark.parametrize("codec", ["taco", "bf16", "fp64"])
def test_a_collective_is_checked_timed_and_counted(codec):
    (found, traffic), (other, _) = run_ranks(study_on, 2, codec, 1)
    n = 128 * 128
    assert found["message_bytes"].value == 2 * n and sum(t.elements for t in traffic) == n and traffic[0].op == "all_reduce"
    assert 0 <= found["all_reduce_error"].value < (3 if codec == "taco" else 0.3)
    assert found["all_reduce_speedup"].n == 3 and found["all_reduce_gb_per_s"].value > 0
    assert (found["ceiling_one_shot"].value is None) == (found["encode_gb_per_s"].value is None) == (codec != "taco")
    for name in ("reduce_scatter_speedup", "all_gather_speedup"):  # the halves, of 128 tokens on two ranks
        assert (found[name].value is None) == (codec != "taco") and (codec != "taco" or found[name].n == 3)
    assert "copy_gb_per_s" not in other  # steps of a codec are rank 0's
    if codec == "bf16":
        assert found["all_reduce_speedup"].value == 1 and found["all_reduce_gb_per_s"] != found["all_reduce_fp32_gb_per_s"]


def wrong_on(mesh):
    x = torch.ones(4, 64) * (mesh.rank + 1)
    transport = collective.Transport(mesh.group("tp"), collective.Counter())
    assert collective._checked(x, x * 0 + 3, transport).value == 0
    with pytest.raises(CaseFailed, match="the sum is 100 % off: not timed"):
        collective._checked(x, x * 0, transport)
    with pytest.raises(CaseFailed, match="the sum is nan % off"):
        collective._checked(x, x * torch.nan, transport)
    return mesh.rank


def test_a_wrong_sum_is_not_timed():
    assert run_ranks(wrong_on, 2) == [0, 1], "every rank came to the end of its checks"


def test_bandwidth_counts_bytes_read_and_written(monkeypatch):
    monkeypatch.setattr(collective, "timed", lambda runs, device, repeats: {name: [1.0, 1.0] for name in runs})
    x = torch.randn(64, 128, dtype=torch.bfloat16)
    found = {m.name: m.value for m in collective.codec_speed(build("taco"), x, 2)}
    n, wire = 64 * 128, 64 * 132
    assert found["copy_gb_per_s"] == pytest.approx(4 * n / 1e9) and found["encode_gb_per_s"] == pytest.approx((2 * n + wire) / 1e9)
    assert found["codec_gb_per_s"] == found["decode_gb_per_s"] and found["reduce_n2_gb_per_s"] == pytest.approx(1.5 * wire / 1e9)
    assert found["reduce_n8_share"] == pytest.approx(100 * (9 / 8 * wire) / (4 * n))
    assert collective.codec_speed(build("taco"), torch.randn(1, 128), 2)[0].reason == "a message of too few groups"
