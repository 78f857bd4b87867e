"""Scales have the same bits on every device: nothing that makes them divides a tensor by a number, which torch turns into a product
with the reciprocal on a GPU, unless it is a power of two."""
from __future__ import annotations

import math

import pytest
import torch
from torch.overrides import TorchFunctionMode

from kernels import grouped_reference, nvfp4_reference, reference, taco_reference
from suite.comm import int8_tensor, tahquant
from suite.precision import blocks
from suite.seams import Key

DIVISIONS = {"div", "div_", "divide", "true_divide", "__truediv__", "__itruediv__", "__rtruediv__", "__rdiv__", "__div__"}


class Watched(TorchFunctionMode):
    """Keeps the numbers that tensors are divided by, or divide."""

    def __init__(self) -> None:
        super().__init__()
        self.divisions, self.numbers = 0, []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") in DIVISIONS:
            self.divisions += 1
            self.numbers += [x for x in args if isinstance(x, int | float) and abs(math.frexp(x)[0]) != 0.5]
        return function(*args, **(kwargs or {}))


def sent(codec) -> None:
    codec.encode(X, torch.empty(len(X), codec.nbytes(X.shape[1]), dtype=torch.uint8), Key())


X = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
MAKERS = {
    "nvfp4": lambda: nvfp4_reference.nvfp4_quantize(X), "nvfp4 margin": lambda: nvfp4_reference.nvfp4_quantize(X, margin=16 / 17),
    "nvfp4 tensor": lambda: nvfp4_reference.nvfp4_quantize(X, outer="tensor", block=16, signs=3),
    "mxfp8": lambda: reference.mxfp8_rounded(X),
    **{f"taco {mode}": lambda mode=mode: taco_reference.taco_encode(X, mode=mode) for mode in ("lean", "paper", "coarse")},
    **{f"grouped {format}": lambda format=format: grouped_reference.encode(X, format=format) for format in ("e4m3", "int8")},
    **{one.__name__: lambda one=one: sent(one.build()) for one in (int8_tensor, tahquant)},
    **{f"blocks {margin} {outer}": lambda margin=margin, outer=outer: blocks.nvfp4(X, None, margin, outer, 1, lambda amax: amax)
       for margin in (False, True) for outer in (128, "tensor")},
    **{f"blocks mxfp4 {clips}": lambda clips=clips: blocks.mxfp4(X, None, clips) for clips in (False, True)},
    "blocks mxfp8": lambda: blocks.mxfp8(X), **{f"blocks {one}": lambda one=one: blocks.rows(X, one) for one in ("e4m3", "e5m2")},
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_scales_are_made_without_reciprocals(make):
    with Watched() as seen:
        make()
    assert seen.divisions and not seen.numbers, seen.numbers


def test_a_division_by_a_number_is_seen():
    with Watched() as seen:
        _ = X / 6.0, 3.0 / X, X / 4, torch.div(X, X)
        X.clone().div_(7)
    assert seen.divisions >= 5 and sorted(seen.numbers) == [3.0, 6.0, 7]


def test_a_quotient_keeps_shape_and_type():
    row, one = torch.arange(1.0, 4.0), torch.tensor(2.0)
    assert torch.equal(reference.over(row, 3.0), row / 3.0) and torch.equal(reference.over(3.0, row), 3.0 / row)
    assert reference.over(one, 3.0).shape == () and torch.equal(reference.over(row, one), row / 2.0)
