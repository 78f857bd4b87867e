"""Block formats as plain tensor arithmetic, float32 throughout: what an operand's values become, and by which scales.

x [r, k] float32 is cut along k, the contraction; k is a whole number of blocks here, padded by zeros before. Each function gives
`Blocks`: codes are z = x / scale rounded, values = codes · scale.

    nvfp4    E2M1 codes; E4M3 scale s over 16; float32 scale o over 128, or over the tensor
             o = amax / (448 · 6 · m), 1 where amax is 0        s = E4M3(amax16 / (o · 6 · m)), at least 2^-9        z = x / (s · o)
    mxfp4    E2M1 codes, a power of two over 32: 2^ceil(log2(amax / 6)), or OCP's 2^(floor(log2 amax) - 2)
    mxfp8    E4M3 codes, a power of two over 32: amax / 448 rounded up
    rows     E4M3 or E5M2 codes, a float32 scale over the row

m is 1, or 16/17 where no code may clip: E4M3 rounds at most 1/17 down, and below 2^-6, where it is subnormal, s is rounded up
instead. Codes go to nearest, ties to the even code, or by u in [0, 1): up with the probability of the distance from below. A NaN
or Inf makes its whole outer block NaN (its row, where that is the block). Sources: arXiv 2510.27527 and its release, grid
and ties; TetraJet v1 (arXiv 2502.20853) for mxfp4.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import reference
from kernels.nvfp4_reference import by_reciprocal, rotate
from kernels.philox import philox
from kernels.reference import over, power_above

Segment = tuple[int, int, int]  # first element here, how many, first in the unsharded tensor
LOWEST = 2.0**-126  # float32's smallest normal number, a floor of scales
SMALL = 2.0**-6  # E4M3's smallest normal number
TINY = 2.0**-9  # E4M3's smallest number
LANES = 8  # elements that one Philox call serves, 16 bits each


class Blocks(NamedTuple):
    """In the shape of x's blocks, scales broadcastable to it. inner: codes times inner scale, exact in bfloat16, and the float32
    outer scale [r, k / 128, 1, 1] (nvfp4)."""

    values: Tensor
    codes: Tensor
    scale: Tensor
    inner: Tensor | None = None
    outer: Tensor | None = None


def uniform(key: Tensor, rows: Sequence[Segment], columns: Sequence[Segment], k: int, device: torch.device) -> Tensor:
    """u [r, k] in (0, 1): that of an element follows from the key and its place in the unsharded tensor alone. Columns beyond
    the last segment go on from it. key: int64 []."""
    *before, (first, _, start) = columns
    columns = [*before, (first, k - first, start)]
    r = torch.cat([torch.arange(start, start + n, device=device) for _, n, start in rows])
    if all(n % LANES == 0 == start % LANES for _, n, start in columns):
        return _drawn(key, r, torch.cat([torch.arange(start // LANES, (start + n) // LANES, device=device)
                                         for _, n, start in columns]))
    c = torch.cat([torch.arange(start, start + n, device=device) for _, n, start in columns])
    groups = torch.unique_consecutive(c // LANES)
    return _drawn(key, r, groups)[:, torch.searchsorted(groups, c // LANES) * LANES + c % LANES]


def _drawn(key: Tensor, rows: Tensor, groups: Tensor) -> Tensor:
    """[rows, groups · 8]: the counter is (row, group of 8 columns)."""
    words = philox(((rows[:, None] << 32) + groups).reshape(-1), key)
    pieces = torch.stack([words & 0xFFFF, words >> 16]).reshape(LANES, len(rows), len(groups))
    return pieces.to(torch.float32).add(0.5).mul(2.0**-16).permute(1, 2, 0).reshape(len(rows), -1)


def e2m1(z: Tensor, u: Tensor | None = None) -> Tensor:
    """Rounded to 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives; beyond 6 it clips. NaN stays."""
    a = z.abs().clamp(max=6.0)
    # between codes: .5 below 2, then 1, then 2
    step = (a.to(torch.float32).clamp(min=1.0).view(torch.int32) & 0x7F800000).view(torch.float32) * 0.5
    a = (a / step).round() if u is None else (((a / step) * 2.0**22).round() * 2.0**-22 + u).floor()
    return (a * step).copysign(z).to(torch.float32)


def _e4m3(x: Tensor) -> Tensor:
    """Nearest, ties to even, saturated; torch 2.11 gives NaN above 464 unless clamped."""
    return x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def nvfp4(x: Tensor, u: Tensor | None, margin: bool, outer: int | str, block: int, most: Callable[[Tensor], Tensor]) -> Blocks:
    """x [r, k], k a multiple of 128. block: rows that share an inner scale (16: 16x16 blocks). outer: 128 or `tensor`; most: of
    an amax over this shard, that over the whole tensor."""
    r, m = len(x), 16.0 / 17.0 if margin else 1.0
    x = x.view(r, -1, 8, 16)
    amax = x.abs().amax(-1)
    if block > 1:
        tall = torch.nn.functional.pad(amax, (0, 0, 0, 0, 0, -r % block))
        amax = tall.unflatten(0, (-1, block)).amax(1).repeat_interleave(block, 0)[:r]
    top = amax.amax(-1, keepdim=True) if outer == 128 else most(amax.amax()).expand(1, 1, 1)
    # 1 for zeros; a block of subnormal numbers keeps a scale that the next division can use
    o = torch.where(top == 0, 1.0, over(top, 2688.0 * m).clamp(min=LOWEST))
    o = torch.where(torch.isfinite(top), o, torch.nan)
    t = over(amax / o, 6.0 * m)
    s = _e4m3(t).to(torch.float32)
    if margin:
        s = torch.where(t < SMALL, (t * 512.0).ceil() / 512.0, s)
    s = s.clamp(min=TINY)
    scale = (s * o)[..., None]
    codes = e2m1(x / scale) if u is None else e2m1(by_reciprocal(x, scale), u.view(x.shape))
    inner, o = codes * s[..., None], o[..., None]
    return Blocks(inner * o, codes, scale, inner, o)  # one rounding: `inner` is exact


def dequantised(x: Tensor, turn: Tensor | None, key: Tensor | None, rows: Sequence[Segment], columns: Sequence[Segment], k: int,
                margin: bool, block: int, dtype: torch.dtype) -> Tensor:
    """All of an NVFP4 operand in one function, for torch.compile: x [r, c] -> [r, k], padded, rotated (turn: see
    kernels.nvfp4_reference.factors), quantised with outer scales over 128, dequantised."""
    x = torch.nn.functional.pad(x.to(torch.float32), (0, k + -k % 128 - x.shape[1]))
    if turn is not None:
        x = rotate(x, turn)
    u = None if key is None else uniform(key, rows, columns, x.shape[1], x.device)
    return nvfp4(x, u, margin, 128, block, lambda amax: amax).values.view(x.shape)[:, :k].to(dtype)


def mxfp4(x: Tensor, u: Tensor | None, clips: bool) -> Blocks:
    """x [r, k], k a multiple of 32. clips: OCP's scale, under which up to 8 is cut to 6."""
    x = x.view(len(x), -1, 32)
    amax = x.abs().amax(-1, keepdim=True)
    if clips:
        scale = (amax.clamp(min=4 * LOWEST).view(torch.int32) & 0x7F800000).view(torch.float32) / 4
    else:
        scale = power_above(over(amax, 6.0))
    scale = torch.where(torch.isfinite(amax), scale, torch.nan)
    codes = e2m1(x / scale, None if u is None else u.view(x.shape))
    return Blocks(codes * scale, codes, scale)


def mxfp8(x: Tensor) -> Blocks:
    """x [r, k], k a multiple of 32; to nearest."""
    codes, scale = reference.mxfp8(x.view(len(x), -1, 32))
    return Blocks(codes * scale, codes, scale)


def rows(x: Tensor, format: str) -> Blocks:
    """One scale a row; codes in the 8-bit dtype itself."""
    top, dtype = {"e4m3": (448.0, torch.float8_e4m3fn), "e5m2": (57344.0, torch.float8_e5m2)}[format]
    amax = x.abs().amax(1, keepdim=True)
    scale = torch.where(amax == 0, 1.0, over(amax, top).clamp(min=LOWEST))
    scale = torch.where(torch.isfinite(amax), scale, torch.nan)
    codes = (x / scale).clamp(-top, top).to(dtype)
    return Blocks(codes, codes, scale)
