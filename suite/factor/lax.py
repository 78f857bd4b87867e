"""lax: latent crossing, y_l = B_l (A_l x_l + A_(l-1) x_(l-1)) (+ b): the latent of the same map one layer below is added before B
(LaX, 2025, arXiv 2505.21732). The first layer has none below. What crosses is the latent A x itself, not the sum.

LaX offers several gates on what crosses; which one BOOST used is not public. Here it is the identity: no parameters.
The latents of a layer are outputs of its block and inputs of the next, so recomputing segments, which keep what lies inside
them only, is refused.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from suite.factor.lowrank import LowRank


class LaX(LowRank):
    crosses = True

    def between(self, y: Tensor, past: Tensor | None) -> Tensor:
        return y if past is None else y + past


def build(rank: float = 0.25, kv: str = "factored", *, card: Mapping[str, Any]) -> LaX:
    return LaX(card, rank, kv)
