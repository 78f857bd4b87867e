"""tetrajet: TetraJet-v2 (arXiv 2510.27527), NVFP4 for every operand of every product of the blocks' linear maps.

    Y  = Q1(X) · Q2(W)ᵀ                  N    round to nearest, ties to the even code
    dX = Q3(H dY) · Q4(H Ŵᵀ)ᵀ            S    stochastic, each operand with noise of its own
    dW = Q5(H dYᵀ) · Q6(H X̂ᵀ)ᵀ           H    16 elements of the contraction rotated, ±1 signs new for every product

    Q1 = Q2 = N          Q3 .. Q6 = S          X̂, Ŵ: what Q1 and Q2 gave, dequantised

Double-block scales: E2M1 codes, an E4M3 scale over 16 elements of the contraction, a float32 scale over 128. H is orthogonal and
the same for both operands, scales do not depend on the noise and X̂, Ŵ are what the forward multiplied, so that over the noise
E[dX] = dY Ŵ and E[dW] = dYᵀ X̂: the straight-through gradient of the quantised forward. Two conditions, which the authors' release
does not strictly meet, are on by default: no code clips (`margin`: both scales aim at 16/17 of the largest code, Q3 to Q6) and the
two operands of a product draw different noise (`noise`).

Saved for backward: X̂ [T, d_in] and Ŵ [d_out, d_in] dequantised. Where the release saves their FP4 transposes, Q4 and Q6 run in
backward here, which gives the same under activation recompute. Not quantised: embedding, head, norms, attention itself.
Evaluation runs the quantised forward.

Two parts: OutControl (`out*`, suite/precision/outcontrol.py) keeps the loudest input channels in FP8, OsciReset (`osci*`,
suite/precision/oscireset.py) sets weights that swing between codes back onto their code. `out: 0, osci: 0` is TetraJet-v2-base.

Ablations (the paper's table 8, and where its release departs from it): `weight: 16x16`; `aligned: weight` leaves X̂ out of dW;
`hadamard: dw` leaves dX unrotated; `rounding`, `margin`, `noise`, `outer`. `quantiser: compiled` or `eager` makes operands by the
plain-torch reference, to time a step against.
"""
from __future__ import annotations

from typing import Any

from suite.precision.operand import Operand
from suite.precision.oscireset import OsciReset
from suite.precision.outcontrol import OutControl
from suite.precision.recipe import Recipe, Six


class TetraJet(Recipe):
    def __init__(self, six: Six, out: dict[str, Any], osci: dict[str, Any], **options: Any):
        super().__init__("tetrajet", six, **options)
        self.out, self.osci = out, osci

    def parts(self, weights: Any, layout: Any) -> list[Any]:
        """OutControl, OsciReset (where they are on) and what every recipe has."""
        control = OutControl(weights, layout, self, **self.out) if self.out["ratio"] else None
        reset = OsciReset(weights, layout, self, control, **self.osci) if self.osci["tau"] else None
        return [part for part in (control, reset) if part is not None] + super().parts(weights, layout)


def build(params: str = "float32", residual: str = "bfloat16", compute: str = "bfloat16", level: str = "emulated",
          rounding: str = "stochastic", outer: int | str = 128, weight: str = "1x16", aligned: str = "both",
          hadamard: str = "both", margin: bool = True, noise: str = "independent", out: float = 0.1, out_start: float = 0.04,
          out_steps: int = 50, out_count: str = "round", out_order: str = "norm", out_select: str = "shard", osci: float = 8.0,
          osci_start: float = 0.64, osci_period: int = 200, osci_window: int = 50, osci_share: float = 1.0,
          quantiser: str = "kernels") -> TetraJet:
    dx, dw = (Operand("nvfp4", rounding, on, margin and rounding == "stochastic", outer)
              for on in (hadamard == "both", hadamard in ("both", "dw")))
    six = Six(Operand("nvfp4", outer=outer), Operand("nvfp4", outer=outer, block=16 if weight == "16x16" else 1), dx, dx, dw, dw)
    return TetraJet(
        six, {"ratio": out, "start": out_start, "steps": out_steps, "count": out_count, "order": out_order, "select": out_select},
        {"tau": osci, "start": osci_start, "period": osci_period, "window": osci_window, "share": osci_share},
        level=level, compute=compute, params=params, residual=residual, aligned=aligned, shared=noise == "shared",
        quantiser=quantiser)
