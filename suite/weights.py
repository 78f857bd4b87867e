"""Weights of one rank: leaves that the optimizer sees, and the names that the rest of the world sees.

    member   one tensor of the model by its unsharded name and shape: `layers.0.attention.q.weight` [D, D]
    leaf     what is allocated and trained: the local shards of one or several members, stacked along their first dimension
             (`layers.0.attention.q+k+v.weight`: one product instead of three)

Everything outside the forward pass (initialisation, checkpoints, clipping, resets) goes by members and their `Spec`, so it
does not depend on the layout, the number of ranks or the grouping. Initial values are drawn by counter from (seed, name,
global index): a rank draws only its shard, and every split of a tensor draws the same values.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kernels.philox import fold, normal
from suite.seams import Spec


@dataclass(frozen=True)
class Member:
    """name and shape unsharded; `std` of the initial normal draw, 0 for zeros, None for ones."""

    name: str
    shape: tuple[int, ...]
    std: float | None
    spec: Spec
    leaf: str = ""
    start: int = 0  # first row in the leaf
    rows: int = 0


class Weights:
    """members: in order, each with its spec. groups: names of members that share a leaf, in order."""

    def __init__(self, members: Sequence[Member], groups: Mapping[str, Sequence[str]], *, index: int, size: int,
                 device: torch.device, dtype: torch.dtype):
        self.index, self.size = index, size
        self.members: dict[str, Member] = {}
        self.leaves: dict[str, nn.Parameter] = {}
        leaf_of = {name: leaf for leaf, names in groups.items() for name in names}
        rows: dict[str, int] = {}
        rest: dict[str, tuple[int, ...]] = {}
        for member in members:
            leaf = leaf_of.get(member.name, member.name)
            local = list(member.shape)
            if member.spec.dim is not None:
                local[member.spec.dim] = member.spec.span(member.shape, index, size)[1]
            if rest.setdefault(leaf, tuple(local[1:])) != tuple(local[1:]):
                raise ValueError(f"{member.name}: shape {tuple(local)} does not stack into {leaf}")
            start = rows.get(leaf, 0)
            rows[leaf] = start + local[0]
            self.members[member.name] = Member(member.name, member.shape, member.std, member.spec, leaf, start, local[0])
        for leaf, count in rows.items():
            self.leaves[leaf] = nn.Parameter(torch.empty(count, *rest[leaf], device=device, dtype=dtype))

    def local(self, name: str, of: Callable[[str], Tensor | None] | None = None) -> Tensor:
        """A member's local shard as a view of its leaf; `of(leaf)` gives another tensor of the leaf's shape instead
        (a gradient, an optimizer state)."""
        member = self.members[name]
        whole = self.leaves[member.leaf].data if of is None else of(member.leaf)
        if whole is None:
            raise KeyError(f"{name}: no such tensor")
        return whole.narrow(0, member.start, member.rows)

    def gradient(self, name: str) -> Tensor:
        return self.local(name, lambda leaf: self.leaves[leaf].grad)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        for member in self.members.values():
            here = self.local(member.name)
            if member.std is None or member.std == 0:
                here.fill_(1.0 if member.std is None else 0.0)
                continue
            dim = member.spec.dim or 0
            start, length = member.spec.span(member.shape, self.index, self.size)
            # float64 and float32 runs of one seed start from the same (float32) values
            draw = normal(member.shape, fold(seed, member.name), dim=dim, start=start, length=length, device=here.device)
            here.copy_(draw.mul_(member.std))

    def count(self) -> int:
        """Parameters of the whole model."""
        return sum(math.prod(member.shape) for member in self.members.values())

    def bytes(self) -> int:
        """Bytes of this rank's leaves."""
        return sum(leaf.numel() * leaf.element_size() for leaf in self.leaves.values())

    def copied(self) -> Iterator[tuple[Member, int]]:
        """Sharded members that several neighbouring ranks hold alike, with how many: their gradients are summed over those."""
        for member in self.members.values():
            copies = member.spec.copies(self.size)
            if member.spec.dim is not None and copies > 1:
                yield member, copies

    def partial(self) -> list[Member]:
        """Replicated members whose gradient each rank knows only for its own tokens."""
        return [member for member in self.members.values() if member.spec.partial and self.size > 1]
