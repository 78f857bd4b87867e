"""fp8: E4M3 for every operand with one float32 scale a row, the usual way to train in FP8 (torchao's row-wise recipe).

    Y = R(X) · R(W)ᵀ          dX = R(dY) · R(Wᵀ)ᵀ          dW = R(dYᵀ) · R(Xᵀ)ᵀ

R scales each row, along the contraction, by amax / 448 and rounds to nearest. Every operand is made of the original tensor, so X
[T, d_in] is saved as it is. `gradient: e5m2` gives dY the wider format (57344).

On tensor cores that have FP8 (sm_89 and later) a product is torch's scaled matrix multiply with float32 sums, and its time is
measured; elsewhere codes are multiplied in float32 and scaled afterwards, which is the same arithmetic, and its time is
`emulated`. Where the contraction is sharded, each rank scales its own part of a row.
"""
from __future__ import annotations

from suite.precision.operand import Operand
from suite.precision.recipe import Recipe, Six


def build(params: str = "float32", residual: str = "bfloat16", compute: str = "bfloat16", gradient: str = "e4m3") -> Recipe:
    one, grad = Operand("e4m3"), Operand(gradient)
    return Recipe("fp8", Six(one, one, grad, one, grad, one), compute=compute, params=params, residual=residual, aligned="none")
