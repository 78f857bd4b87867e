"""NVFP4 in plain torch: E2M1 codes under two levels of scales; the oracle of kernels/nvfp4.py, and what a CPU runs.

x [r, k] is cut along k, the contraction, filled up with zeros to K, a multiple of 128. All in float32:

    o = amax128 / (448 · 6 · m)      1 where amax is 0; amax of the whole tensor where outer is "tensor"; float32
    s = E4M3(amax16 / o / (6 · m))   to nearest, at least 2^-9; over 16x16 where block is 16 (o then over 16x128)
    z = x / (s · o)                  one division; by chance x · (1 / (s · o)), the reciprocal rounded: 2^-24 of z at most
    q = E2M1(z)                      0, .5, 1, 1.5, 2, 3, 4, 6 and negatives; to nearest, ties to the even code; or by chance
    x' = (q · s) · o                 q · s is exact in bfloat16, so one rounding

m is the margin. At 1 a code may clip: E4M3 rounds s down by up to 1/17. At 16/17 none does (where s would be subnormal, below
2^-6, it is rounded up instead), so that rounding by chance is unbiased. Source: arXiv 2510.27527 and its release, which has m = 1
and lets s of a tiny block be 0; the floor of 2^-9 keeps such a block from vanishing.

By chance: an element goes up where its u in (0, 1) passes the distance from above; z is counted in steps with 22 bits of fraction.
u has 16 bits: piece j (of the low halves of four Philox words, then the high halves) at counter (row · 2^32 + column // 8),
j = column mod 8, of the unsharded tensor.
Rotation (signs): diag(±1) H16 / 4 over 16 neighbours along k, the same signs for all, bit 0 of Philox word 0 at counters 0 to 15.
A NaN or Inf makes its outer block NaN by its outer scale; its codes are 0. -0 keeps its sign.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.philox import MASK, halves, philox
from kernels.reference import over

INNER, OUTER = 16, 128
LANES = 8  # elements that one Philox call serves
TOP_CODE, TOP_SCALE = 6.0, 448.0
SMALLEST = 2.0**-126  # float32's smallest normal number, a floor of outer scales
SMALL = 2.0**-6  # E4M3's smallest normal number
MARGIN = 16.0 / 17.0
Keyed = int | Tensor | None  # a 64-bit key, or a row of `drawn` that holds it; None where nothing is drawn
GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Quantized:
    """codes uint8 [r, K/2], the even column in the low nibble; inner float8_e4m3fn [r, K/16]; outer float32 [r, K/128], or [1, 1]
    of a whole tensor. columns: how many of K hold data (whole groups of 16 where x was rotated)."""

    codes: Tensor
    inner: Tensor
    outer: Tensor
    columns: int

    def values(self) -> Tensor:
        """Codes times inner scales, float32 [r, K]; exact in bfloat16."""
        return (unpack(self.codes).view(*self.inner.shape, INNER) * self.inner.to(torch.float32)[..., None]).flatten(1)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[r, columns]: what the codes stand for."""
        outer = self.outer.expand(len(self.codes), self.codes.shape[1] * 2 // OUTER)
        x = self.values().view(*outer.shape, OUTER) * outer[..., None]
        return x.flatten(1)[:, : self.columns].to(dtype)


def checked(x: Tensor, rounding: str, margin: float, outer: int | str, block: int, noise: Keyed,
            origin: tuple[int, int] = (0, 0)) -> None:
    """Raises ValueError naming what does not fit."""
    if x.ndim != 2 or not x.is_floating_point():
        raise ValueError(f"nvfp4: {x.dtype} {tuple(x.shape)}: expected a matrix of floating-point numbers")
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f"nvfp4: rounding {rounding!r}: expected nearest or stochastic")
    if (noise is None) == (rounding == "stochastic"):
        raise ValueError(f"nvfp4: rounding {rounding} {'needs' if noise is None else 'takes no'} noise, a 64-bit key")
    if not 0.5 <= margin <= 1.0:
        raise ValueError(f"nvfp4: margin {margin:g}: expected 1, or 16/17 so that nothing clips")
    if outer not in (OUTER, "tensor"):
        raise ValueError(f"nvfp4: outer {outer!r}: expected 128 or tensor")
    if block not in (1, 16):
        raise ValueError(f"nvfp4: block {block}: expected 1 (1x16) or 16 (16x16)")
    if origin[1] % LANES:
        raise ValueError(f"nvfp4: origin {origin}: the column must be a multiple of {LANES}")


def nvfp4_quantize(x: Tensor, rounding: str = "nearest", margin: float = 1.0, outer: int | str = OUTER, block: int = 1,
                   noise: Keyed = None, *, signs: Keyed = None, origin: tuple[int, int] = (0, 0),
                   peak: Tensor | None = None) -> Quantized:
    """See kernels.nvfp4.quantize."""
    checked(x, rounding, margin, outer, block, noise, origin)
    rows, columns = x.shape
    columns += -columns % INNER if signs is not None else 0
    x = F.pad(x.to(torch.float32), (0, -x.shape[1] % OUTER))
    if signs is not None:
        x = rotate(x, factors(signs, x.device))
    x = x.reshape(rows, x.shape[1] // OUTER, OUTER // INNER, INNER)
    amax = x.abs().amax(-1)
    if block > 1:
        tall = F.pad(amax, (0, 0, 0, 0, 0, -rows % block))
        amax = tall.unflatten(0, (-1, block)).amax(1).repeat_interleave(block, 0)[:rows]
    if outer == OUTER:
        top = amax.amax(-1)
    else:
        top = (_peak(amax) if peak is None else peak.to(torch.float32)).reshape(1, 1)
    finite = torch.isfinite(top)
    o = torch.where(top == 0, 1.0, over(top, TOP_SCALE * TOP_CODE * margin).clamp(min=SMALLEST))
    o = torch.where(finite, o, 1.0)
    t = over(torch.where(finite[..., None], amax, 0.0) / o[..., None], TOP_CODE * margin)
    s = t.clamp(max=TOP_SCALE).to(torch.float8_e4m3fn).view(torch.uint8)
    if margin < 1.0:
        # a subnormal number is its code in steps of 2^-9
        s = torch.where(t < SMALL, (t * 512.0).ceil().clamp(max=8.0).to(torch.uint8), s)
    s = s.clamp(min=1).view(torch.float8_e4m3fn)
    x, d = torch.where(finite[..., None, None], x, 0.0), (s.to(torch.float32) * o[..., None])[..., None]
    z = x / d if noise is None else by_reciprocal(x, d)
    u = None if noise is None else uniform(noise, rows, x.shape[1] * OUTER, origin, x.device).view(x.shape)
    return Quantized(pack(e2m1(z, u).flatten(1)), s.flatten(1), torch.where(finite, o, torch.nan), columns)


def nvfp4_rounded(x: Tensor, rounding: str = "nearest", margin: float = 1.0, outer: int | str = OUTER, block: int = 1,
                  noise: Keyed = None, *, signs: Keyed = None, origin: tuple[int, int] = (0, 0),
                  peak: Tensor | None = None, dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None) -> Tensor:
    """See kernels.nvfp4.rounded."""
    found = nvfp4_quantize(x, rounding, margin, outer, block, noise, signs=signs, origin=origin, peak=peak)
    return found.dequantize(dtype) if out is None else out.copy_(found.dequantize(out.dtype))


def inner_values(x: Tensor, rounding: str = "nearest", margin: float = 1.0, outer: int | str = OUTER, block: int = 1,
                 noise: Keyed = None, *, signs: Keyed = None, origin: tuple[int, int] = (0, 0),
                 peak: Tensor | None = None, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See kernels.nvfp4.inner_values."""
    q = nvfp4_quantize(x, rounding, margin, outer, block, noise, signs=signs, origin=origin, peak=peak)
    values = q.values().to(torch.bfloat16)
    return values if out is None else out.copy_(values), q.outer


def largest_magnitude(x: Tensor, signs: Keyed = None) -> Tensor:
    """See kernels.nvfp4.largest_magnitude."""
    x = x.to(torch.float32)
    x = x if signs is None else rotate(F.pad(x, (0, -x.shape[1] % INNER)), factors(signs, x.device))
    return _peak(x.abs())


def nvfp4_dequantize(q: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """See kernels.nvfp4.dequantize."""
    return q.dequantize(dtype)


def nvfp4_requantize(given: Quantized, rounding: str = "nearest", margin: float = 1.0, outer: int | str = OUTER,
                     noise: Keyed = None, *, signs: Keyed = None, origin: tuple[int, int] = (0, 0)) -> Quantized:
    """See kernels.nvfp4.requantize."""
    return nvfp4_quantize(given.dequantize().t(), rounding, margin, outer, 1, noise, signs=signs, origin=origin)


def slab_product(a: Quantized, b: Quantized, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """See kernels.nvfp4_product.slab."""
    fits(a, b)
    return slab_values(a.values(), a.outer, b.values(), b.outer, dtype)


def slab_values(a: Tensor, a_outer: Tensor, b: Tensor, b_outer: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """See kernels.nvfp4_product.slab_values."""
    left, right = (x.to(torch.float32).view(len(x), x.shape[1] // OUTER, OUTER) for x in (a, b))
    over, under = (outer.expand(len(x), left.shape[1]) for x, outer in ((a, a_outer), (b, b_outer)))
    total = torch.zeros(len(a), len(b), device=a.device)
    for n in range(left.shape[1]):
        total = total + (left[:, n] @ right[:, n].t()) * over[:, n, None] * under[None, :, n]
    return total.to(dtype)


def fits(a: Quantized, b: Quantized) -> None:
    """Raises ValueError where two operands have no common contraction."""
    if a.codes.shape[1] != b.codes.shape[1] or a.columns != b.columns:
        raise ValueError(f"nvfp4: contraction of {a.columns} columns against {b.columns}")


def _peak(amax: Tensor) -> Tensor:
    return amax.amax() if amax.numel() else amax.new_zeros(())


def uniform(key: int | Tensor, rows: int, columns: int, origin: tuple[int, int], device: torch.device | str = "cpu") -> Tensor:
    """u [rows, columns] in (0, 1) of the elements from `origin` (row, column, a multiple of 8) on; columns divide by 8."""
    r = torch.arange(origin[0], origin[0] + rows, device=device)
    c = torch.arange(origin[1] // LANES, (origin[1] + columns) // LANES, device=device)
    words = philox(((r[:, None] << 32) + c).reshape(-1), key_of(key))
    pieces = torch.stack([words & 0xFFFF, words >> 16]).reshape(LANES, rows, len(c))
    return pieces.to(torch.float32).add(0.5).mul(2.0**-16).permute(1, 2, 0).reshape(rows, columns)


def drawn(pairs: Sequence[tuple[int | None, int | None]]) -> Tensor:
    """int32 [n, 4] of n pairs (key of noise, key of signs), None of what is not drawn: a row is the signs' bits, the noise's halves
    and 0. On a device it stands for both keys, which may then change between two replays of a graph."""
    signs = [0 if key is None else key for _, key in pairs]
    counters = torch.arange(INNER).repeat(len(signs))
    k0, k1 = (torch.tensor([key >> shift & MASK for key in signs], dtype=torch.int64).repeat_interleave(INNER) for shift in (0, 32))
    bits = (philox(counters, k0 | k1 << 32)[0].view(-1, INNER) & 1) << torch.arange(INNER)
    table = torch.zeros(len(signs), 4, dtype=torch.int32)
    table[:, 0] = bits.sum(1)
    table[:, 1:3] = torch.tensor([halves(key or 0) for key, _ in pairs], dtype=torch.int32).view(-1, 2)
    return table


def key_of(noise: int | Tensor) -> int | Tensor:
    """As philox takes it: of a row of `drawn` int64 []."""
    return (noise[1].to(torch.int64) & MASK) | noise[2].to(torch.int64) << 32 if isinstance(noise, Tensor) else noise


@lru_cache(maxsize=1024)
def sign_bits(key: int) -> int:
    """16 signs of a rotation; bit i set: element i of each group changes sign."""
    return sum((_word(i, key) & 1) << i for i in range(INNER))


def _word(counter: int, key: int) -> int:
    """Word 0 of kernels.philox at one counter, without tensors: signs are drawn anew for every product."""
    c0, c1, c2, c3 = counter, 0, 0, 0
    k0, k1 = key & MASK, key >> 32 & MASK
    for _ in range(10):
        p, q = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = q >> 32 ^ c1 ^ k0, q & MASK, p >> 32 ^ c3 ^ k1, p & MASK
        k0, k1 = k0 + 0x9E3779B9 & MASK, k1 + 0xBB67AE85 & MASK
    return c0


def factors(signs: int | Tensor, device: torch.device | str = "cpu") -> Tensor:
    """diag(±1) / 4 of a rotation: float32 [16]. signs: a key, or a row of `drawn`."""
    if isinstance(signs, Tensor):
        return torch.where((signs[0] >> torch.arange(INNER, device=signs.device)) & 1 == 1, -0.25, 0.25)
    bits = sign_bits(signs)
    return torch.tensor([-0.25 if bits >> i & 1 else 0.25 for i in range(INNER)], device=device)


def rotate(x: Tensor, signs: int | Tensor) -> Tensor:
    """diag(±1) H / 4 over groups of 16 of the last dimension: butterflies a + b, a - b over strides 1, 2, 4, 8, float32. signs: a
    key, or its `factors`."""
    y = x.unflatten(-1, (-1, INNER)) * (signs if isinstance(signs, Tensor) else factors(signs, x.device))
    for stride in (1, 2, 4, 8):
        a, b = y.unflatten(-1, (-1, 2, stride)).unbind(-2)
        y = torch.stack([a + b, a - b], -2).flatten(-3)
    return y.flatten(-2)


def by_reciprocal(x: Tensor, d: Tensor) -> Tensor:
    """x times the float32 number nearest to 1 / d, exact: float64. d > 0; |x| at most some 2^100 d. A power of two takes d to
    [.5, 1), or as near as float32 goes, so that neither 1 / d nor x leaves float32's normal numbers; a z below 2^-126 is 0."""
    power = (0x7E800000 - (d.view(torch.int32) & 0x7F800000)).view(torch.float32)
    return (x * power).to(torch.float64) * torch.reciprocal(d * power).to(torch.float64)


def e2m1(z: Tensor, u: Tensor | None = None) -> Tensor:
    """Codes uint8 (sign in bit 3); beyond 6 it clips. u: of rounding by chance, else to nearest, ties to even."""
    a = z.abs().clamp(max=TOP_CODE)
    exponent = (a.to(torch.float32).clamp(min=1.0).view(torch.int32) >> 23) - 127
    k = a * ((128 - exponent) << 23).view(torch.float32)  # steps of .5 below 2, of 1 below 4, of 2
    k = k.round() if u is None else ((k * 2.0**22).round() * 2.0**-22 + u).floor()
    return ((exponent << 1) + k.to(torch.int32) + torch.signbit(z) * 8).to(torch.uint8)


def pack(codes: Tensor) -> Tensor:
    """[r, K] -> bytes [r, K/2]."""
    return codes[:, 0::2] | codes[:, 1::2] << 4


def unpack(packed: Tensor) -> Tensor:
    """Bytes [r, K/2] -> float32 [r, K]."""
    grid = torch.tensor([*GRID, *(-g for g in GRID)], device=packed.device)
    return grid[torch.stack([packed & 15, packed >> 4], -1).flatten(1).to(torch.int64)]


def swizzle(scales: Tensor) -> Tensor:
    """Scales [r, c] of one byte -> [ceil(r/128) · ceil(c/4) · 512], the order that block-scaled tensor cores want: tiles of 128x4,
    tile rows first, in a tile (row mod 32, row // 32, column). What is filled up is 0."""
    rows, columns = scales.shape
    x = F.pad(scales.view(torch.uint8), (0, -columns % 4, 0, -rows % 128))
    x = x.view(x.shape[0] // 128, 4, 32, x.shape[1] // 4, 4).permute(0, 3, 2, 1, 4)
    return x.reshape(-1).view(scales.dtype)


def unswizzle(flat: Tensor, rows: int, columns: int) -> Tensor:
    """Inverse of `swizzle`: [rows, columns]. Raises ValueError where the sizes do not fit."""
    tall, wide = -(-rows // 128), -(-columns // 4)
    if flat.numel() != tall * wide * 512:
        raise ValueError(f"nvfp4: {flat.numel()} swizzled scales are no {rows} x {columns}")
    x = flat.reshape(-1).view(torch.uint8).view(tall, wide, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return x.reshape(tall * 128, wide * 4)[:rows, :columns].contiguous().view(flat.dtype)
