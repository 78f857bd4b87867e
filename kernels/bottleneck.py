"""What BOOST does around the bottleneck, one pass over memory each (arXiv 2512.12131, Algorithm 1).

    scale      x [T, n], gain [n]       s = Σ x²,  l = sqrt(s/n + eps),  y = x / l · gain     -> y [T, n], s [T], l [T]
    epilogue   p [T, m], s [T]          y = p · w,  w = rsqrt(s/D + eps),  h = y σ(y)         -> h [T, m]
    its backward, of dh [T, m]          dy = dh σ(y)(1 + y(1 - σ(y))),  dp = dy · w,
                                        ds = -Σ dy y / (2 D) · w²                             -> dp [T, m], ds [T]

A program owns a row and keeps it in registers: `scale` and the backward pass need a sum over the row before or beside what they
write, and read their inputs once. Bytes moved: 2·T·n, 2·T·m and 3·T·m elements. Arithmetic in float32. p is kept and y computed
again, so that nothing but what ranks exchanged is saved. `silu: false` leaves the function out (factors without one).
Plain torch: kernels.bottleneck_reference.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import Launch

WIDEST = 16384  # elements of a row that one program holds


@triton.jit
def scale_kernel(x, gain, y, square, rms, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.sum(value * value, axis=0)
    local = tl.sqrt_rn(tl.div_rn(total, tl.zeros([], tl.float32) + width) + eps)
    factor = tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * width + column, value * tl.div_rn(1.0, local) * factor, mask=inside)
    tl.store(square + row, total)
    tl.store(rms + row, local)


@triton.jit
def epilogue_kernel(p, square, h, width, hidden, eps, SILU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    w = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.load(square + row), hidden) + eps))
    y = tl.load(p + row * width + column, mask=inside, other=0.0).to(tl.float32) * w
    if SILU:
        y = y * tl.sigmoid(y)
    tl.store(h + row * width + column, y, mask=inside)


@triton.jit
def epilogue_backward_kernel(p, square, dh, dp, ds, width, hidden, eps, SILU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    w = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.load(square + row), hidden) + eps))
    y = tl.load(p + row * width + column, mask=inside, other=0.0).to(tl.float32) * w
    dy = tl.load(dh + row * width + column, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        gate = tl.sigmoid(y)
        dy = dy * gate * (1.0 + y * (1.0 - gate))
    tl.store(dp + row * width + column, dy * w, mask=inside)
    tl.store(ds + row, -0.5 * tl.div_rn(tl.sum(dy * y, axis=0), hidden) * w * w)


def _block(width: int) -> tuple[int, int]:
    """(elements, warps) of a program that holds a row. Raises ValueError where none does."""
    if not 1 <= width <= WIDEST:
        raise ValueError(f"bottleneck: a row of {width} elements; 1 to {WIDEST} are held")
    block = max(64, triton.next_power_of_2(width))
    return block, min(16, max(1, block // 512))


def _rows(*tensors: Tensor) -> tuple[int, int]:
    first = tensors[0]
    if any(t.shape != first.shape or t.dim() != 2 or not t.is_contiguous() for t in tensors):
        raise ValueError(f"bottleneck: {', '.join(str(tuple(t.shape)) for t in tensors)} are not contiguous and alike [T, n]")
    return first.shape


def scale_launch(x: Tensor, gain: Tensor, eps: float, y: Tensor, square: Tensor, rms: Tensor) -> Launch:
    rows, width = _rows(x, y)
    if gain.shape != (width,):
        raise ValueError(f"bottleneck: gain {tuple(gain.shape)} does not fit rows of {width}")
    block, warps = _block(width)
    return Launch(scale_kernel, (rows,), {"x": x, "gain": gain, "y": y, "square": square, "rms": rms, "width": width,
                                          "eps": float(eps)}, {"BLOCK": block}, warps)


def epilogue_launch(p: Tensor, square: Tensor, hidden: int, eps: float, silu: bool, h: Tensor) -> Launch:
    rows, width = _rows(p, h)
    block, warps = _block(width)
    return Launch(epilogue_kernel, (rows,), {"p": p, "square": square, "h": h, "width": width, "hidden": float(hidden),
                                             "eps": float(eps)}, {"SILU": silu, "BLOCK": block}, warps)


def epilogue_backward_launch(p: Tensor, square: Tensor, dh: Tensor, hidden: int, eps: float, silu: bool, dp: Tensor,
                             ds: Tensor) -> Launch:
    rows, width = _rows(p, dh, dp)
    block, warps = _block(width)
    return Launch(epilogue_backward_kernel, (rows,), {"p": p, "square": square, "dh": dh, "dp": dp, "ds": ds, "width": width,
                                                      "hidden": float(hidden), "eps": float(eps)},
                  {"SILU": silu, "BLOCK": block}, warps)


def scale(x: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, n], gain [n], contiguous, on a GPU -> (x / l · gain [T, n], Σ x² [T], l [T]), the last two float32."""
    y = torch.empty_like(x)
    square, rms = (torch.empty(len(x), dtype=torch.float32, device=x.device) for _ in range(2))
    if x.numel():
        scale_launch(x, gain, eps, y, square, rms).run()
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
