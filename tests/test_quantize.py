"""The cost of quantising: bytes read and written are counted, what differs is not timed, a CPU says what it lacks."""
from types import SimpleNamespace

import pytest
import torch

from kernels import nvfp4_reference
from suite.case import Case
from suite.measure import quantize
from suite.precision.operand import Operand, options
from suite.record import CaseFailed

BACK = Operand("nvfp4", "stochastic", hadamard=True, margin=True)
CPU = SimpleNamespace(device=torch.device("cpu"))


def study(**row) -> dict:
    case = Case(model="gpt-tiny", measure="quantize", data={"batch": 1}, steps=2, **row)
    outcome = SimpleNamespace(metrics=[], phases={})
    quantize.study(case, CPU, outcome)
    return {m.name: m for m in outcome.metrics}


@pytest.mark.parametrize("precision", ["tetrajet", "nvfp4"])
def test_a_cpu_times_the_reference_and_says_what_it_lacks(precision):
    found = study(precision=precision)
    for kind in ("nearest", "back", "transposed"):
        assert found[f"eager_{kind}_gb_per_s"].value > 0 and found[f"eager_{kind}_share"].n == 2
        for way in ("rounded", "packed", "compiled"):
            assert found[f"{way}_{kind}_gb_per_s"].reason == quantize.ABSENT
    assert found["elements"].value == 128 * 512 and found["copy_gb_per_s"].value > 0


@pytest.mark.parametrize("precision", ["bf16", "mxfp4", "fp8"])
def test_a_precision_without_such_operands_is_refused(precision):
    with pytest.raises(CaseFailed, match=f"precision {precision} has no NVFP4 operands"):
        study(precision=precision)


def test_bandwidth_counts_bytes_read_and_written(monkeypatch):
    def timed(runs, device, repeats):
        return {name: [2.0 if name.startswith("compiled") else 1.0] * repeats for name in runs}

    monkeypatch.setattr(quantize, "timed", timed)
    x = torch.zeros(64, 256, dtype=torch.bfloat16)
    runs = dict.fromkeys(("rounded_back", "packed_back", "compiled_back"))
    found = {m.name: m.value for m in quantize.speeds(x, runs, 3)}
    n, q = x.numel(), nvfp4_reference.nvfp4_quantize(x)
    assert found["copy_gb_per_s"] == found["rounded_back_gb_per_s"] == pytest.approx(4 * n / 1e9)
    assert found["packed_back_gb_per_s"] == pytest.approx((2 * n + q.codes.nbytes + q.inner.nbytes + q.outer.nbytes) / 1e9)
    assert found["compiled_back_share"] == pytest.approx(50) and found["rounded_back_speedup"] == 2


@pytest.mark.parametrize(("wrong", "words"), [
    (None, None), ({"codes": lambda t: t ^ 1}, "codes of the kernel differ"),
    ({"outer": lambda t: t * 2}, "outer of the kernel differ"),
    ({"values": lambda t: t * 2}, "values of the kernel differ")])
@pytest.mark.parametrize("turned", [False, True])
def test_what_differs_is_not_timed(wrong, words, turned):
    x = torch.randn(384, 384).bfloat16()
    x = x.t() if turned else x

    def broken(name, t):
        return (wrong or {}).get(name, lambda same: same)(t)

    def quantise(*arguments, **more):
        q = nvfp4_reference.nvfp4_quantize(*arguments, **more)
        return nvfp4_reference.Quantized(broken("codes", q.codes), q.inner, broken("outer", q.outer), q.columns)

    def rounded(*arguments, **more):
        return broken("values", nvfp4_reference.nvfp4_rounded(*arguments, **more))

    kernels = SimpleNamespace(quantize=quantise, rounded=rounded)
    if wrong is None:
        return quantize._checked(BACK, x, options(BACK, 1, 2), kernels)
    with pytest.raises(CaseFailed, match=words):
        quantize._checked(BACK, x, options(BACK, 1, 2), kernels)


def test_several_processes_are_refused():
    with pytest.raises(ValueError, match="measure: quantize runs on one process"):
        Case(model="gpt-tiny", measure="quantize", precision="tetrajet", mesh={"tp": 2})
