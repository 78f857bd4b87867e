"""Collectives over encoded bytes: encode, ship as uint8, decode and add in float32 in rank order on every rank.

n elements, p ranks, e(n) bytes of the codec for n elements (n rounded up to whole groups), Q a quantisation:
    one-shot all-reduce    all-gather Q(x_i);                       y = sum_i Q(x_i)                  sends (p-1) e(n)
    two-shot all-reduce    all-to-all Q(x_i) in p chunks, a = sum;  all-gather Q(a); y = Q(a)         sends 2 (p-1) e(n/p)
    reduce-scatter         all-to-all Q(x_i) in p chunks;           y = sum of own chunk              sends (p-1) e(n/p)
    all-gather             all-gather Q(x_i);                       y = all Q(x_i)                    sends (p-1) e(n)
Each rank decodes its own bytes too, so that all ranks hold equal bits. A statistic `exact` rides behind the codes of an
all-reduce in its own dtype: whole in one shot; in two shots each rank adds up one p-th of it and the second shot spreads it.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from suite.comm.transport import Transport
from suite.seams import Codec, Key

SMALL = 32 * 1024  # encoded bytes of a whole tensor below which one shot is sent: two latencies cost more than the bytes


@dataclass
class Flight:
    """A message under way: its bytes (whole, and sent by this rank), those of the statistic in it, and how it ends."""

    payload: int
    sent: float
    finish: Callable[[], tuple[Tensor, Tensor | None]]
    exact_payload: int = 0
    exact_sent: float = 0.0


def all_reduce(transport: Transport, codec: Codec, x: Tensor, exact: Tensor | None, key: Key) -> Flight:
    """Sum over ranks of x (any shape) and of `exact` (contiguous float32 or float64, any shape)."""
    algorithm = getattr(codec, "algorithm", "auto")
    if algorithm == "auto":
        small = codec.nbytes(x.numel()) < SMALL
        algorithm = "one-shot" if transport.size == 2 or small else "two-shot"
    return (_one_shot if algorithm == "one-shot" else _two_shot)(transport, codec, x, exact, key)


def reduce_scatter(transport: Transport, codec: Codec, x: Tensor, dim: int, key: Key) -> Flight:
    """This rank's part along `dim` of the sum over ranks; p divides x.shape[dim]."""
    p = transport.size
    parts = x.unflatten(dim, (p, x.shape[dim] // p)).movedim(dim, 0)  # [p, ...]
    shape, n = parts.shape[1:], parts[0].numel()
    source = _padded(parts.reshape(p, n), codec)
    message = _encode(codec, source, key)
    handle = transport.all_to_all(message)

    def finish() -> tuple[Tensor, None]:
        total = torch.empty(source.shape[1], dtype=torch.float32, device=x.device)
        codec.reduce(handle.wait().unbind(), total)
        return total[:n].view(shape).to(x.dtype), None

    return Flight(message.numel(), (p - 1) / p * message.numel(), finish)


def all_gather(transport: Transport, codec: Codec, x: Tensor, dim: int, key: Key) -> Flight:
    """The tensors of all ranks, joined along `dim` in rank order."""
    p, n = transport.size, x.numel()
    source = _padded(x.reshape(1, n), codec)
    message = _encode(codec, source, key)
    handle = transport.all_gather(message[0])

    def finish() -> tuple[Tensor, None]:
        out = torch.empty(p, source.shape[1], dtype=x.dtype, device=x.device)
        codec.decode(handle.wait(), out)
        return joined(out[:, :n].view(p, *x.shape), dim), None

    return Flight(p * message.numel(), (p - 1) * message.numel(), finish)


def joined(stack: Tensor, dim: int) -> Tensor:
    """[p, ...] -> the p tensors concatenated along `dim`."""
    return stack.movedim(0, dim).flatten(dim, dim + 1) if dim else stack.flatten(0, 1)


def _one_shot(transport: Transport, codec: Codec, x: Tensor, exact: Tensor | None, key: Key) -> Flight:
    p, n = transport.size, x.numel()
    source = _padded(x.reshape(1, n), codec)
    tail = None if exact is None else exact.view(1, -1)
    message = _encode(codec, source, key, tail)
    handle = transport.all_gather(message[0])
    size = codec.nbytes(source.shape[1])

    def finish() -> tuple[Tensor, Tensor | None]:
        wires = handle.wait()
        total = torch.empty(source.shape[1], dtype=torch.float32, device=x.device)
        codec.reduce(wires[:, :size].unbind(), total)
        y = total[:n].view(x.shape).to(x.dtype)
        return y, None if exact is None else _ordered_sum(_read(wires[:, size:], exact.dtype)).view(exact.shape)

    extra = message.numel() - size
    return Flight(size, (p - 1) * size, finish, extra, (p - 1) * extra)


def _two_shot(transport: Transport, codec: Codec, x: Tensor, exact: Tensor | None, key: Key) -> Flight:
    p, n = transport.size, x.numel()
    chunk = -(-n // p)
    source = _padded(_fill(x.reshape(1, n), p * chunk).view(p, chunk), codec)
    tail = None
    if exact is not None:
        share = -(-exact.numel() // p)
        tail = _fill(exact.view(1, -1), p * share).view(p, share)
    message = _encode(codec, source, key, tail)
    handle = transport.all_to_all(message)
    width, size = source.shape[1], codec.nbytes(source.shape[1])

    def finish() -> tuple[Tensor, Tensor | None]:
        wires = handle.wait()
        mine = torch.empty_like(wires[0])
        codec.reencode(wires[:, :size].unbind(), width, mine[:size], replace(key, operand=f"{key.operand} sum"))
        if exact is not None:
            mine[size:].copy_(_ordered_sum(_read(wires[:, size:], exact.dtype)).view(torch.uint8))
        sums = transport.all_gather(mine).wait()
        out = torch.empty(p, width, dtype=x.dtype, device=x.device)
        codec.decode(sums[:, :size], out)
        y = out[:, :chunk].reshape(-1)[:n].view(x.shape)
        if exact is None:
            return y, None
        return y, _read(sums[:, size:], exact.dtype).reshape(-1)[: exact.numel()].view(exact.shape)

    extra, ring = message.numel() - p * size, 2 * (p - 1) / p
    return Flight(p * size, ring * p * size, finish, extra, ring * extra)


def _padded(x: Tensor, codec: Codec) -> Tensor:
    """Rows [r, n] filled up with zeros to whole groups: no group of the wire is ever partial."""
    group = getattr(codec, "group", 1)
    return _fill(x, -(-x.shape[1] // group) * group)


def _fill(x: Tensor, width: int) -> Tensor:
    return x if x.shape[1] == width else F.pad(x, (0, width - x.shape[1]))


def _encode(codec: Codec, x: Tensor, key: Key, tail: Tensor | None = None) -> Tensor:
    """Rows [r, n], and rows [r, m] that cross as they are -> bytes [r, e(n) + m * itemsize]."""
    size = codec.nbytes(x.shape[1])
    extra = 0 if tail is None else tail.shape[1] * tail.element_size()
    message = torch.empty(x.shape[0], size + extra, dtype=torch.uint8, device=x.device)
    codec.encode(x, message[:, :size], key)
    if tail is not None:
        message[:, size:].copy_(tail.view(torch.uint8))
    return message


def _read(wires: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes [p, b], at any offset -> values [p, b / itemsize]."""
    return wires.clone(memory_format=torch.contiguous_format).view(dtype)


def _ordered_sum(rows: Tensor) -> Tensor:
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total
