"""dense: one matrix. y = x Wᵀ (+ b), W [d_out, d_in]; 2·T·d_in·d_out FLOPs forward for T tokens."""
from __future__ import annotations

from collections.abc import Mapping

from suite.seams import Site


class Dense:
    def shapes(self, site: Site, d_in: int, d_out: int) -> Mapping[str, tuple[int, int]]:
        """Matrices of the map by name, unsharded."""
        return {"weight": (d_out, d_in)}

    def flops(self, site: Site, d_in: int, d_out: int, tokens: int) -> int:
        """Forward FLOPs of the map for `tokens` tokens."""
        return 2 * tokens * d_in * d_out


def build() -> Dense:
    return Dense()
