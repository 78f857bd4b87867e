"""Products of two NVFP4 operands, a [m, k] and b [n, k] -> a bᵀ [m, n], from codes and scales as they lie.

    slab      Σ over slabs of 128 along k of ((q s)_a (q s)_bᵀ) · o_a · o_b     any architecture; the paper's semantics: q · s is
              exact in bfloat16, sums of a slab are float32 on tensor cores, outer scales are applied in float32 after each
    values    the same of operands whose q · s are given in bfloat16: what training at level slab runs, no code is read there
    native    the same sum with block-scaled FP4 tensor cores (`dot_scaled`): sm_100 and sm_120

`native` is compiled and its instructions are looked at without the hardware; it has been run nowhere. Elsewhere it is refused.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.float8 import from_code
from kernels.launch import Launch
from kernels.nvfp4_reference import OUTER, Quantized, fits
from kernels.nvfp4_tile import number

M, N, WARPS = 64, 64, 4
NATIVE_M, NATIVE_N, NATIVE_WARPS = 128, 128, 8
TILE, TILE_WARPS, BESIDE = 128, 8, 8
SMALL = 64  # of a tile in the interpreter
STAGES = {80: 2, 90: 3, 100: 3}  # slabs under way; one has 64 KiB
NATIVE = (100, 103, 120, 121)  # architectures with block-scaled FP4 tensor cores


@triton.jit
def _operand(codes, inner, r, rows, slab, tiles, R: tl.constexpr, WIDE: tl.constexpr):
    """Codes times inner scales of one slab, [R, 128]."""
    mask = (r < rows)[:, None]
    byte = tl.load(codes + r[:, None] * tiles * 64 + slab * 64 + tl.arange(0, 64)[None, :], mask=mask, other=0).to(tl.int32)
    v = tl.reshape(tl.join(number(byte & 15), number(byte >> 4)), (R, 8, 16))
    scale = tl.load(inner + r[:, None] * tiles * 8 + slab * 8 + tl.arange(0, 8)[None, :], mask=mask, other=0)
    s = from_code(scale, tl.float32, 3, -6, False)
    return tl.reshape(v * s[:, :, None], (R, 128)).to(tl.float32 if WIDE else tl.bfloat16)


@triton.jit
def _packed(codes, inner, r, rows, slab, tiles):
    """Codes [R, 64] and inner scales [R, 8] of one slab."""
    mask = (r < rows)[:, None]
    code = tl.load(codes + r[:, None] * tiles * 64 + slab * 64 + tl.arange(0, 64)[None, :], mask=mask, other=0)
    s = tl.load(inner + r[:, None] * tiles * 8 + slab * 8 + tl.arange(0, 8)[None, :], mask=mask, other=0)
    return code, s.to(tl.float8e4nv, bitcast=True)


@triton.jit(do_not_specialize=["rows", "columns", "tiles"])
def slab_kernel(a, a_inner, a_outer, b, b_inner, b_outer, out, rows, columns, tiles, a_row, a_slab, b_row, b_slab, M: tl.constexpr,
                N: tl.constexpr, WIDE: tl.constexpr, FP4: tl.constexpr):
    i = (tl.program_id(0) * M + tl.arange(0, M)).to(tl.int64)
    j = (tl.program_id(1) * N + tl.arange(0, N)).to(tl.int64)
    total = tl.zeros([M, N], tl.float32)
    # zeros that the compiler cannot see through: Triton 3.7.1 fails on a constant accumulator for sm_100
    nothing = tl.zeros([M, N], tl.float32) + (tiles < 0).to(tl.float32)
    for slab in range(tiles):
        if FP4:
            left, above = _packed(a, a_inner, i, rows, slab, tiles)
            right, below = _packed(b, b_inner, j, columns, slab, tiles)
            part = tl.dot_scaled(left, above, "e2m1", tl.trans(right), below, "e2m1", acc=nothing)
        else:
            left = _operand(a, a_inner, i, rows, slab, tiles, M, WIDE)
            right = _operand(b, b_inner, j, columns, slab, tiles, N, WIDE)
            part = tl.dot(left, tl.trans(right), input_precision="ieee")
        over = tl.load(a_outer + i * a_row + slab * a_slab, mask=i < rows, other=0.0)
        under = tl.load(b_outer + j * b_row + slab * b_slab, mask=j < columns, other=0.0)
        total += part * over[:, None] * under[None, :]
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    tl.store(out + i[:, None] * columns + j[None, :], total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "columns", "tiles"])
def values_kernel(a, a_outer, b, b_outer, out, rows, columns, tiles, a_row, b_row, a_outer_row, a_outer_slab, b_outer_row,
                  b_outer_slab, M: tl.constexpr, N: tl.constexpr, BESIDE: tl.constexpr, STAGES: tl.constexpr, WIDE: tl.constexpr):
    """Operands [rows, K] and [columns, K] as numbers. Programs go down BESIDE tiles before they go right, and share what they
    read."""
    down, across = tl.cdiv(rows, M), tl.cdiv(columns, N)
    band = tl.program_id(0) // (BESIDE * across) * BESIDE
    height = tl.minimum(down - band, BESIDE)
    place = tl.program_id(0) % (BESIDE * across)
    i = (band + place % height) * M + tl.arange(0, M)
    j = place // height * N + tl.arange(0, N)
    # rows beyond the last are read as the first ones, and not written
    left = a + (i % rows).to(tl.int64)[:, None] * a_row + tl.arange(0, 128)[None, :]
    right = b + (j % columns).to(tl.int64)[None, :] * b_row + tl.arange(0, 128)[:, None]
    over, under = a_outer + (i % rows) * a_outer_row, b_outer + (j % columns) * b_outer_row
    total = tl.zeros([M, N], tl.float32)
    for slab in tl.range(tiles, num_stages=STAGES):
        one, other = tl.load(left + slab * 128), tl.load(right + slab * 128)
        if WIDE:
            part = tl.dot(one.to(tl.float32), other.to(tl.float32), input_precision="ieee")
        else:
            part = tl.dot(one, other)
        total += part * tl.load(over + slab * a_outer_slab)[:, None] * tl.load(under + slab * b_outer_slab)[None, :]
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    tl.store(out + i.to(tl.int64)[:, None] * columns + j[None, :], total.to(out.dtype.element_ty), mask=inside)


def values_launch(a: Tensor, a_outer: Tensor, b: Tensor, b_outer: Tensor, out: Tensor, wide: bool = False) -> Launch:
    """As `slab_values`; out [m, n], contiguous."""
    arguments = {"a": a, "a_outer": a_outer, "b": b, "b_outer": b_outer, "out": out, "rows": len(a), "columns": len(b),
                 "tiles": a.shape[1] // OUTER, "a_row": a.stride(0), "b_row": b.stride(0)}
    for name, outer in (("a", a_outer), ("b", b_outer)):
        whole = outer.shape == (1, 1)
        arguments |= {f"{name}_outer_row": 0 if whole else outer.stride(0), f"{name}_outer_slab": 0 if whole else outer.stride(1)}
    tile = SMALL if wide else TILE
    grid = (triton.cdiv(len(a), tile) * triton.cdiv(len(b), tile),)
    return Launch(values_kernel, grid, arguments, {"M": tile, "N": tile, "BESIDE": BESIDE, "WIDE": wide}, 4 if wide else TILE_WARPS,
                  {"STAGES": lambda arch: STAGES.get(arch, 1)})


def slab_values(a: Tensor, a_outer: Tensor, b: Tensor, b_outer: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """`slab` of operands as `kernels.nvfp4.inner_values` gives them, a [m, K] and b [n, K] bfloat16 -> [m, n]: nothing is decoded
    again for every tile. Raises ValueError where they have no common contraction."""
    if a.shape[1] != b.shape[1] or a.shape[1] % OUTER:
        raise ValueError(f"nvfp4: contraction of {a.shape[1]} columns against {b.shape[1]}, in whole slabs of {OUTER}")
    make = torch.empty if a.shape[1] else torch.zeros
    out = make(len(a), len(b), dtype=dtype, device=a.device)
    if out.numel() and a.shape[1]:
        values_launch(a, a_outer, b, b_outer, out, wide=out.device.type == "cpu").run()
    return out


def launch(a: Quantized, b: Quantized, out: Tensor, native: bool = False, wide: bool = False) -> Launch:
    """out [m, n], contiguous. wide: float32 operands, for the interpreter, whose bfloat16 products are wrong (Triton 3.7.1)."""
    m, n = (NATIVE_M, NATIVE_N) if native else (M, N)
    arguments = {"a": a.codes, "a_inner": a.inner.view(torch.uint8), "a_outer": a.outer, "b": b.codes,
                 "b_inner": b.inner.view(torch.uint8), "b_outer": b.outer, "out": out, "rows": len(a.codes),
                 "columns": len(b.codes), "tiles": a.codes.shape[1] * 2 // OUTER}
    for name, q in (("a", a), ("b", b)):
        whole = q.outer.shape == (1, 1)
        arguments |= {f"{name}_row": 0 if whole else q.outer.shape[1], f"{name}_slab": 0 if whole else 1}
    constants = {"M": m, "N": n, "WIDE": wide, "FP4": native}
    return Launch(slab_kernel, (triton.cdiv(len(a.codes), m), triton.cdiv(len(b.codes), n)), arguments, constants,
                  NATIVE_WARPS if native else WARPS)


def slab(a: Quantized, b: Quantized, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """a of [m, k], b of [n, k] -> [m, n]. Raises ValueError where they have no common contraction."""
    fits(a, b)
    make = torch.empty if a.columns else torch.zeros
    out = make(len(a.codes), len(b.codes), dtype=dtype, device=a.codes.device)
    if out.numel() and a.columns:
        launch(a, b, out, wide=out.device.type == "cpu").run()
    return out


def native(a: Quantized, b: Quantized, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """As `slab`. Raises RuntimeError where there are no block-scaled FP4 tensor cores."""
    fits(a, b)
    device = a.codes.device
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    if 10 * major + minor not in NATIVE:
        here = f"sm_{10 * major + minor}" if major else "a CPU"
        raise RuntimeError(f"nvfp4: native products need FP4 tensor cores (sm_100, sm_120), this is {here}; take level slab")
    make = torch.empty if a.columns else torch.zeros
    out = make(len(a.codes), len(b.codes), dtype=dtype, device=device)
    if out.numel() and a.columns:
        launch(a, b, out, native=True).run()
    return out
