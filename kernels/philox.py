"""Philox4x32-10, the counter-based generator behind every random number of the suite (Salmon et al., SC 2011).

    words = philox(counter, key)      # four independent 32-bit words a counter, no state

The counter is an element's index in the *unsharded* tensor, the key names what is drawn (a parameter, an operand of a
product at a step). So shards differ, replicas agree, and any split of a tensor draws what the whole tensor draws.
"""
from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
CHUNK = 1 << 22  # counters a pass: bounds the int64 temporaries


def fold(*parts: int | str) -> int:
    """A 64-bit key from names and numbers, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def halves(key: int) -> tuple[int, int]:
    """A 64-bit key as two signed 32-bit numbers, the low one first, whose type does not change with their value."""
    low, high = ((key >> shift & MASK) - (key >> shift + 31 & 1) * (MASK + 1) for shift in (0, 32))
    return low, high


def philox(counter: Tensor, key: int, high: int = 0) -> Tensor:
    """counter int64 [n] (low 64 of 128 bits; `high` the others), key 64 bits -> int64 [4, n] of 32-bit words."""
    c0, c1 = counter & MASK, (counter >> 32) & MASK
    c2, c3 = torch.full_like(c0, high & MASK), torch.full_like(c0, (high >> 32) & MASK)
    k0, k1 = key & MASK, (key >> 32) & MASK
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # wraps in int64; the low 64 bits are the product's
        c0, c1, c2, c3 = ((p1 >> 32) & MASK) ^ c1 ^ k0, p1 & MASK, ((p0 >> 32) & MASK) ^ c3 ^ k1, p0 & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return torch.stack([c0, c1, c2, c3])


def _normals(counter: Tensor, key: int) -> Tensor:
    """Four standard normals a counter (Box-Muller in float64): [n, 4]."""
    w = philox(counter, key).to(torch.float64)
    radius = torch.sqrt(-2.0 * torch.log((w[0::2] + 1.0) * 2.0**-32))
    angle = w[1::2] * (2.0 * math.pi * 2.0**-32)
    return torch.stack([radius * torch.cos(angle), radius * torch.sin(angle)], -1).permute(1, 0, 2).reshape(-1, 4)


def normal(shape: Sequence[int], key: int, *, dim: int = 0, start: int = 0, length: int | None = None,
           device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    """The slice [start, start + length) along `dim` of a standard normal tensor of global `shape`: element i uses
    counter i // 4, lane i % 4, whatever slice is asked for."""
    shape = list(shape)
    length = shape[dim] - start if length is None else length
    inner = math.prod(shape[dim + 1:])
    rows, width, stride, first = math.prod(shape[:dim]), length * inner, shape[dim] * inner, start * inner
    out = torch.empty(rows, width, dtype=dtype, device=device)
    quads = width % 4 == 0 and stride % 4 == 0 and first % 4 == 0
    columns = torch.arange(width // 4 if quads else width, dtype=torch.int64, device=device)
    # few rows at a time where rows are wide, pieces of a row where one alone is over the bound
    step = max(1, CHUNK // max(1, len(columns)))
    for row in range(0, rows, step):
        base = (torch.arange(row, min(rows, row + step), dtype=torch.int64, device=device) * stride + first)[:, None]
        for lo in range(0, len(columns), CHUNK):
            piece = columns[lo:lo + CHUNK]
            if quads:
                counter = (base // 4 + piece).reshape(-1)
                out[row:row + step, 4 * lo:4 * (lo + len(piece))] = _normals(counter, key).reshape(len(base), -1).to(dtype)
            else:
                index = (base + piece).reshape(-1)
                value = _normals(index // 4, key).gather(1, (index % 4)[:, None])
                out[row:row + step, lo:lo + len(piece)] = value.reshape(len(base), -1).to(dtype)
    return out.reshape([*shape[:dim], length, *shape[dim + 1:]])
