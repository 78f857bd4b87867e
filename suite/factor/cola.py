"""cola: SiLU at the bottleneck, y = B silu(A x) (+ b) (CoLA, Liu et al., 2025, arXiv 2502.10940).

    gated feed-forward      down(gate(x) · up(x))           `gate: plain`, as CoLA from 350M on and BOOST
                            down(silu(gate(x)) · up(x))     `gate: activated`, as CoLA's 60M and 130M
    GPT's                   down(gelu(up(x)))               its GELU stays beside the SiLU at the bottlenecks
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from suite.factor.lowrank import LowRank


class CoLA(LowRank):
    silu = True

    def __init__(self, card: Mapping[str, Any], rank: float, kv: str, gate: str):
        super().__init__(card, rank, kv)
        self.plain_gate = gate == "plain"

    def between(self, y: Tensor, past: Tensor | None) -> Tensor:
        return F.silu(y)


def build(rank: float = 0.25, kv: str = "factored", gate: str = "plain", *, card: Mapping[str, Any]) -> CoLA:
    return CoLA(card, rank, kv, gate)
