"""pairwise-heads: as `pairwise`, but heads are sharded where q, k and v meet: a fairer vanilla low-rank baseline.

    q, k, v     forward: reduce-scatter over heads [T, D], twice [T, K/V]      backward: all-gather
    z           forward: all-gather of [T, D] before A_o                       backward: reduce-scatter

K/V heads fewer than ranks: K and V are all-reduced both ways and each rank takes its head. Dense K and V are column-parallel, as
in `megatron`. A norm over all heads of Q and K would need one more meet and is refused.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from suite.comm.wire import Wire
from suite.layout.pairwise import Pairwise
from suite.seams import Op, Precision, Spec


class PairwiseHeads(Pairwise):
    heads_ops: tuple[Op, Op] = ("reduce_scatter", "all_gather")
    core_ops: tuple[Op, Op] = ("all_gather", "reduce_scatter")
    whole_heads = False

    def refuse(self, tokens: int) -> str | None:
        if self.card["qk_norm"]:
            return "a norm over all heads of Q and K needs whole heads: layout pairwise has them"
        return super().refuse(tokens)

    def spec(self, param: str, shape: Sequence[int]) -> Spec:
        *_, name, kind = param.split(".")
        if name == "q" and kind == "bias":
            return Spec(dim=0)
        if name in ("k", "v") and kind in ("weight", "bias"):
            return Spec(dim=0, parts=self.kv_parts)
        return super().spec(param, shape)

    def shared(self, name: str) -> bool:
        """Whether several ranks hold the same head."""
        return name in ("k", "v") and self.card["kv_heads"] < self.tp.size

    def ops_of(self, name: str, ops: tuple[Op, Op]) -> tuple[Op, Op]:
        return ("all_reduce", "all_reduce") if self.shared(name) else ops

    def heads_here(self, name: str, y: Tensor) -> Tensor:
        if not self.shared(name):
            return y
        return y.narrow(-1, self.tp.index * self.kv_parts // self.tp.size * self.head_size, self.head_size)


def build(recompute: str = "none", grouped: bool = True, overlap: bool = False, *, card: Mapping[str, Any], factor: Any,
          precision: Precision, tp: Wire) -> PairwiseHeads:
    return PairwiseHeads(card=card, factor=factor, precision=precision, tp=tp, recompute=recompute, overlap=overlap,
                         grouped=grouped)
