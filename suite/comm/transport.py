"""The only file that calls torch.distributed's collectives: tensors in, handles out, every message told to the counter.

Three roads with one face: CPU tensors over gloo, CUDA tensors over NCCL, CUDA tensors over gloo (ranks that share a
GPU), which cross through pinned host memory. Groups of one process and empty tensors make no call. Encoded bytes have a fourth:
peers that reach each other's memory read it themselves (suite/comm/direct.py).

Tried with torch 2.11 to 2.13. `all_gather_single` and `reduce_scatter_single` replace the `..._tensor` names that warn in
2.13. gloo (2.13, CPU) adds, gathers, scatters and exchanges float16/32/64, bfloat16 and integers; it refuses float8,
which therefore crosses as uint8 everywhere.
"""
from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from suite.comm import direct
from suite.comm.counter import Counter
from suite.mesh import Group

_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
_reduce_scatter = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor
_SUMS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


@dataclass
class Handle:
    """A collective under way. `out` may be read after `wait`; `held` keeps its input alive until then."""

    out: Tensor
    work: Any = None
    held: Tensor | None = None
    device: torch.device | None = None  # where the result goes, if it arrives in host memory
    own: int | None = None  # a row of `held` that belongs into the result

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
            if self.own is not None:
                self.out[self.own].copy_(self.held[self.own])
            self.work = self.held = None
        return self.out if self.device is None else self.out.to(self.device)


@dataclass
class Parcel:
    """Bytes [r, b] to be written, started, read on every rank, and given back. A direct one: suite.comm.direct.Message."""

    transport: Transport
    bytes: Tensor
    handle: Handle | None = None

    def start(self, op: Literal["all_gather", "all_to_all"]) -> None:
        """all_gather: row 0 goes to all ranks. all_to_all: row i goes to rank i."""
        self.handle = self.transport.all_gather(self.bytes[0]) if op == "all_gather" else self.transport.all_to_all(self.bytes)

    def read(self) -> Tensor | Sequence[Tensor]:
        """[p, b] in rank order."""
        return self.handle.wait()

    def done(self) -> None:
        self.handle = None


class Transport:
    """Moves tensors over one group. All inputs are contiguous; p is the group's size."""

    def __init__(self, group: Group, counter: Counter) -> None:
        self.group, self.counter = group, counter
        self.size, self.index = group.size, group.index
        self._rooms: direct.Rooms | None = None
        self._near_peers: bool | None = None
        self._side: torch.cuda.Stream | None = None

    def parcel(self, rows: int, size: int, device: torch.device, peers: bool = True) -> Parcel | direct.Message:
        """Room for [rows, size] encoded bytes; peers: in memory that they read, where the link allows."""
        if peers and self.reads_peers(device):
            return self.rooms().take(rows, size, device)
        return Parcel(self, torch.empty(rows, size, dtype=torch.uint8, device=device))

    def rooms(self) -> direct.Rooms:
        """Memory that peers read; where `reads_peers` alone."""
        if self._rooms is None:
            self._rooms = direct.Rooms(self.group, self.counter)
        self._rooms.counter = self.counter
        return self._rooms

    @property
    def symmetric_bytes(self) -> int:
        """Memory that peers read, beside what torch's allocator holds."""
        return self._rooms.nbytes if self._rooms else 0

    def reads_peers(self, device: torch.device) -> bool:
        """Whether parcels are read where they lie."""
        if self._near_peers is None:
            self._near_peers = self.size > 1 and direct.usable(self.group, device) is None
        return self._near_peers

    def overlaps(self, device: torch.device) -> bool:
        """Whether slices of a message can be encoded, be under way and be decoded at the same time."""
        return device.type == "cuda" and not self.group.staged

    @contextlib.contextmanager
    def aside(self, device: torch.device, slices: int) -> Iterator[None]:
        """Reading in a stream of its own, so that what is encoded meanwhile need not wait for it; joined at the end."""
        if slices == 1 or not self.overlaps(device):
            yield
            return
        if self._side is None:
            self._side = torch.cuda.Stream(device)
        here = torch.cuda.current_stream(device)
        with torch.cuda.stream(self._side):
            yield
        here.wait_stream(self._side)

    def all_reduce(self, x: Tensor, how: Literal["sum", "max"] = "sum") -> Handle:
        """Sum or maximum over ranks, equal bits on all of them. `x` is overwritten where it is not staged."""
        if self._alone(x):
            return Handle(x)
        buffer = self._near(x)
        self._tell("all_reduce", buffer)
        return self._far(x, buffer, dist.all_reduce(buffer, _SUMS[how], group=self.group.handle, async_op=True))

    def all_gather(self, x: Tensor) -> Handle:
        """[...] of each rank -> [p, ...], in rank order."""
        if self._alone(x):
            return Handle(x.new_empty(self.size, *x.shape) if x.numel() == 0 else x[None])
        source = self._near(x)
        out = self._new(source, (self.size, *x.shape))
        self._tell("all_gather", out)
        return self._far(x, out, _all_gather(out.view(-1), source.view(-1), group=self.group.handle, async_op=True), source)

    def reduce_scatter(self, x: Tensor) -> Handle:
        """[p, ...] of each rank -> [...], the sum of what all ranks hold at this rank's index."""
        if self._alone(x):
            return Handle(x[0])
        source = self._near(x)
        out = self._new(source, x.shape[1:])
        self._tell("reduce_scatter", source)
        return self._far(x, out, _reduce_scatter(out.view(-1), source.view(-1), group=self.group.handle, async_op=True), source)

    def all_to_all(self, x: Tensor) -> Handle:
        """[p, ...] of each rank -> [p, ...]: row i of the result is what rank i held for this rank.

        Between two ranks that is an all-gather of what each holds for the other: the library's all-to-all is pairs of sends and
        receives, which over sockets take longer than its rings."""
        if self._alone(x):
            return Handle(x)
        source = self._near(x)
        out = self._new(source, x.shape)
        if self.size == 2:
            self._tell("all_gather", out)
            work = _all_gather(out.view(-1), source[1 - self.index].view(-1), group=self.group.handle, async_op=True)
            return replace(self._far(x, out, work, source), own=self.index)
        self._tell("all_to_all", source)
        return self._far(x, out, dist.all_to_all_single(out, source, group=self.group.handle, async_op=True), source)

    def barrier(self) -> None:
        """Returns once every rank of the group has come here."""
        if self.size > 1:
            self.counter.message("barrier", 0, self.size)
            dist.barrier(self.group.handle)

    def _alone(self, x: Tensor) -> bool:
        return self.size == 1 or x.numel() == 0

    def _tell(self, op: str, whole: Tensor) -> None:
        self.counter.message(op, whole.nbytes, self.size)

    def _near(self, x: Tensor) -> Tensor:
        """`x` where the library can read it."""
        if not self.group.staged:
            return x
        return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x)

    def _new(self, source: Tensor, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=source.dtype, device=source.device, pin_memory=self.group.staged)

    def _far(self, x: Tensor, out: Tensor, work: Any, held: Tensor | None = None) -> Handle:
        return Handle(out, work, held, x.device if self.group.staged else None)
