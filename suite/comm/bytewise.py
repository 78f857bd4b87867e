"""Collectives over encoded bytes: encode, ship as uint8, decode and add in float32 in rank order on every rank.

n elements, p ranks, e(n) bytes of the codec for n elements (n rounded up to whole groups), Q a quantisation:
    one-shot all-reduce    all-gather Q(x_i);                       y = sum_i Q(x_i)                  sends (p-1) e(n)
    two-shot all-reduce    all-to-all Q(x_i) in p chunks, a = sum;  all-gather Q(a); y = Q(a)         sends 2 (p-1) e(n/p)
    reduce-scatter         all-to-all Q(x_i) in p chunks;           y = sum of own chunk              sends (p-1) e(n/p)
    all-gather             all-gather Q(x_i);                       y = all Q(x_i)                    sends (p-1) e(n)
Each rank decodes its own bytes too, so that all ranks hold equal bits. A statistic `exact` rides behind the codes of an
all-reduce in its own dtype: whole in one shot; in two shots each rank adds up one p-th of it and the second shot spreads it.

An all-reduce may be cut into `depth` slices of whole groups, so that one is encoded while another is on the wire and a third
is decoded; the numbers are those of one slice. Bytes lie in a parcel (suite/comm/transport.py), which the library moves or peers
read. Where ranks read each other's memory and the codec has a kernel for it, a collective of one quantisation is one launch
(`exchanged`), with the same numbers.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from suite.comm.route import PLAIN, Route
from suite.comm.transport import Parcel, Transport
from suite.seams import Codec, Key

SMALL = 32 * 1024  # encoded bytes of a whole tensor below which one shot is sent: two latencies cost more than the bytes
TILE = 64  # groups: slices are multiples, so that no kernel meets a tile in part


@dataclass
class Flight:
    """A message under way, or queued whole where it crosses in one launch: its bytes (whole, and sent by this rank), those of the
    statistic in it, and how it ends."""

    payload: int
    sent: float
    finish: Callable[[], tuple[Tensor, Tensor | None]]
    exact_payload: int = 0
    exact_sent: float = 0.0


@dataclass
class Slice:
    """A part of an all-reduce under way; `land` writes its sum and gives the statistic's."""

    payload: int
    land: Callable[[Tensor], Tensor | None]
    extra: int = 0


def route_of(codec: Codec) -> Route:
    return getattr(codec, "route", PLAIN)


def all_reduce(transport: Transport, codec: Codec, x: Tensor, exact: Tensor | None, key: Key,
               algorithm: str | None = None, owned: bool = False) -> Flight:
    """Sum over ranks of x (any shape) and of `exact` (contiguous float32 or float64, any shape). algorithm: None: the codec's.
    owned: the sum may be written over x, and is x then."""
    p, flat, route = transport.size, x.reshape(-1), route_of(codec)
    size, owned = codec.nbytes(len(flat)), owned and x.is_contiguous()
    algorithm = algorithm or route.algorithm
    if algorithm == "auto":
        algorithm = "one-shot" if p == 2 or size < SMALL else "two-shot"
    if algorithm == "one-shot" and route.depth == 1 and exchanges(transport, codec, x):
        out = flat if owned else torch.empty_like(flat)
        total = exchanged(transport, codec, flat[None], out[None], "all_gather", key, exact)
        extra = 0 if exact is None else exact.nbytes
        return Flight(size, (p - 1.0) * size, lambda: (x if owned else out.view(x.shape), total), extra, (p - 1.0) * extra)
    send, sent = (_one_shot, p - 1.0) if algorithm == "one-shot" else (_two_shot, 2 * (p - 1) / p)
    ends = _cut(len(flat), TILE * p * getattr(codec, "group", 1), route.depth)
    slices = [send(transport, codec, flat[a:b], exact if a == 0 else None,
                   key if a == 0 else replace(key, operand=f"{key.operand} from {a}")) for a, b in pairwise(ends)]

    def finish() -> tuple[Tensor, Tensor | None]:
        out = flat if owned else torch.empty_like(flat)
        with transport.aside(x.device, len(slices)):
            found = [one.land(out[a:b]) for one, (a, b) in zip(slices, pairwise(ends))]
        return x if owned else out.view(x.shape), found[0]

    payload, extra = sum(one.payload for one in slices), slices[0].extra
    return Flight(payload, sent * payload, finish, extra, sent * extra)


def reduce_scatter(transport: Transport, codec: Codec, x: Tensor, dim: int, key: Key) -> Flight:
    """This rank's part along `dim` of the sum over ranks; p divides x.shape[dim]."""
    p = transport.size
    parts = x.unflatten(dim, (p, x.shape[dim] // p)).movedim(dim, 0)  # [p, ...]
    shape, n = parts.shape[1:], parts[0].numel()
    if exchanges(transport, codec, x):
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
        exchanged(transport, codec, parts.reshape(p, n), out.view(1, n), "all_to_all", key)
        return Flight(p * codec.nbytes(n), (p - 1.0) * codec.nbytes(n), lambda: (out, None))
    source = _padded(parts.reshape(p, n), codec)
    parcel = _encoded(transport, codec, source, key)
    parcel.start("all_to_all")

    def finish() -> tuple[Tensor, None]:
        total = torch.empty(source.shape[1], dtype=x.dtype, device=x.device)
        codec.reduce(list(parcel.read()), total)
        parcel.done()
        return total[:n].view(shape), None

    payload = parcel.bytes.numel()
    return Flight(payload, (p - 1) / p * payload, finish)


def all_gather(transport: Transport, codec: Codec, x: Tensor, dim: int, key: Key) -> Flight:
    """The tensors of all ranks, joined along `dim` in rank order."""
    p, n = transport.size, x.numel()
    if exchanges(transport, codec, x):
        out = torch.empty(p, *x.shape, dtype=x.dtype, device=x.device)
        exchanged(transport, codec, x.reshape(1, n), out.view(p, n), "all_gather", key)
        return Flight(p * codec.nbytes(n), (p - 1.0) * codec.nbytes(n), lambda: (joined(out, dim), None))
    source = _padded(x.reshape(1, n), codec)
    parcel = _encoded(transport, codec, source, key)
    parcel.start("all_gather")

    def finish() -> tuple[Tensor, None]:
        out = torch.empty(p, source.shape[1], dtype=x.dtype, device=x.device)
        _decode(codec, parcel.read(), out)
        parcel.done()
        return joined(out[:, :n].view(p, *x.shape), dim), None

    payload = parcel.bytes.numel()
    return Flight(p * payload, (p - 1) * payload, finish)


def exchanges(transport: Transport, codec: Codec, x: Tensor) -> bool:
    """Whether the message is one launch on every rank: ranks read each other's memory, and the codec has a kernel for it."""
    able = getattr(codec, "exchanges", None)
    return able is not None and x.numel() > 0 and route_of(codec).direct and transport.reads_peers(x.device) and able(x)


def exchanged(transport: Transport, codec: Codec, x: Tensor, out: Tensor, op: str, key: Key,
              exact: Tensor | None = None) -> Tensor | None:
    """x [r, n] -> out [1 or p, n] by the codec's own kernel; gives the sum of `exact` over ranks, which crosses as it is."""
    tail = None if exact is None else exact.reshape(-1).view(torch.uint8)
    found = transport.rooms().exchange(codec, x, out, op, key, tail)
    return None if exact is None else _ordered_sum(torch.stack(found).view(exact.dtype)).view(exact.shape)


def joined(stack: Tensor, dim: int) -> Tensor:
    """[p, ...] -> the p tensors concatenated along `dim`."""
    return stack.movedim(0, dim).flatten(dim, dim + 1) if dim else stack.flatten(0, 1)


def _one_shot(transport: Transport, codec: Codec, x: Tensor, exact: Tensor | None, key: Key) -> Slice:
    source = _padded(x[None], codec)
    parcel = _encoded(transport, codec, source, key, None if exact is None else exact.view(1, -1))
    parcel.start("all_gather")
    size = codec.nbytes(source.shape[1])

    def land(out: Tensor) -> Tensor | None:
        wires = parcel.read()
        _whole(out, source.shape[1], lambda whole: codec.reduce([w[:size] for w in wires], whole))
        total = None if exact is None else _ordered_sum(_read(wires, size, exact.dtype)).view(exact.shape)
        parcel.done()
        return total

    return Slice(size, land, parcel.bytes.numel() - size)


def _two_shot(transport: Transport, codec: Codec, x: Tensor, exact: Tensor | None, key: Key) -> Slice:
    p, n, group = transport.size, len(x), getattr(codec, "group", 1)
    width = -(-n // (p * group)) * group  # whole groups, so that they lie alike however a message is cut
    source = _fill(x[None], p * width).view(p, width)
    tail = None
    if exact is not None:
        share = -(-exact.numel() // p)
        tail = _fill(exact.view(1, -1), p * share).view(p, share)
    parcel = _encoded(transport, codec, source, key, tail)
    parcel.start("all_to_all")
    size = codec.nbytes(width)

    def land(out: Tensor) -> Tensor | None:
        wires = parcel.read()
        sums = transport.parcel(1, parcel.bytes.shape[1], x.device, route_of(codec).direct)
        mine = sums.bytes[0]
        codec.reencode([w[:size] for w in wires], width, mine[:size], replace(key, operand=f"{key.operand} sum"))
        if exact is not None:
            mine[size:].copy_(_ordered_sum(_read(wires, size, exact.dtype)).view(torch.uint8))
        parcel.done()
        sums.start("all_gather")
        found = sums.read()
        _whole(out, p * width, lambda whole: _decode(codec, found, whole.view(p, width), size))
        total = None if exact is None else _read(found, size, exact.dtype).reshape(-1)[: exact.numel()].view(exact.shape)
        sums.done()
        return total

    return Slice(p * size, land, parcel.bytes.numel() - p * size)


def _cut(n: int, step: int, depth: int) -> list[int]:
    """Ends of `depth` slices of n elements that are multiples of `step`, the last one aside; fewer where n is small."""
    length = -(-n // (depth * step)) * step
    return [*range(0, n, length), n] if n > length else [0, n]


def _padded(x: Tensor, codec: Codec) -> Tensor:
    """Rows [r, n] filled up with zeros to whole groups: no group of the wire is ever partial."""
    group = getattr(codec, "group", 1)
    return _fill(x, -(-x.shape[1] // group) * group)


def _fill(x: Tensor, width: int) -> Tensor:
    return x if x.shape[1] == width else F.pad(x, (0, width - x.shape[1]))


def _encoded(transport: Transport, codec: Codec, x: Tensor, key: Key, tail: Tensor | None = None) -> Parcel:
    """Rows [r, n], and rows [r, m] that cross as they are -> bytes [r, e(n) + m * itemsize]."""
    size = codec.nbytes(x.shape[1])
    extra = 0 if tail is None else tail.shape[1] * tail.element_size()
    parcel = transport.parcel(x.shape[0], size + extra, x.device, route_of(codec).direct)
    codec.encode(x, parcel.bytes[:, :size], key)
    if tail is not None:
        parcel.bytes[:, size:].copy_(tail.view(torch.uint8))
    return parcel


def _decode(codec: Codec, wires: Tensor | Sequence[Tensor], out: Tensor, size: int | None = None) -> None:
    """wires: the bytes of p ranks, the first `size` of each -> out [p, n]."""
    if isinstance(wires, Tensor):
        codec.decode(wires[:, :size], out)
    else:
        for wire, row in zip(wires, out):
            codec.decode(wire[:size], row)


def _whole(out: Tensor, width: int, write: Callable[[Tensor], None]) -> None:
    """Writes whole groups into `out`, or into room for them where it ends within one."""
    if len(out) == width:
        return write(out)
    whole = torch.empty(width, dtype=out.dtype, device=out.device)
    write(whole)
    out.copy_(whole[: len(out)])
    return None


def _read(wires: Tensor | Sequence[Tensor], start: int, dtype: torch.dtype) -> Tensor:
    """What follows `start` in the bytes of p ranks, at any offset -> values [p, m]."""
    rows = [wire[start:] for wire in wires]
    return torch.stack(rows).view(dtype)


def _ordered_sum(rows: Tensor) -> Tensor:
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total
