"""Bytes over NVLink without a collective of the library: each rank writes its own memory and reads that of the others.

    room     a slot of symmetric memory, the same on every rank: the message is encoded straight into it
    start    an event: the message is written
    read     a barrier on the device: all have written. The kernel that decodes and adds loads the peers' bytes itself, so that
             they are moved once and stored nowhere

A slot is written again once a barrier lies behind the reads of its last message: a rank that passed it knows that all others
have read. Which slot a message gets depends on the order of calls alone, which is the same on every rank. Bytes sent: what
the library's all-gather or all-to-all would send.

exchange     a codec with a kernel for the whole collective does all of that in one launch (kernels/exchange.py): it writes one
             of two slots in turn, and the meeting of its programs lies between the reads of a slot and its next writing.
             A CUDA graph of messages is replayed in order with all others, and behind a collective of the library, as its first
             message may write what its last one still reads

torch.distributed._symmetric_memory is private and moves: it is touched here alone (tried with torch 2.11). Plain peer
buffers, no multicast. It needs NCCL ranks of one host that reach each other's memory; `usable` says why not.
"""
from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from kernels.wires import slot as slot_stride
from suite.comm.counter import Counter
from suite.mesh import Group
from suite.seams import Codec, Key

ALIGNED = 256


def usable(group: Group, device: torch.device) -> str | None:
    """Why ranks cannot read each other's memory, None where they can. It says the same on every rank of a host."""
    if device.type != "cuda" or group.handle is None or group.staged or dist.get_backend(group.handle) != "nccl":
        return "needs NCCL ranks, a GPU each"
    if os.environ.get("NCCL_P2P_DISABLE", "0") not in ("", "0"):
        return "the link forbids peer access (NCCL_P2P_DISABLE)"
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) < dist.get_world_size():
        return "ranks of several hosts"
    others = [i for i in range(int(os.environ["LOCAL_WORLD_SIZE"])) if i != device.index]
    if not all(torch.cuda.can_device_access_peer(device.index, i) for i in others):
        return "no peer access between the GPUs"
    return None


@dataclass
class Slot:
    """Symmetric memory of one message at a time. `free`: barriers behind which it may be written again, None: in use."""

    whole: Tensor
    handle: object
    free: int | None = -1


@dataclass
class Turn:
    """Slots of one size that exchanges write in turn, and where they lie on each rank: int64 [p]."""

    slots: list[Slot]
    places: list[Tensor]
    next: int = 0


@dataclass
class Rooms:
    """The slots of one group. `barriers`: how many were enqueued so far."""

    group: Group
    counter: Counter
    barriers: int = 0
    slots: dict[int, list[Slot]] = field(default_factory=dict)
    turns: dict[int, Turn] = field(default_factory=dict)
    raised: Slot | None = None  # this rank's flags
    flags: Tensor | None = None  # int64 [p]: where each rank's lie
    stream: torch.cuda.Stream | None = None  # of the last exchange: they follow each other

    def exchange(self, codec: Codec, x: Tensor, out: Tensor, op: str, key: Key, tail: Tensor | None = None) -> list[Tensor]:
        """x [r, n] of this rank -> out [1 or p, n] by the codec's kernel; `tail`: bytes that cross as they are -> those of all
        ranks where they lie, until the next exchange but one. Collective where a size is new."""
        x = x if x.stride(-1) == 1 else x.contiguous()
        p, row = self.group.size, slot_stride(codec.nbytes(x.shape[1]))
        codes, extra = len(x) * row, 0 if tail is None else tail.numel()
        nbytes = -(-(codes + extra) // ALIGNED) * ALIGNED
        turn = self.turns.get(nbytes) or self._turn(nbytes, x.device)
        stream = torch.cuda.current_stream()
        if stream != self.stream:
            if self.stream is not None and not torch.cuda.is_current_stream_capturing():
                stream.wait_stream(self.stream)
            self.stream = stream
        self.counter.message(f"direct_{op}", (p if op == "all_gather" else len(x)) * (codec.nbytes(x.shape[1]) + extra), p)
        slot, places = turn.slots[turn.next], turn.places[turn.next]
        turn.next = 1 - turn.next
        if tail is not None:
            slot.whole[codes : codes + extra].copy_(tail)
        codec.exchange(x, out, places, self.flags, self.group.index, key)
        return [] if tail is None else [slot.handle.get_buffer(r, (extra,), torch.uint8, codes) for r in range(p)]

    @property
    def nbytes(self) -> int:
        """Symmetric memory of this rank, which torch's statistics of memory do not see."""
        slots = [*chain(*self.slots.values()), *chain(*(turn.slots for turn in self.turns.values()))]
        return sum(slot.whole.nbytes for slot in slots) + (self.raised.whole.nbytes if self.raised else 0)

    def _turn(self, nbytes: int, device: torch.device) -> Turn:
        if self.flags is None:
            from kernels.exchange import ROUNDS, WIDTH

            self.raised = self._symmetric(4 * ROUNDS * WIDTH * self.group.size, device)
            self.raised.whole.zero_()
            self.flags = self._places(self.raised)
            self.raised.handle.barrier()
        slots = [self._symmetric(nbytes, device) for _ in range(2)]
        self.turns[nbytes] = Turn(slots, [self._places(slot) for slot in slots])
        return self.turns[nbytes]

    def _places(self, slot: Slot) -> Tensor:
        return torch.tensor(slot.handle.buffer_ptrs, dtype=torch.int64, device=slot.whole.device)

    def _symmetric(self, nbytes: int, device: torch.device) -> Slot:
        import torch.distributed._symmetric_memory as symmetric

        whole = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
        return Slot(whole, symmetric.rendezvous(whole, self.group.handle))

    def take(self, rows: int, size: int, device: torch.device) -> Message:
        """Room for [rows, size] bytes. Collective where no slot is free."""
        nbytes = -(-rows * size // ALIGNED) * ALIGNED
        held = self.slots.setdefault(nbytes, [])
        slot = next((s for s in held if s.free is not None and s.free < self.barriers), None)
        if slot is None:
            slot = self._symmetric(nbytes, device)
            held.append(slot)
        slot.free = None
        return Message(self, slot, rows, size)


@dataclass
class Message:
    """Bytes [rows, size] to be encoded into, started, read and given back, as suite.comm.transport.Parcel."""

    rooms: Rooms
    slot: Slot
    rows: int
    size: int
    op: str = ""
    written: torch.cuda.Event | None = None

    @property
    def bytes(self) -> Tensor:
        return self.slot.whole[: self.rows * self.size].view(self.rows, self.size)

    def start(self, op: Literal["all_gather", "all_to_all"]) -> None:
        """What was enqueued so far wrote the bytes."""
        self.op, self.written = op, torch.cuda.Event()
        self.written.record()

    def read(self) -> Sequence[Tensor]:
        """The wires of all ranks where they lie, once all have written them; in the current stream."""
        group = self.rooms.group
        self.rooms.counter.message(f"direct_{self.op}", self.size * group.size, group.size)
        torch.cuda.current_stream().wait_event(self.written)
        self.slot.handle.barrier()
        self.rooms.barriers += 1
        offset = group.index * self.size if self.op == "all_to_all" else 0
        return [self.slot.handle.get_buffer(rank, (self.size,), torch.uint8, offset) for rank in range(group.size)]

    def done(self) -> None:
        self.slot.free = self.rooms.barriers
