"""Softmax cross-entropy over the rows of logits: its statistics in one read, its gradient in one read and one write.

    statistics   m = max l      s = Σ exp(l - m)      z = l[target], 0 where the target is another rank's
    gradient     l <- (exp(l - m) / s - onehot(target)) · scale              in place

of columns below `valid`; padding columns count for nothing and get the gradient 0. Between the two calls, ranks that hold
other columns of the same rows may combine m, s and z (suite/loss.py).

Statistics: one program a row. A thread holds 16 bytes of columns at a time and folds them into its own running maximum and
sum, s <- s · exp(m_old - m) + Σ exp(l - m): one exponential a column, no exchange between threads before the row's end.
The maximum starts at the lowest finite float32, not at -inf, so that -inf logits and rows of padding alone give s = 0 and
no NaN; a NaN logit makes m and s NaN, +inf makes s NaN.

Bytes a row of v columns of size b: v·b read, then v·b read and v·b written. Arithmetic in float32. Same inputs, same bits.
Plain torch: kernels.reference.cross_entropy_statistics and cross_entropy_gradient.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import DTYPES
from kernels.launch import Launch

BLOCK = 4096  # columns a turn
WARPS = 8
LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _higher(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _fold(best, mass, x):
    """x [n, lane] into the running maximum and sum [n] of each lane of columns."""
    higher = _higher(best, tl.reduce(x, 1, _higher))
    mass = mass * tl.exp2((best - higher) * LOG2E) + tl.sum(tl.exp2((x - higher[:, None]) * LOG2E), 1)
    return higher, mass


@triton.jit(do_not_specialize=["valid"])
def statistics_kernel(logits, target, peak, total, picked, width, valid, BLOCK: tl.constexpr, LANE: tl.constexpr):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * width
    column = tl.arange(0, BLOCK // LANE)[:, None] * LANE + tl.arange(0, LANE)[None, :]
    best = tl.full([BLOCK // LANE], LOWEST, tl.float32)
    mass = tl.zeros([BLOCK // LANE], tl.float32)
    # masks cost instructions, and a mask at `valid` would also forbid wide loads: only the last turn has them
    whole = valid // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        best, mass = _fold(best, mass, tl.load(logits + start + column).to(tl.float32))
    if whole < valid:
        column += whole
        x = tl.load(logits + column, mask=column < width, other=0.0).to(tl.float32)
        best, mass = _fold(best, mass, tl.where(column < valid, x, -float("inf")))
    highest = tl.reduce(best, 0, _higher)
    tl.store(peak + row, highest)
    tl.store(total + row, tl.sum(mass * tl.exp2((best - highest) * LOG2E), 0))
    place = tl.load(target + row)
    mine = (place >= 0) & (place < width)
    tl.store(picked + row, tl.load(logits + place, mask=mine, other=0.0).to(tl.float32))


@triton.jit(do_not_specialize=["valid", "turns"])
def gradient_kernel(logits, target, peak, total, scale, width, valid, turns, BLOCK: tl.constexpr):
    row = tl.program_id(0) // turns
    column = tl.program_id(0) % turns * BLOCK + tl.arange(0, BLOCK)
    logits += row.to(tl.int64) * width
    inside = column < width
    place = tl.load(target + row)
    place = tl.where((place >= 0) & (place < width), place, -1).to(tl.int32)
    x = tl.load(logits + column, mask=inside, other=0.0).to(tl.float32)
    p = tl.exp2((x - tl.load(peak + row)) * LOG2E) * (1.0 / tl.load(total + row))
    p = tl.where(column == place, p - 1.0, p) * scale
    p = tl.where(column < valid, p, 0.0)
    tl.store(logits + column, p.to(logits.dtype.element_ty), mask=inside)


def statistics_launch(logits: Tensor, target: Tensor, valid: int, peak: Tensor, total: Tensor, picked: Tensor) -> Launch:
    tensors = {"logits": logits, "target": target, "peak": peak, "total": total, "picked": picked}
    return Launch(statistics_kernel, (len(logits),), tensors | {"width": logits.shape[1], "valid": valid},
                  {"BLOCK": BLOCK, "LANE": 16 // logits.element_size()}, WARPS)


def gradient_launch(logits: Tensor, target: Tensor, peak: Tensor, total: Tensor, scale: float, valid: int) -> Launch:
    turns = triton.cdiv(logits.shape[1], BLOCK)
    arguments = {"logits": logits, "target": target, "peak": peak, "total": total, "scale": float(scale),
                 "width": logits.shape[1], "valid": valid, "turns": turns}
    return Launch(gradient_kernel, (len(logits) * turns,), arguments, {"BLOCK": BLOCK}, WARPS)


def statistics(logits: Tensor, target: Tensor, valid: int) -> tuple[Tensor, Tensor, Tensor]:
    """logits [t, v] bfloat16 or float32, contiguous; target [t] int64, this rank's column (outside [0, v): not ours);
    valid: columns that exist -> (maximum, Σ exp(l - maximum), target's logit or 0), each float32 [t].
    Raises ValueError for another dtype, shape or memory order."""
    _check(logits, target=target)
    if target.dtype != torch.int64:
        raise ValueError(f"cross_entropy: target is {target.dtype}, expected int64")
    peak, total, picked = (torch.empty(len(logits), dtype=torch.float32, device=logits.device) for _ in range(3))
    if len(logits):
        statistics_launch(logits, target, valid, peak, total, picked).run()
    return peak, total, picked


def gradient(logits: Tensor, target: Tensor, peak: Tensor, total: Tensor, scale: float, valid: int) -> None:
    """Turns logits [t, v] into `scale` times d(loss)/d(logits), in place. peak, total float32 [t]: over all ranks' columns.
    Raises ValueError as `statistics`."""
    _check(logits, target=target, peak=peak, total=total)
    if logits.numel():
        gradient_launch(logits, target, peak, total, scale, valid).run()


def _check(logits: Tensor, **rows: Tensor) -> None:
    if logits.dtype not in DTYPES:
        raise ValueError(f"cross_entropy: logits are {logits.dtype}, expected bfloat16 or float32")
    if logits.ndim != 2 or not logits.is_contiguous():
        raise ValueError(f"cross_entropy: logits {tuple(logits.shape)} with strides {logits.stride()} are not contiguous rows")
    for name, tensor in rows.items():
        if tensor.shape != logits.shape[:1] or not tensor.is_contiguous():
            raise ValueError(f"cross_entropy: {name} {tuple(tensor.shape)} does not fit logits {tuple(logits.shape)}")
