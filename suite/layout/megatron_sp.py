"""megatron-sp: tensor with sequence parallelism (Korthikanti et al., 2022).

As `megatron`, but between sublayers each rank holds its own tokens [T/p, D]: norms and residual sums are not replicated, and
each all-reduce is split into the reduce-scatter that ends a sublayer and the all-gather that begins the next.

    enter    forward: all-gather of n [T, D]        backward: reduce-scatter of dn
    leave    forward: reduce-scatter of y           backward: all-gather of dy

Elements: (2L + 1) all-gathers and (2L + 1) reduce-scatters of T·D each way (the gathered inputs are kept for the weights'
gradients, not gathered again). Once a step the gradients of replicated norms, row-parallel biases and positions, which each
rank knows for its own tokens, are summed. T must divide by p.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from suite.comm.wire import Wire
from suite.layout.megatron import Megatron
from suite.seams import Op, Precision


class MegatronSP(Megatron):
    enter_ops: tuple[Op, Op] = ("all_gather", "reduce_scatter")
    leave_ops: tuple[Op, Op] = ("reduce_scatter", "all_gather")
    embed_backward: Op = "all_gather"
    partial = True

    def tokens_here(self, t: Tensor) -> Tensor:
        if len(t) % self.tp.size:
            raise ValueError(f"{len(t)} tokens do not divide over {self.tp.size} ranks")
        return t.chunk(self.tp.size)[self.tp.index]


def build(recompute: str = "none", *, card: Mapping[str, Any], factor: Any, precision: Precision, tp: Wire) -> MegatronSP:
    return MegatronSP(card=card, factor=factor, precision=precision, tp=tp, recompute=recompute)
