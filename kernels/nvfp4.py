"""NVFP4 as fused kernels: one pass over memory to quantise, rotated or not, and one back; formulas in kernels/nvfp4_reference.py.

    quantize     x [r, k] -> codes, scales         a transposed x is read as it lies, its contraction down the columns
    dequantize   codes, scales -> [r, k]           in float32 or bfloat16
    requantize   codes, scales [r, k] -> those of the transpose [k, r], rotated where asked: what a forward product used, cut
                 along the other axis; no value in between crosses memory

A program holds [ROWS, 128]: whole outer blocks. Quotients are correctly rounded, contraction is off, codes are made in integer
arithmetic: the reference's bits on every architecture, and in the interpreter. An outer scale of the whole tensor takes a pass
of its own before, for the largest magnitude.
"""
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import nvfp4_reference
from kernels.float8 import from_code, to_code
from kernels.launch import Launch
from kernels.nvfp4_reference import INNER, OUTER, SMALL, SMALLEST, TOP_CODE, TOP_SCALE, Quantized, checked, sign_bits
from kernels.taco_tile import butterflies

ROWS, WARPS = 16, 4
DTYPES = (torch.bfloat16, torch.float32)
_SMALL, _SMALLEST, _TOP_SCALE = tl.constexpr(SMALL), tl.constexpr(SMALLEST), tl.constexpr(TOP_SCALE)
INFINITE = tl.constexpr(0x7F800000)
MAGIC = tl.constexpr(12582912.0)  # 1.5 · 2^23: added to a small number, it leaves the nearest integer in the lowest bits


@triton.jit
def number(code):
    """E2M1 codes, integers 0 to 15 -> float32."""
    e, m = (code >> 1) & 3, code & 1
    bits = tl.where(e > 0, ((e + 126) << 23) | (m << 22), m * 0x3F000000)
    return (bits | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def turned(x, signs, ROWS: tl.constexpr):
    """[ROWS, 128] float32 rotated over groups of 16."""
    lane = tl.arange(0, 128)[None, :] % 16
    x = tl.where(((signs >> lane) & 1) != 0, x * -0.25, x * 0.25)
    return tl.reshape(butterflies(tl.reshape(x, (ROWS * 8, 16)), ROWS * 8, 16, 0, 4), (ROWS, 128))


@triton.jit
def stored(codes, inner, outer, r, c, mask, code_row, code_column, scale_row, scale_column, over_row, over_column):
    """What the codes at (r, c) stand for; the strides are those of bytes, inner and outer scales along rows and columns."""
    byte = tl.load(codes + r * code_row + c // 2 * code_column, mask=mask, other=0).to(tl.int32)
    s = from_code(tl.load(inner + r * scale_row + c // 16 * scale_column, mask=mask, other=0), tl.float32, 3, -6, False)
    o = tl.load(outer + r * over_row + c // 128 * over_column, mask=mask, other=0.0)
    return number((byte >> ((c % 2) * 4).to(tl.int32)) & 15) * s * o


@triton.jit(do_not_specialize=["signs", "seed_low", "seed_high", "first_row", "first_column", "rows", "columns"])
def quantize_kernel(x, scales, over, peak, codes, inner, outer, signs, seed_low, seed_high, first_row, first_column, rows, columns,
                    x_row, x_column, scale_row, over_row, over_column, tiles, ROWS: tl.constexpr, AGAIN: tl.constexpr,
                    ROTATED: tl.constexpr, TALL: tl.constexpr, TENSOR: tl.constexpr, SEARCH: tl.constexpr, CHANCE: tl.constexpr,
                    UP: tl.constexpr, ALL: tl.constexpr, SIX: tl.constexpr):
    """AGAIN: x are codes whose transpose is quantised, with `scales` and `over`. SEARCH: only the peak is sought."""
    start = tl.program_id(0) // tiles * ROWS
    tile = tl.program_id(0) % tiles
    place = start + tl.arange(0, ROWS)
    r = place.to(tl.int64)[:, None]
    c = (tile * 128 + tl.arange(0, 128)).to(tl.int64)[None, :]
    mask = (r < rows) & (c < columns)
    if AGAIN:
        v = stored(x, scales, over, c, r, mask, x_row, 1, scale_row, 1, over_row, over_column)
    else:
        v = tl.load(x + r * x_row + c * x_column, mask=mask, other=0.0).to(tl.float32)
    if ROTATED:
        v = turned(v, signs, ROWS)
    groups = tl.reshape(v, (ROWS, 8, 16))
    # magnitudes in the order of their bits: a NaN is above all
    bits = tl.max(groups.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 2)
    if SEARCH:
        tl.atomic_max(peak, tl.max(tl.max(bits, 1), 0))
    else:
        if TALL:
            tall = tl.max(tl.reshape(bits, (ROWS // 16, 16, 8)), 1)
            bits = tl.reshape(tl.broadcast_to(tall[:, None, :], (ROWS // 16, 16, 8)), (ROWS, 8))
        if TENSOR:
            most = tl.load(peak) + tl.zeros([ROWS], tl.int32)
        else:
            most = tl.max(bits, 1)
        good = most < INFINITE
        top = tl.where(good, most, 0).to(tl.float32, bitcast=True)
        o = tl.maximum(tl.div_rn(top, tl.full([ROWS], ALL, tl.float32)), _SMALLEST)
        o = tl.where(top == 0.0, 1.0, o)
        amax = tl.where(good[:, None], bits, 0).to(tl.float32, bitcast=True)
        t = tl.div_rn(amax, tl.broadcast_to(o[:, None], (ROWS, 8)))
        t = tl.minimum(tl.div_rn(t, tl.full([ROWS, 8], SIX, tl.float32)), _TOP_SCALE)
        s = to_code(t, 3, -6, False).to(tl.int32)
        if UP:
            steps = t * 512.0
            whole = steps.to(tl.int32)
            s = tl.where(t < _SMALL, whole + (whole.to(tl.float32) < steps).to(tl.int32), s)
        s = tl.maximum(s, 1)
        d = from_code(s, tl.float32, 3, -6, False) * o[:, None]
        z = tl.div_rn(groups, tl.broadcast_to(d[:, :, None], (ROWS, 8, 16)))
        z = tl.reshape(tl.where(good[:, None, None], z, 0.0), (ROWS, 128))
        a = tl.minimum(tl.abs(z), 6.0)
        e = (tl.maximum(a, 1.0).to(tl.int32, bitcast=True) >> 23) - 127
        k = a * ((128 - e) << 23).to(tl.float32, bitcast=True)
        if CHANCE:
            seed = (seed_high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | seed_low.to(tl.uint32, bitcast=True).to(tl.uint64)
            group = (first_column // 8 + tile * 16 + tl.arange(0, 16)).to(tl.uint32)[None, :] + tl.zeros([ROWS, 16], tl.uint32)
            row = (first_row + place).to(tl.uint32)[:, None] + tl.zeros([ROWS, 16], tl.uint32)
            none = tl.zeros([ROWS, 16], tl.uint32)
            w0, w1, w2, w3 = tl.philox(seed, group, row, none, none)
            word = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (ROWS, 16, 4))
            half = tl.permute(tl.join(word & 0xFFFF, word >> 16), (0, 1, 3, 2))
            u = (tl.reshape(half, (ROWS, 128)).to(tl.int32).to(tl.float32) + 0.5) * (1.0 / 65536.0)
            steps = (k + u).to(tl.int32)
        else:
            steps = (k + MAGIC).to(tl.int32, bitcast=True) & 7
        code = (e << 1) + steps + ((z.to(tl.int32, bitcast=True) >> 28) & 8)
        low, high = tl.split(tl.reshape(code, (ROWS, 64, 2)))
        inside = r < rows
        width = tiles.to(tl.int64)
        tl.store(codes + r * width * 64 + tile * 64 + tl.arange(0, 64)[None, :], (low | (high << 4)).to(tl.uint8), mask=inside)
        tl.store(inner + r * width * 8 + tile * 8 + tl.arange(0, 8)[None, :], s.to(tl.uint8), mask=inside)
        shown = tl.where(good, o, float("nan"))
        if TENSOR:
            tl.store(outer + place * 0, shown, mask=(place == 0) & (tile == 0))
        else:
            tl.store(outer + place.to(tl.int64) * width + tile, shown, mask=place < rows)


@triton.jit(do_not_specialize=["rows", "columns"])
def dequantize_kernel(codes, inner, outer, out, rows, columns, code_row, scale_row, over_row, over_column, tiles,
                      ROWS: tl.constexpr):
    r = (tl.program_id(0) // tiles * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    c = (tl.program_id(0) % tiles * 128 + tl.arange(0, 128)).to(tl.int64)[None, :]
    mask = (r < rows) & (c < columns)
    v = stored(codes, inner, outer, r, c, mask, code_row, 1, scale_row, 1, over_row, over_column)
    tl.store(out + r * columns + c, v.to(out.dtype.element_ty), mask=mask)


def _halves(noise: int | None) -> dict[str, int]:
    """A 64-bit key as two signed 32-bit numbers, whose type does not change with their value."""
    words = ((noise or 0) & 0xFFFFFFFF, ((noise or 0) >> 32) & 0xFFFFFFFF)
    return dict(zip(("seed_low", "seed_high"), (word - (1 << 32) if word >> 31 else word for word in words)))


def _steps(q: Quantized) -> dict[str, int]:
    """Strides of codes and scales; 0 of an outer scale of the whole tensor."""
    whole = q.outer.shape == (1, 1)
    return {"scale_row": q.inner.shape[1], "over_row": 0 if whole else q.outer.shape[1], "over_column": 0 if whole else 1}


def quantize_launch(x: Tensor | Quantized, codes: Tensor, inner: Tensor, outer: Tensor, margin: float = 1.0,
                    block: int = 1, noise: int | None = None, *, signs: int | None = None, origin: tuple[int, int] = (0, 0),
                    peak: Tensor | None = None, search: bool = False) -> Launch:
    """codes, inner (as uint8), outer: those of the result. peak: int32 [1], bits of the largest magnitude of the whole tensor."""
    again = isinstance(x, Quantized)
    rows, columns = (x.columns, len(x.codes)) if again else x.shape
    tiles = codes.shape[1] * 2 // OUTER
    arguments = {"x": x.codes if again else x, "scales": x.inner.view(torch.uint8) if again else None,
                 "over": x.outer if again else None, "peak": peak, "codes": codes, "inner": inner, "outer": outer,
                 "signs": 0 if signs is None else sign_bits(signs), **_halves(noise), "first_row": origin[0],
                 "first_column": origin[1], "rows": rows, "columns": columns,
                 "x_row": x.codes.shape[1] if again else x.stride(0), "x_column": 0 if again else x.stride(1),
                 **(_steps(x) if again else {"scale_row": 0, "over_row": 0, "over_column": 0}), "tiles": tiles}
    constants = {"ROWS": ROWS, "AGAIN": again, "ROTATED": signs is not None, "TALL": block > 1, "TENSOR": peak is not None,
                 "SEARCH": search, "CHANCE": noise is not None, "UP": margin < 1.0, "ALL": TOP_SCALE * TOP_CODE * margin,
                 "SIX": TOP_CODE * margin}
    return Launch(quantize_kernel, (triton.cdiv(rows, ROWS) * tiles,), arguments, constants, WARPS)


def dequantize_launch(q: Quantized, out: Tensor) -> Launch:
    """out [r, columns], contiguous."""
    tiles = q.codes.shape[1] * 2 // OUTER
    arguments = {"codes": q.codes, "inner": q.inner.view(torch.uint8), "outer": q.outer, "out": out, "rows": len(q.codes),
                 "columns": q.columns, "code_row": q.codes.shape[1], **_steps(q), "tiles": tiles}
    return Launch(dequantize_kernel, (triton.cdiv(len(q.codes), ROWS) * tiles,), arguments, {"ROWS": ROWS}, WARPS)


def quantize(x: Tensor, rounding: str = "nearest", margin: float = 1.0, outer: int | str = OUTER, block: int = 1,
             noise: int | None = None, *, signs: int | None = None, origin: tuple[int, int] = (0, 0),
             peak: Tensor | None = None) -> Quantized:
    """x [r, k] of any float dtype and strides -> Quantized, the contraction along k.

    rounding: nearest (ties to the even code) or stochastic. margin: 1, or 16/17 under which nothing clips. outer: elements under a
    float32 scale, 128 or `tensor`. block: 1 for inner scales over 1x16, 16 for 16x16. noise: a 64-bit key, of stochastic
    rounding. signs: a 64-bit key of a rotation by 16, None for none. origin: (row, column) of x[0, 0] in the unsharded tensor,
    the column a multiple of 8. peak: float32 [], the largest magnitude of the unsharded (rotated) tensor, for outer `tensor`.
    Raises ValueError for what does not fit.
    """
    checked(x, rounding, margin, outer, block, noise)
    x = x if x.dtype in DTYPES else x.to(torch.float32)
    return _quantized(x, x.shape, x.device, margin, outer, block, noise, signs, origin, peak)


def requantize(given: Quantized, rounding: str = "nearest", margin: float = 1.0, outer: int | str = OUTER,
               noise: int | None = None, *, signs: int | None = None, origin: tuple[int, int] = (0, 0)) -> Quantized:
    """[r, k] quantised along k -> its transpose [k, r] quantised along r, from the dequantised values; options as in `quantize`."""
    checked(torch.empty(0, 0), rounding, margin, outer, 1, noise)
    shape = given.columns, len(given.codes)
    return _quantized(given, shape, given.codes.device, margin, outer, 1, noise, signs, origin, None)


def dequantize(q: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """[r, columns] in float32 or bfloat16. Raises ValueError for another dtype."""
    if dtype not in DTYPES:
        raise ValueError(f"nvfp4: {dtype}: dequantised in float32 or bfloat16")
    out = torch.empty(len(q.codes), q.columns, dtype=dtype, device=q.codes.device)
    if out.numel():
        dequantize_launch(q, out).run()
    return out


def _quantized(x: Any, shape: Any, device: torch.device, margin: float, outer: int | str, block: int, noise: int | None,
               signs: int | None, origin: tuple[int, int], peak: Tensor | None) -> Quantized:
    if origin[1] % nvfp4_reference.LANES:
        raise ValueError(f"nvfp4: origin {origin}: the column must be a multiple of {nvfp4_reference.LANES}")
    rows, columns = shape
    tiles = -(-columns // OUTER)
    codes, inner = (torch.empty(rows, tiles * n, dtype=torch.uint8, device=device) for n in (OUTER // 2, OUTER // INNER))
    over = torch.empty((1, 1) if outer == "tensor" else (rows, tiles), device=device)
    held = None
    if outer == "tensor":
        held = torch.zeros(1, dtype=torch.int32, device=device)
        if peak is not None:
            held = peak.to(torch.float32).reshape(1).view(torch.int32) & 0x7FFFFFFF
        over.fill_(1.0)
    if rows and columns:
        options = {"margin": margin, "block": block, "noise": noise, "signs": signs, "origin": origin, "peak": held}
        if outer == "tensor" and peak is None:
            quantize_launch(x, codes, inner, over, **options, search=True).run()
        quantize_launch(x, codes, inner, over, **options).run()
    if signs is not None:
        columns += -columns % INNER
    return Quantized(codes, inner.view(torch.float8_e4m3fn), over, columns)
