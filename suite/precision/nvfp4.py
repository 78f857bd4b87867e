"""nvfp4: NVIDIA's recipe for pretraining in NVFP4 (arXiv 2509.25149, section 4 and appendix; TransformerEngine's defaults).

    Y  = N(X) · N16(W)ᵀ                        N    round to nearest, 1x16 blocks; N16 the same in 16x16 blocks
    dX = S(dY) · N16(W)                        S    stochastic, 1x16 blocks; the weight of the forward serves as it is
    dW = S(H dYᵀ) · N(H Xᵀ)ᵀ                   H    a Hadamard rotation of 16 tokens with one fixed vector of signs

One float32 scale over each tensor, whose amax is a message where tensor parallelism shards it (the wire's `max`, uncompressed
and counted; forward and backward), under E4M3 scales. X is quantised anew for dW, not aligned with what the forward used, and
stochastic operands leave no margin: the scales are plain.

`tail` layers at the end stay in `compute`, about 15 % in NVIDIA's runs; 0 is the arm that TetraJet-v2 compares with (inferred:
"all layers FP4", 16x16 weights). `outer`, `weight`, `hadamard` and `rounding` are ablations.
"""
from __future__ import annotations

from suite.precision.operand import Operand
from suite.precision.recipe import Recipe, Six


def build(params: str = "float32", residual: str = "bfloat16", compute: str = "bfloat16", level: str = "emulated",
          rounding: str = "stochastic", outer: int | str = "tensor", weight: str = "16x16", hadamard: str = "dw",
          tail: int = 0) -> Recipe:
    block = 16 if weight == "16x16" else 1
    near = Operand("nvfp4", outer=outer)
    dx, dw = hadamard == "both", hadamard in ("both", "dw")
    # a rotated or finer-grained weight is no longer the forward's
    q2 = Operand("nvfp4", outer=outer, block=block)
    # at level slab the forward's weight is quantised once more along the other axis, which gives the same values
    q4 = (Operand("none") if level == "emulated" else q2) if block == 16 and not dx else Operand("nvfp4", hadamard=dx, outer=outer)
    six = Six(near, q2, Operand("nvfp4", rounding, dx, outer=outer), q4,
              Operand("nvfp4", rounding, dw, outer=outer), Operand("nvfp4", hadamard=dw, outer=outer))
    return Recipe("nvfp4", six, level=level, compute=compute, params=params, residual=residual, aligned="weight", tail=tail,
                  fixed=True)
