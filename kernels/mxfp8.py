"""MXFP8 in one pass over memory: what E4M3 codes under power-of-two scales over 32 stand for.

    amax over 32 along the contraction        s = the smallest power of two of at least amax / 448        x̂ = E4M3(x / s) · s

Nothing clips, and products by a power of two are exact: x̂ is rounded once, to the code. A block that holds a NaN or Inf is NaN. It
is what OutControl's retained channels pass through (suite/precision/linear.py), transposed too: [r, k] is read where it lies, rows
or columns contiguous, and written with contiguous rows. Plain torch: kernels.reference.mxfp8_rounded.
"""
from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import DTYPES
from kernels.float8 import E4M3_FROM, from_code, to_code
from kernels.launch import Kept, Launch

BLOCK = tl.constexpr(32)  # elements under a scale
TILES = {True: (16, 128), False: (64, 64)}  # rows and columns of a program, where x has contiguous rows and where columns
WARPS = 4


@triton.jit(do_not_specialize=["rows", "columns"])
def rounded_kernel(x, out, rows, columns, row_step, column_step, pitch, across, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                   FULL: tl.constexpr, HARDWARE: tl.constexpr):
    r = (tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    c = (tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)[None, :]
    here = x + (r * row_step + c * column_step)
    if FULL:
        v = tl.load(here)
    else:
        mask = (r < rows) & (c < columns)
        v = tl.load(here, mask=mask, other=0.0)
    v = tl.reshape(v.to(tl.float32), (ROWS, COLUMNS // BLOCK, BLOCK))
    # the order of magnitudes is that of their bits, NaN above all
    most = tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 2)
    good = most < 0x7F800000
    # 448 is 1.75 · 2^8: a magnitude beyond 1.75 · 2^e needs the next power
    power = tl.maximum((tl.where(good, most, 0) + 0x1FFFFF & 0x7F800000) - (8 << 23), 1 << 23)
    scale = power.to(tl.float32, bitcast=True)
    inverse = ((254 << 23) - power).to(tl.float32, bitcast=True)
    code = from_code(to_code(v * inverse[:, :, None], 3, -6, HARDWARE), tl.float32, 3, -6, HARDWARE)
    # whatever the codes of a NaN or Inf are, times NaN
    found = code * tl.where(good, scale, float("nan"))[:, :, None]
    found = tl.reshape(found, (ROWS, COLUMNS)).to(out.dtype.element_ty)
    if FULL:
        tl.store(out + (r * pitch + c), found)
    else:
        tl.store(out + (r * pitch + c), found, mask=mask)


BY_ARCH = {"HARDWARE": lambda arch: arch >= E4M3_FROM}


@cache
def _constants(along: bool, full: bool) -> Kept:
    rows, columns = TILES[along]
    return Kept({"ROWS": rows, "COLUMNS": columns, "FULL": full})


def rounded_launch(x: Tensor, out: Tensor) -> Launch:
    """x, out [r, k]; one stride of x is 1, and out's rows are contiguous."""
    rows, columns = TILES[x.stride(1) == 1]
    across = triton.cdiv(x.shape[1], columns)
    arguments = {"x": x, "out": out, "rows": len(x), "columns": x.shape[1], "row_step": x.stride(0), "column_step": x.stride(1),
                 "pitch": out.stride(0), "across": across}
    constants = _constants(x.stride(1) == 1, len(x) % rows == x.shape[1] % columns == 0)
    return Launch(rounded_kernel, (triton.cdiv(len(x), rows) * across,), arguments, constants, WARPS, BY_ARCH)


def rounded(x: Tensor, *, dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None) -> Tensor:
    """x [r, k] bfloat16 or float32, blocks along k -> what its codes stand for, [r, k] with contiguous rows.

    dtype: bfloat16 or float32, of the result. out: where it is written, given back. Raises ValueError for what does not fit."""
    x = x if 1 in x.stride() else x.contiguous()
    out = torch.empty(x.shape, dtype=dtype, device=x.device) if out is None else out
    for one in (x, out):
        if one.dtype not in DTYPES:
            raise ValueError(f"mxfp8: {one.dtype}: expected bfloat16 or float32")
    if out.shape != x.shape or (out.numel() and out.shape[1] > 1 and out.stride(1) != 1):
        raise ValueError(f"mxfp8: out {tuple(out.shape)}: expected {tuple(x.shape)} with contiguous rows")
    if out.numel():
        rounded_launch(x, out).run()
    return out
