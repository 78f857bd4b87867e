"""What BOOST does around the bottleneck, one pass over memory each (arXiv 2512.12131, Algorithm 1).

    scale      x [T, n], gain [n]       s = Σ x²,  l = sqrt(s/n + eps),  y = x / l · gain     -> y [T, n], s [T], l [T]
               `local: false`           s = Σ x²,  y = x · gain, no l                         -> y [T, n], s [T], l [0]
    epilogue   p [T, m], s [T]          y = p · w,  w = rsqrt(s/D + eps),  h = y σ(y)         -> h [T, m]
    its backward, of dh [T, m]          dy = dh σ(y)(1 + y(1 - σ(y))),  dp = dy · w,
                                        ds = -Σ dy y / (2 D) · w²                             -> dp [T, m], ds [T]

`scale` and the backward pass need a sum over the row: a program owns a row and keeps it in registers, so that inputs are read
once (`scale`), or passes over it in pieces of a power of two, which need no mask. The epilogue runs in tiles. Bytes moved:
2·T·n, 2·T·m and 3·T·m elements. Arithmetic in float32; roots, reciprocals and exponentials by the hardware's approximations (2
units in the last place), so that there are some ten instructions an element and memory decides. p is kept and y computed again,
so that nothing but what ranks exchanged is saved. `silu: false` leaves the function out (factors without one). Plain torch:
kernels.bottleneck_reference.
"""
from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import Kept, Launch

WIDEST = 16384  # elements of a row that one program holds
TILE = 2048  # elements of a tile, and at most of a piece
BY_ARCH = {"ASM": lambda arch: arch > 0}  # the interpreter runs no assembly
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _sigmoid(y, ASM: tl.constexpr):
    """1 / (1 + 2^(-y log2 e)); results below float32's normal numbers are flushed to zero."""
    if ASM:
        gate = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;\nadd.rn.f32 $0, $0, 0f3F800000;\nrcp.approx.ftz.f32 $0, $0;",
                                         "=f,f", [y * -_LOG2E], dtype=tl.float32, is_pure=True, pack=1)
    else:
        gate = tl.sigmoid(y)
    return gate


@triton.jit
def scale_kernel(x, gain, y, square, rms, width, inverse, eps, LOCAL: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr,
                 ASM: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = None if FULL else column < width
    value = tl.load(x + row * width + column, mask=inside, other=None if FULL else 0.0).to(tl.float32)
    factor = tl.load(gain + column, mask=inside, other=None if FULL else 0.0).to(tl.float32)
    total = tl.sum(value * value, axis=0)
    tl.store(square + row, total)
    if LOCAL:
        mean = total * inverse + eps
        over = tl.rsqrt(mean)
        tl.store(rms + row, mean * over)
        value *= over
    tl.store(y + row * width + column, value * factor, mask=inside)


@triton.jit
def epilogue_kernel(p, square, h, rows, width, inverse, eps, SILU: tl.constexpr, FULL: tl.constexpr, ROWS: tl.constexpr,
                    BLOCK: tl.constexpr, ASM: tl.constexpr):
    first = tl.program_id(1).to(tl.int64) * ROWS
    row = first + tl.arange(0, ROWS)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known = None if FULL else row < rows
    inside = None if FULL else (row < rows)[:, None] & (column < width)[None, :]
    here = first * width + (tl.arange(0, ROWS)[:, None] * width + column[None, :])
    value = tl.load(p + here, mask=inside).to(tl.float32)
    w = tl.rsqrt(tl.load(square + row, mask=known) * inverse + eps)
    y = value * w[:, None]
    if SILU:
        y *= _sigmoid(y, ASM)
    tl.store(h + here, y, mask=inside)


@triton.jit
def epilogue_backward_kernel(p, square, dh, dp, ds, width, inverse, eps, SILU: tl.constexpr, FULL: tl.constexpr,
                             PIECES: tl.constexpr, BLOCK: tl.constexpr, ASM: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    w = tl.rsqrt(tl.load(square + row) * inverse + eps)
    dot = tl.zeros([BLOCK], tl.float32)
    for piece in tl.static_range(PIECES):
        column = piece * BLOCK + tl.arange(0, BLOCK)
        inside = None if FULL else column < width
        value = tl.load(p + row * width + column, mask=inside, other=None if FULL else 0.0).to(tl.float32)
        dy = tl.load(dh + row * width + column, mask=inside, other=None if FULL else 0.0).to(tl.float32)
        y = value * w
        if SILU:
            gate = _sigmoid(y, ASM)
            dy *= gate * tl.fma(y, 1.0 - gate, 1.0)
        tl.store(dp + row * width + column, dy * w, mask=inside)
        dot = tl.fma(dy, y, dot)
    tl.store(ds + row, -0.5 * tl.sum(dot, axis=0) * inverse * w * w)


def _held(width: int) -> int:
    """Elements of a block that holds a row. Raises ValueError where none does."""
    if not 1 <= width <= WIDEST:
        raise ValueError(f"bottleneck: a row of {width} elements; 1 to {WIDEST} are held")
    return max(64, triton.next_power_of_2(width))


def _piece(width: int) -> int:
    """The largest power of two up to TILE that divides the width; 0 where it is too small to be worth it."""
    piece = min(TILE, width & -width)
    return piece if piece >= 128 else 0


@lru_cache(maxsize=4096)
def _whole(width: int, local: bool) -> tuple[Kept, int]:
    """(constants, warps) of a program that holds a row."""
    block = _held(width)
    return Kept({"LOCAL": local, "FULL": block == width, "BLOCK": block}), min(16, max(1, block // 512))


@lru_cache(maxsize=4096)
def _pieces(width: int, silu: bool) -> tuple[Kept, int]:
    """(constants, warps) of a program that passes over a row piece by piece, or holds it where it has none."""
    held = _held(width)
    block = _piece(width) or held
    constants = {"SILU": silu, "FULL": width % block == 0, "PIECES": triton.cdiv(width, block), "BLOCK": block}
    return Kept(constants), min(16, max(1, block // 256))


@lru_cache(maxsize=4096)
def _tiled(rows: int, width: int, silu: bool) -> tuple[Kept, tuple[int, int]]:
    """(constants, grid) of tiles that cover [rows, width]."""
    block = _piece(width) or min(TILE // 2, _held(width))
    high = TILE // block
    full = width % block == 0 and rows % high == 0
    return Kept({"SILU": silu, "FULL": full, "ROWS": high, "BLOCK": block}), (triton.cdiv(width, block), triton.cdiv(rows, high))


def _rows(*tensors: Tensor) -> tuple[int, int]:
    first = tensors[0]
    if any(t.shape != first.shape or t.dim() != 2 or not t.is_contiguous() for t in tensors):
        raise ValueError(f"bottleneck: {', '.join(str(tuple(t.shape)) for t in tensors)} are not contiguous and alike [T, n]")
    return first.shape


def scale_launch(x: Tensor, gain: Tensor, eps: float, local: bool, y: Tensor, square: Tensor, rms: Tensor | None) -> Launch:
    rows, width = _rows(x, y)
    if gain.shape != (width,):
        raise ValueError(f"bottleneck: gain {tuple(gain.shape)} does not fit rows of {width}")
    constants, warps = _whole(width, local)
    return Launch(scale_kernel, (rows,), {"x": x, "gain": gain, "y": y, "square": square, "rms": rms if local else None,
                                          "width": width, "inverse": 1.0 / width, "eps": float(eps)}, constants, warps, BY_ARCH)


def epilogue_launch(p: Tensor, square: Tensor, hidden: int, eps: float, silu: bool, h: Tensor) -> Launch:
    rows, width = _rows(p, h)
    constants, grid = _tiled(rows, width, silu)
    return Launch(epilogue_kernel, grid, {"p": p, "square": square, "h": h, "rows": rows, "width": width, "inverse": 1.0 / hidden,
                                          "eps": float(eps)}, constants, 4, BY_ARCH)


def epilogue_backward_launch(p: Tensor, square: Tensor, dh: Tensor, hidden: int, eps: float, silu: bool, dp: Tensor,
                             ds: Tensor) -> Launch:
    rows, width = _rows(p, dh, dp)
    constants, warps = _pieces(width, silu)
    return Launch(epilogue_backward_kernel, (rows,), {"p": p, "square": square, "dh": dh, "dp": dp, "ds": ds, "width": width,
                                                      "inverse": 1.0 / hidden, "eps": float(eps)}, constants, warps, BY_ARCH)


def scale(x: Tensor, gain: Tensor, eps: float, local: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, n], gain [n], contiguous, on a GPU -> (x / l · gain [T, n], Σ x² [T], l [T]), the last two float32; not `local`:
    (x · gain, Σ x², nothing)."""
    y = torch.empty_like(x)
    square, rms = (torch.empty(n, dtype=torch.float32, device=x.device) for n in (len(x), len(x) if local else 0))
    if x.numel():
        scale_launch(x, gain, eps, local, y, square, rms).run()
    return y, square, rms


def epilogue(p: Tensor, square: Tensor, hidden: int, eps: float, silu: bool) -> Tensor:
    """p [T, m], the summed product; square [T] float32, the summed statistic of rows of `hidden` -> f(p / RMS) [T, m]."""
    h = torch.empty_like(p)
    if p.numel():
        epilogue_launch(p, square, hidden, eps, silu, h).run()
    return h


def epilogue_backward(p: Tensor, square: Tensor, dh: Tensor, hidden: int, eps: float, silu: bool) -> tuple[Tensor, Tensor]:
    """As `epilogue`, dh [T, m] -> (gradient of p [T, m], gradient of the statistic [T] float32)."""
    dp, ds = torch.empty_like(p), torch.empty(len(p), dtype=torch.float32, device=p.device)
    if p.numel():
        epilogue_backward_launch(p, square, dh, hidden, eps, silu, dp, ds).run()
    return dp, ds
