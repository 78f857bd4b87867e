"""What low-rank factors share: a map d_in -> d_out as A (d_in -> r) and B (r -> d_out), r much smaller than both.

    y = B f(A x) (+ b)      a [r, d_in], b [d_out, r]      f: nothing (svd), SiLU (cola), the previous layer's latent (lax)

Parameters r (d_in + d_out) instead of d_in d_out, FLOPs 2·T·r (d_in + d_out); so fewer only where r < d_in d_out / (d_in + d_out).
Under grouped queries K and V are narrow and a factored one can be larger than the dense map: `kv: dense` keeps both whole.

Initial values (CoLA, its published code): A and B normal with deviation r^(-1/4) (d_in + d_out)^(-1/4), of the dense map's
dimensions, so that an element of BA has deviation (d_in + d_out)^(-1/2). They are drawn unsharded, like all weights.
"""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from suite.seams import Site

KV = ("attention.k", "attention.v")


def width_of(rank: float, hidden: int) -> int:
    """r of an option: at most 1 is a fraction of the hidden size, more a number. Raises ValueError."""
    r = round(rank * hidden) if rank <= 1 else rank
    if r != int(r) or r < 1:
        raise ValueError(f"rank: {rank:g} is neither a fraction of hidden {hidden} nor a whole number")
    if r > hidden:
        raise ValueError(f"rank: {int(r)} is larger than hidden {hidden}")
    return int(r)


class LowRank(ABC):
    crosses = False  # whether a latent goes on to the next layer
    silu = False  # whether f is SiLU, which a kernel can apply
    plain_gate = False  # whether the gate of a feed-forward layer has no activation of its own

    def __init__(self, card: Mapping[str, Any], rank: float, kv: str):
        self.width, self.kv = width_of(rank, card["hidden"]), kv

    def factored(self, site: Site) -> bool:
        return self.kv == "factored" or site[1] not in KV

    def shapes(self, site: Site, d_in: int, d_out: int) -> Mapping[str, tuple[int, int]]:
        """Matrices of the map by name, unsharded."""
        return {"a": (self.width, d_in), "b": (d_out, self.width)} if self.factored(site) else {"weight": (d_out, d_in)}

    def std(self, site: Site, d_in: int, d_out: int, dense: float) -> float:
        """Deviation of the initial values of the map's matrices; `dense`: what the model gives a dense one."""
        return (self.width * (d_in + d_out)) ** -0.25 if self.factored(site) else dense

    def flops(self, site: Site, d_in: int, d_out: int, tokens: int) -> int:
        """Forward FLOPs of the map for `tokens` tokens."""
        return 2 * tokens * (self.width * (d_in + d_out) if self.factored(site) else d_in * d_out)

    @abstractmethod
    def between(self, y: Tensor, past: Tensor | None) -> Tensor:
        """f: the latent A x, and the previous layer's where one crosses, both [T, r] -> what B multiplies."""
