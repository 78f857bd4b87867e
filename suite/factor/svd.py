"""svd: two factors and nothing between them, y = B A x (+ b). The feed-forward layer keeps its activation."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from suite.factor.lowrank import LowRank


class SVD(LowRank):
    def between(self, y: Tensor, past: Tensor | None) -> Tensor:
        return y


def build(rank: float = 0.25, kv: str = "factored", *, card: Mapping[str, Any]) -> SVD:
    return SVD(card, rank, kv)
