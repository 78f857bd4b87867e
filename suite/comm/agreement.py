"""Ranks that hand a collective different tensors: found out before bytes are misread or a rank hangs.

Every rank puts the type and the number of elements of a message into the processes' key-value store and reads those of the
others: no collective, so nothing is counted. Once for each (site's map, operation, way) of a wire: later messages there are of
the same kind.

The store of the default process group is private to torch.distributed: it is touched here alone (tried with torch 2.11 to 2.13).
"""
from __future__ import annotations

import itertools

import torch.distributed as dist
from torch import Tensor

from suite.mesh import Group

_numbers = itertools.count()  # of agreements in this process: the same on every rank, which make the same wires in the same order


class Agreement:
    """Of one wire."""

    def __init__(self, group: Group) -> None:
        self.group, self.number = group, next(_numbers)
        self.known: set[tuple[str, str, str]] = set()

    def differs(self, place: tuple[str, str, str], x: Tensor) -> str | None:
        """How this rank's tensor differs from another's, None where all agree or that was asked before. Every rank calls it."""
        if place in self.known or self.group.handle is None:
            return None
        self.known.add(place)
        store = dist.distributed_c10d._get_default_store()
        mine = f"{str(x.dtype).removeprefix('torch.')} x {x.numel()}"
        key = "/".join(("triaxis", str(self.number), *place))
        store.set(f"{key}/{self.group.ranks[self.group.index]}", mine)
        for rank in self.group.ranks:
            theirs = store.get(f"{key}/{rank}").decode()
            if theirs != mine:
                return f"this rank holds {mine}, rank {rank} holds {theirs}"
        return None
