"""mxfp4: TetraJet, the first version (arXiv 2502.20853): MXFP4 for all six operands.

    Y = N(X) · N(W)ᵀ          dX = S(dY) · S(N(W)ᵀ)ᵀ          dW = S(dYᵀ) · S(N(X)ᵀ)ᵀ

E2M1 codes with one power of two over 32 elements; N rounds to nearest, S stochastically; both backward products requantise what
the forward used; no rotation. The scale is 2^ceil(log2(amax / 6)), under which nothing clips, so that S is unbiased; `scale: floor`
is OCP's 2^(floor(log2(amax)) - 2), under which up to a quarter of the largest binade clips.
"""
from __future__ import annotations

from suite.precision.operand import Operand
from suite.precision.recipe import Recipe, Six


def build(params: str = "float32", residual: str = "bfloat16", compute: str = "bfloat16", level: str = "emulated",
          rounding: str = "stochastic", scale: str = "ceil", aligned: str = "both") -> Recipe:
    near, back = (Operand("mxfp4", how, margin=scale == "ceil") for how in ("nearest", rounding))
    return Recipe("mxfp4", Six(near, near, back, back, back, back), level=level, compute=compute, params=params, residual=residual,
                  aligned=aligned)
