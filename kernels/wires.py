"""Tensors as the codecs' kernels take them: rows of bytes one stride apart, whose scales lie at multiples of 4 bytes."""
from __future__ import annotations

import torch
from torch import Tensor

from kernels import DTYPES  # others pass through float32


def rows_of(x: Tensor) -> Tensor:
    """[..., n] -> [r, n]."""
    return x.reshape(-1, x.shape[-1]) if x.ndim > 1 else x[None]


def fits(wire: Tensor) -> bool:
    """Whether scales of its rows lie at multiples of 4 bytes and rows are one stride apart."""
    return wire.ndim <= 2 and wire.stride(-1) == 1 and (wire.is_meta or wire.data_ptr() % 4 == 0) and (
        wire.ndim == 1 or wire.stride(0) % 4 == 0)


def slot(size: int) -> int:
    """Bytes from one row of `size` bytes to the next in memory that peers read: whole multiples of 16."""
    return -(-size // 16) * 16


def encoded(x: Tensor, size: int, out: Tensor | None, write) -> Tensor:
    """x [..., n] -> wires [..., size], into `out` where given; write(x [r, n], wires [r, size]) fills them."""
    source = rows_of(x if x.dtype in DTYPES else x.to(torch.float32))
    into = out is not None and fits(out)
    wire = rows_of(out) if into else torch.empty(len(source), size, dtype=torch.uint8, device=x.device)
    if source.numel():
        write(source, wire)
    if out is None:
        return wire.view(*x.shape[:-1], -1)
    return out if into else out.copy_(wire.view(out.shape))


def decoded(rows: Tensor, width: int, out: Tensor | None, shape: tuple[int, ...], write) -> Tensor:
    """Wires [r, b] of `width` elements -> [*shape, width] in float32, or `out` of any float dtype; write([r, n]) fills it."""
    if out is not None and out.dtype in DTYPES and out.is_contiguous():
        found = out.view(-1, out.shape[-1])
    else:
        found = torch.empty(len(rows), width if out is None else out.shape[-1], device=rows.device)
    if found.numel():
        write(found)
    if out is None:
        return found.view(*shape, found.shape[-1])
    return out if found.data_ptr() == out.data_ptr() else out.copy_(found.view(out.shape))


def reduced(wires: Tensor, out: Tensor | None, write) -> Tensor:
    """Wires [p, b] -> wire [b], into `out` where given; write(wires, wire) fills it."""
    rows = wires if fits(wires) else wires.contiguous()
    wire = out if out is not None and fits(out) else torch.empty(wires.shape[1], dtype=torch.uint8, device=wires.device)
    if rows.shape[1]:
        write(rows, wire)
    return wire if out is None or out is wire else out.copy_(wire)
