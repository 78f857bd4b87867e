"""dense: one matrix. y = x Wᵀ (+ b), W [d_out, d_in]; 2·T·d_in·d_out FLOPs forward for T tokens."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from suite.seams import Site


class Dense:
    crosses = False
    plain_gate = False

    def factored(self, site: Site) -> bool:
        return False

    def shapes(self, site: Site, d_in: int, d_out: int) -> Mapping[str, tuple[int, int]]:
        """Matrices of the map by name, unsharded."""
        return {"weight": (d_out, d_in)}

    def std(self, site: Site, d_in: int, d_out: int, dense: float) -> float:
        """Deviation of the initial values: what the model gives a dense map."""
        return dense

    def flops(self, site: Site, d_in: int, d_out: int, tokens: int) -> int:
        """Forward FLOPs of the map for `tokens` tokens."""
        return 2 * tokens * d_in * d_out


def build(*, card: Mapping[str, Any] | None = None) -> Dense:
    return Dense()
