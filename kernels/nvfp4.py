"""NVFP4 as fused kernels: one pass over memory to quantise, rotated or not, and one back; formulas in kernels/nvfp4_reference.py.

    quantize     x [r, k] -> codes, scales         a transposed x is read as it lies, its contraction down the columns
    rounded      x [r, k] -> what they stand for   the same, and no code crosses memory: bfloat16 is read and written
    dequantize   codes, scales -> [r, k]           in float32 or bfloat16
    requantize   codes, scales [r, k] -> those of the transpose [k, r], rotated where asked: what a forward product used, cut
                 along the other axis; no value in between crosses memory

A program goes through some tiles of whole outer blocks, below one another; a thread holds whole blocks of 16, and 8 threads an
outer block (kernels/nvfp4_tile.py). It is instructions that bound these kernels, about 18 an element to nearest and 25 rotated and
by chance on sm_90 (tests count them), where a copy at full speed leaves time for 31. Results have the reference's bits on every
architecture and in the interpreter. An outer scale of the whole tensor takes a pass of its own before, for the largest magnitude.
"""
# Triton has no starred tuples:
# ruff: noqa: RUF005
from __future__ import annotations

from ctypes import c_float
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import DTYPES
from kernels.float8 import E4M3_FROM, from_code
from kernels.launch import Kept, Launch
from kernels.nvfp4_reference import INNER, OUTER, TOP_CODE, TOP_SCALE, Keyed, Quantized, checked, sign_bits
from kernels.nvfp4_tile import (
    by_chance,
    divided,
    eight,
    four,
    largest,
    nearest,
    noise,
    number,
    scales,
    shared,
    tall,
    turned,
    values,
    words,
)
from kernels.philox import halves

TURNS, PROGRAMS = (16, 8, 4), 2048  # tiles of a program, below one another: as many as leave so many programs, or the last
DOWN_REGISTERS = 120  # of a thread that rounds two blocks of a transposed operand by chance: 16 warps run at once
BLOCKS, BESIDE, WARPS = 256, 32, 4  # a tile: blocks of 16, or rows of a transposed operand
VALUE_BLOCKS, VALUE_WARPS = 64, 2  # a tile along rows, where values are written: others load while one stores
ROWS = 16  # of a program that dequantises


@triton.jit
def stored(codes, inner, outer, r, c, mask, code_row, scale_row, over_row, over_column):
    """What the codes at (r, c) stand for; the strides are those of rows, and the outer scales' along columns."""
    byte = tl.load(codes + r * code_row + c // 2, mask=mask, other=0).to(tl.int32)
    s = from_code(tl.load(inner + r * scale_row + c // 16, mask=mask, other=0), tl.float32, 3, -6, False)
    o = tl.load(outer + r * over_row + c // 128 * over_column, mask=mask, other=0.0)
    return number((byte >> c.to(tl.int32) % 2 * 4) & 15) * s * o


@triton.jit
def blocks_along(x, r, c, rows, columns, x_row, WIDTH: tl.constexpr, FULL: tl.constexpr,
                 PAIRS: tl.constexpr):
    """16 of [A, B] float32: rows r [A], blocks of 16 from columns c [B] on. A thread loads WIDTH neighbours at a time, 16 bytes."""
    v = ()
    for n in tl.static_range(16 // WIDTH):
        if PAIRS:
            side = c[None, :, None] // 2 + tl.arange(0, 4)[None, None, :]
            word = four(tl.load((x + n * WIDTH).to(tl.pointer_type(tl.int32)) + r[:, None, None] * (x_row // 2) + side))
            for i in tl.static_range(4):
                v = v + ((word[i] << 16).to(tl.float32, bitcast=True), (word[i] & -65536).to(tl.float32, bitcast=True))
        else:
            column = c[None, :, None] + n * WIDTH + tl.arange(0, WIDTH)[None, None, :]
            place = r[:, None, None] * x_row + column
            if FULL:
                piece = tl.load(x + place)
            else:
                piece = tl.load(x + place, mask=(r < rows)[:, None, None] & (column < columns), other=0.0)
            if WIDTH == 8:
                v = v + eight(piece.to(tl.float32))
            else:
                v = v + four(piece.to(tl.float32))
    return v


@triton.jit
def blocks_down(x, r, c, rows, columns, x_column, FULL: tl.constexpr):
    """16 of [8, B] float32 where rows r [B] lie beside one another: blocks of 16 from columns c [8] on."""
    v = ()
    for i in tl.static_range(16):
        place = (c + i)[:, None] * x_column + r[None, :]
        if FULL:
            found = tl.load(x + place)
        else:
            found = tl.load(x + place, mask=(c + i < columns)[:, None] & (r < rows)[None, :], other=0.0)
        v = v + (found.to(tl.float32),)
    return v


@triton.jit
def blocks_again(x, scales, over, r, c, first, left, short, code_row, scale_row, over_row, over_column):
    """As `blocks_down`, of what codes stand for whose transpose is quantised: from row `first` on, a multiple of 16, of it."""
    v = ()
    for i in tl.static_range(16):
        down = (c + i)[:, None]
        mask = (c + i < short)[:, None] & (r < left)[None, :]
        v = v + (stored(x, scales, over, down, (first + r)[None, :], mask, code_row, scale_row, over_row, over_column),)
    return v


@triton.jit(do_not_specialize=["signs", "seed_low", "seed_high", "middle", "first_row", "first_column", "rows", "columns"])
def quantize_kernel(x, scale, over, peak, codes, inner, outer, out, drawn, signs, seed_low, seed_high, middle, first_row,
                    first_column, rows, columns, width, pitch, stride, scale_row, over_row, over_column, tiles, across,
                    A: tl.constexpr, B: tl.constexpr, TURNS: tl.constexpr, ALONG: tl.constexpr, AGAIN: tl.constexpr,
                    ROTATED: tl.constexpr, TALL: tl.constexpr, TENSOR: tl.constexpr, SEARCH: tl.constexpr, APART: tl.constexpr,
                    CHANCE: tl.constexpr, MARGIN: tl.constexpr, ALL: tl.constexpr, PART: tl.constexpr, SIX: tl.constexpr,
                    SIXTH: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr, PAIRS: tl.constexpr, HARDWARE: tl.constexpr,
                    FUSED: tl.constexpr):
    """A tile is A rows of B blocks, or, where the operand lies transposed, 8 blocks of B rows. AGAIN: x are codes whose transpose
    is quantised. SEARCH: only the peak is sought. Written are codes and scales, or `out`, what they stand for;
    APART: out without the outer scales, and these beside it. drawn: where signs and noise lie, in place of the numbers."""
    if drawn is not None:
        signs, seed_low, seed_high = tl.load(drawn), tl.load(drawn + 1), tl.load(drawn + 2)
    ROWS: tl.constexpr = A if ALONG else B
    COLUMNS: tl.constexpr = 16 * B if ALONG else 128
    first = tl.program_id(0) // across * (TURNS * ROWS)
    column = tl.program_id(0) % across * COLUMNS
    r = tl.arange(0, ROWS)
    c = tl.arange(0, COLUMNS // 16) * 16
    if ALONG:
        down, at = r[:, None], c[None, :]
    else:
        down, at = r[None, :], c[:, None]
    short = columns - column
    for turn in tl.range(tl.minimum(TURNS, tl.cdiv(rows - first, ROWS))):
        row = first + turn * ROWS
        left = rows - row
        if AGAIN:
            begin = column.to(tl.int64)
            v = blocks_again(x + begin * stride, scale + begin * scale_row, over + begin * over_row, r, c, row, left, short, stride,
                             scale_row, over_row, over_column)
        elif ALONG:
            v = blocks_along(x + row.to(tl.int64) * stride + column, r, c, left, short, stride, WIDTH, FULL, PAIRS)
        else:
            v = blocks_down(x + column.to(tl.int64) * stride + row, r, c, left, short, stride, FULL)
        if ROTATED:
            v = turned(v, signs, FUSED and not AGAIN and WIDTH == 8)
        bits = largest(v)
        if SEARCH:
            tl.atomic_max(peak, tl.max(tl.max(bits, 1), 0))
        else:
            if TALL:
                bits = tall(bits, ALONG)
            if TENSOR:
                most = tl.load(peak) + tl.zeros([A, B], tl.int32)
            else:
                most = shared(bits, ALONG)
            good, o, code, s, power = scales(bits, most, ALL, PART, SIX, SIXTH, MARGIN, HARDWARE, FUSED)
            if CHANCE:
                z = v
                none = bits >> 31  # 0, which ties the counters to where the data lie
                place = first_row + row + down + none
                group = (first_column + column + at) // 8 + none
                n, p = by_chance(v, s * o, not MARGIN, FUSED), noise(seed_low, seed_high, place, group, middle, FUSED)
            else:
                z = divided(v, s * o, power, FUSED)
                n, p = nearest(z)
            shown = tl.where(good, o, float("nan"))
            if out is not None:
                found = values(z, n, p, s, tl.full([A, B], 1.0, tl.float32) if APART else shown, out.dtype.element_ty, CHANCE)
                if not ALONG:
                    found = tl.permute(found, (1, 0, 2))
                found = tl.reshape(found, (ROWS, COLUMNS))
                side = tl.arange(0, COLUMNS)
                here = out + (row.to(tl.int64) * pitch + column) + (r[:, None] * pitch + side[None, :])
                if FULL:
                    tl.store(here, found)
                else:
                    tl.store(here, found, mask=(r < left)[:, None] & (column + side < width)[None, :])
            if out is None or APART:
                head = row.to(tl.int64) * tiles
                inside = (down < left) & (column + at < tiles * 128)
                place = down * (tiles * 16) + at // 8
                if not APART:
                    two = words(z, n, p, good, CHANCE, FUSED)
                    tl.store(codes + (head * 16 + column // 8) + place[:, :, None] + tl.arange(0, 2)[None, None, :], two,
                             mask=inside[:, :, None])
                    tl.store(inner + (head * 8 + column // 16) + place // 2, code.to(tl.uint8), mask=inside)
                inside &= at % 128 == 0
                if TENSOR:
                    tl.store(outer + place * 0, shown, mask=inside & (row + down == 0) & (column + at == 0))
                else:
                    tl.store(outer + (head + column // 128) + place // 16, shown, mask=inside)


@triton.jit(do_not_specialize=["rows", "columns"])
def dequantize_kernel(codes, inner, outer, out, rows, columns, code_row, scale_row, over_row, over_column, tiles,
                      ROWS: tl.constexpr):
    r = (tl.program_id(0) // tiles * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    c = (tl.program_id(0) % tiles * 128 + tl.arange(0, 128)).to(tl.int64)[None, :]
    mask = (r < rows) & (c < columns)
    v = stored(codes, inner, outer, r, c, mask, code_row, scale_row, over_row, over_column)
    tl.store(out + r * columns + c, v.to(out.dtype.element_ty), mask=mask)


def _chance(noise: Keyed, signs: Keyed) -> dict[str, Any]:
    """A row of `drawn` where one of them is, else the numbers. Raises ValueError for a row beside something else."""
    found = next((one for one in (noise, signs) if isinstance(one, Tensor)), None)
    if found is not None:
        if any(one is not None and one is not found for one in (noise, signs)):
            raise ValueError("nvfp4: noise and signs: expected two keys, or one row on the device for both")
        return {"drawn": found, "signs": 0, "seed_low": 0, "seed_high": 0}
    low, high = halves(noise or 0)
    return {"drawn": None, "signs": 0 if signs is None else sign_bits(signs), "seed_low": low, "seed_high": high}


def _steps(q: Quantized) -> dict[str, int]:
    """Strides of codes and scales; 0 of an outer scale of the whole tensor."""
    whole = q.outer.shape == (1, 1)
    return {"scale_row": q.inner.shape[1], "over_row": 0 if whole else q.outer.shape[1], "over_column": 0 if whole else 1}


@lru_cache(maxsize=4096)
def _plan(rows: int, columns: int, blocks: int, along: bool, again: bool, itemsize: int, even: bool, margin: float, tall: bool,
          tensor: bool, search: bool, apart: bool, chance: bool, rotated: bool) -> tuple:
    """(programs, how many side by side, constants, those of an architecture) of every operand of a shape; blocks: of a tile."""
    tiles = triton.cdiv(columns, OUTER)
    if along:
        b = 8 * min(tiles & -tiles, 1 if tall else blocks // 8)
        a, here, wide = blocks // b, blocks // b, 16 * b
    else:
        a, b, here, wide = 8, BESIDE, BESIDE, OUTER
    six, top = (c_float(margin * number).value for number in (TOP_CODE, TOP_SCALE * TOP_CODE))
    across = triton.cdiv(tiles * OUTER, wide)
    turns = 1 if again else next((n for n in TURNS if triton.cdiv(rows, here * n) * across >= PROGRAMS), TURNS[-1])
    full = rows % here == 0 and columns % OUTER == 0 and not again
    constants = Kept({
        "A": a, "B": b, "TURNS": turns, "ALONG": along, "AGAIN": again, "ROTATED": rotated, "TALL": tall, "TENSOR": tensor,
        "SEARCH": search, "APART": apart, "CHANCE": chance, "MARGIN": margin < 1.0, "ALL": top, "PART": 1.0 / top, "SIX": six,
        "SIXTH": 1.0 / six, "WIDTH": 16 // itemsize, "FULL": full, "PAIRS": full and along and itemsize == 2 and even})
    by_arch = {"HARDWARE": lambda arch: arch >= E4M3_FROM, "FUSED": lambda arch: arch > 0}
    return (triton.cdiv(rows, here * turns) * across,), across, constants, by_arch


def quantize_launch(x: Tensor | Quantized, codes: Tensor | None = None, inner: Tensor | None = None, outer: Tensor | None = None,
                    margin: float = 1.0, block: int = 1, noise: Keyed = None, *, out: Tensor | None = None,
                    signs: Keyed = None, origin: tuple[int, int] = (0, 0), peak: Tensor | None = None,
                    search: bool = False) -> Launch:
    """codes, inner (as uint8), outer: those of the result; or out [r, columns], its rows contiguous: what they stand for. peak:
    int32 [1], bits of the largest magnitude of the whole tensor. x: one of its strides is 1."""
    again = isinstance(x, Quantized)
    rows, columns = (x.columns, len(x.codes)) if again else x.shape
    along = not again and x.stride(1) == 1
    even = along and x.stride(0) % 2 == 0 and (x.storage_offset() * 2 if x.is_meta else x.data_ptr()) % 4 == 0
    size = 4 if again else x.element_size()
    blocks, warps = (VALUE_BLOCKS, VALUE_WARPS) if along and out is not None and block == 1 else (BLOCKS, WARPS)
    grid, across, constants, by_arch = _plan(rows, columns, blocks, along, again, size, even, margin, block > 1, peak is not None,
                                             search, out is not None and outer is not None, noise is not None, signs is not None)
    arguments = {"x": x.codes if again else x, "scale": x.inner.view(torch.uint8) if again else None,
                 "over": x.outer if again else None, "peak": peak, "codes": None if codes is None else codes.view(torch.int32),
                 "inner": inner, "outer": outer, "out": out, **_chance(noise, signs),
                 "middle": 0x8000, "first_row": origin[0], "first_column": origin[1], "rows": rows, "columns": columns,
                 "width": 0 if out is None else out.shape[1], "pitch": 0 if out is None else out.stride(0),
                 "stride": x.codes.shape[1] if again else x.stride(0 if along else 1),
                 **(_steps(x) if again else {"scale_row": 0, "over_row": 0, "over_column": 0}),
                 "tiles": triton.cdiv(columns, OUTER), "across": across}
    limited = not along and noise is not None and size == 2 and constants["FULL"]
    return Launch(quantize_kernel, grid, arguments, constants, warps, by_arch, DOWN_REGISTERS if limited else None)


def dequantize_launch(q: Quantized, out: Tensor) -> Launch:
    """out [r, columns], contiguous."""
    tiles = q.codes.shape[1] * 2 // OUTER
    arguments = {"codes": q.codes, "inner": q.inner.view(torch.uint8), "outer": q.outer, "out": out, "rows": len(q.codes),
                 "columns": q.columns, "code_row": q.codes.shape[1], **_steps(q), "tiles": tiles}
    return Launch(dequantize_kernel, (triton.cdiv(len(q.codes), ROWS) * tiles,), arguments, {"ROWS": ROWS}, WARPS)


def quantize(x: Tensor, rounding: str = "nearest", margin: float = 1.0, outer: int | str = OUTER, block: int = 1,
             noise: Keyed = None, *, signs: Keyed = None, origin: tuple[int, int] = (0, 0),
             peak: Tensor | None = None) -> Quantized:
    """x [r, k] of any float dtype and strides -> Quantized, the contraction along k.

    rounding: nearest (ties to the even code) or stochastic. margin: 1, or 16/17 under which nothing clips. outer: elements under a
    float32 scale, 128 or `tensor`. block: 1 for inner scales over 1x16, 16 for 16x16. noise: a 64-bit key, of stochastic
    rounding. signs: a 64-bit key of a rotation by 16, None for none. Either may lie on x's device instead, as a row of
    kernels.nvfp4_reference.drawn, the same row for both: it is read when the kernel runs. origin: (row, column) of x[0, 0] in the
    unsharded tensor, the column a multiple of 8. peak: float32 [], the largest magnitude of the unsharded (rotated) tensor, for
    outer `tensor`. Raises ValueError for what does not fit.
    """
    checked(x, rounding, margin, outer, block, noise, origin)
    return _quantized(_readable(x), x.shape, x.device, margin, outer, block, noise, signs, origin, peak)


def rounded(x: Tensor, rounding: str = "nearest", margin: float = 1.0, outer: int | str = OUTER, block: int = 1,
            noise: Keyed = None, *, signs: Keyed = None, origin: tuple[int, int] = (0, 0), peak: Tensor | None = None,
            dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None) -> Tensor:
    """quantize(x, ...).dequantize(dtype) in one pass over memory: [r, k], k filled up to a multiple of 16 where rotated.

    dtype: bfloat16 or float32, of the result or of `out`, into which it is written where given; its rows are contiguous. Raises
    ValueError for what does not fit.
    """
    checked(x, rounding, margin, outer, block, noise, origin)
    shape = len(x), x.shape[1] + (-x.shape[1] % INNER if signs is not None else 0)
    found = torch.empty(shape, dtype=dtype, device=x.device) if out is None else out
    if found.dtype not in DTYPES:
        raise ValueError(f"nvfp4: {found.dtype}: dequantised in float32 or bfloat16")
    if found.shape != shape or (shape[1] > 1 and found.stride(1) != 1):
        raise ValueError(f"nvfp4: out {tuple(found.shape)}: expected {shape} with contiguous rows")
    if found.numel():
        x, options = _readable(x), {"margin": margin, "block": block, "noise": noise, "signs": signs, "origin": origin}
        quantize_launch(x, out=found, **options, peak=_held(x, outer, peak, signs)).run()
    return found


def inner_values(x: Tensor, rounding: str = "nearest", margin: float = 1.0, outer: int | str = OUTER, block: int = 1,
                 noise: Keyed = None, *, signs: Keyed = None, origin: tuple[int, int] = (0, 0),
                 peak: Tensor | None = None, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(codes times inner scales of quantize(x, ...), bfloat16 [r, K], exact; outer scales, float32 [r, K/128] or [1, 1]).

    What products over slabs multiply. K: k filled up with zeros to a multiple of 128. out: as in `rounded`. Raises ValueError
    for what does not fit.
    """
    checked(x, rounding, margin, outer, block, noise, origin)
    tiles = -(-x.shape[1] // OUTER)
    found = torch.empty(len(x), tiles * OUTER, dtype=torch.bfloat16, device=x.device) if out is None else out
    if found.dtype != torch.bfloat16 or found.shape != (len(x), tiles * OUTER) or (found.numel() and found.stride(1) != 1):
        wanted = f"bfloat16 {(len(x), tiles * OUTER)} with contiguous rows"
        raise ValueError(f"nvfp4: out {found.dtype} {tuple(found.shape)}: expected {wanted}")
    over = torch.empty((1, 1) if outer == "tensor" else (len(x), tiles), device=x.device)
    if not found.numel():
        over.fill_(1.0)
    else:
        x, options = _readable(x), {"margin": margin, "block": block, "noise": noise, "signs": signs, "origin": origin}
        quantize_launch(x, outer=over, out=found, **options, peak=_held(x, outer, peak, signs)).run()
    return found, over


def largest_magnitude(x: Tensor, signs: Keyed = None) -> Tensor:
    """Of x [r, k], rotated where signs are given: float32 []. A NaN is above all; 0 of an empty tensor."""
    if not x.numel():
        return torch.zeros((), device=x.device)
    return _held(_readable(x), "tensor", None, signs).view(torch.float32).reshape(())


def requantize(given: Quantized, rounding: str = "nearest", margin: float = 1.0, outer: int | str = OUTER,
               noise: Keyed = None, *, signs: Keyed = None, origin: tuple[int, int] = (0, 0)) -> Quantized:
    """[r, k] quantised along k -> its transpose [k, r] quantised along r, from the dequantised values; options as in `quantize`."""
    checked(torch.empty(0, 0), rounding, margin, outer, 1, noise, origin)
    return _quantized(given, (given.columns, len(given.codes)), given.codes.device, margin, outer, 1, noise, signs, origin, None)


def dequantize(q: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """[r, columns] in float32 or bfloat16. Raises ValueError for another dtype."""
    if dtype not in DTYPES:
        raise ValueError(f"nvfp4: {dtype}: dequantised in float32 or bfloat16")
    out = torch.empty(len(q.codes), q.columns, dtype=dtype, device=q.codes.device)
    if out.numel():
        dequantize_launch(q, out).run()
    return out


def _readable(x: Tensor) -> Tensor:
    """Of a dtype that kernels read, its elements beside one another along rows or columns."""
    x = x if x.dtype in DTYPES else x.to(torch.float32)
    return x if 1 in x.stride() else x.contiguous()


def _held(x: Tensor | Quantized, outer: int | str, peak: Tensor | None, signs: Keyed) -> Tensor | None:
    """Bits of the largest magnitude, int32 [1], sought where they are not given; None where outer scales are of blocks."""
    if outer != "tensor":
        return None
    if peak is not None:
        return peak.to(torch.float32).reshape(1).view(torch.int32) & 0x7FFFFFFF
    held = torch.zeros(1, dtype=torch.int32, device=x.codes.device if isinstance(x, Quantized) else x.device)
    quantize_launch(x, signs=signs, peak=held, search=True).run()
    return held


def _quantized(x: Tensor | Quantized, shape: tuple[int, int], device: torch.device, margin: float, outer: int | str, block: int,
               noise: Keyed, signs: Keyed, origin: tuple[int, int], peak: Tensor | None) -> Quantized:
    rows, columns = shape
    tiles = -(-columns // OUTER)
    codes, inner = (torch.empty(rows, tiles * n, dtype=torch.uint8, device=device) for n in (OUTER // 2, OUTER // INNER))
    over = torch.empty((1, 1) if outer == "tensor" else (rows, tiles), device=device)
    if rows and columns:
        options = {"margin": margin, "block": block, "noise": noise, "signs": signs, "origin": origin}
        quantize_launch(x, codes, inner, over, **options, peak=_held(x, outer, peak, signs)).run()
    elif outer == "tensor":
        over.fill_(1.0)
    if signs is not None:
        columns += -columns % INNER
    return Quantized(codes, inner.view(torch.float8_e4m3fn), over, columns)
