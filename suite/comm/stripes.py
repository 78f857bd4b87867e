"""Where the wires of several ranks lie: kernels that add them read a stack of them, or one after the other at equal distances."""
from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


def apart(wires: Sequence[Tensor]) -> int | None:
    """Bytes from each wire to the next where they lie evenly apart in memory, that of peers too, as two always do; else None."""
    steps = {b.data_ptr() - a.data_ptr() for a, b in pairwise(wires)}
    return steps.pop() if len(steps) == 1 and all(w.stride() == (1,) for w in wires) else None


def stacked(wires: Sequence[Tensor]) -> Tensor:
    """[p, b]: a view where the wires lie one stride apart in one tensor, as those of one message do."""
    first, step = wires[0], wires[1].storage_offset() - wires[0].storage_offset() if len(wires) > 1 else wires[0].numel()
    for number, wire in enumerate(wires):
        if (wire.untyped_storage().data_ptr() != first.untyped_storage().data_ptr() or wire.stride() != (1,)
                or wire.storage_offset() != first.storage_offset() + number * step or step < first.numel()):
            return torch.stack(list(wires))
    return first.as_strided((len(wires), first.numel()), (step, 1))
