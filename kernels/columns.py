"""Columns of a matrix in another order, or some of them: one pass over memory.

    taken      x [r, n], order [k] -> x[:, order] [r, k]

Where channels lie apart from the others, a product's operands are made of columns in another order, and its gradients put back
(suite/precision/linear.py). A program takes whole rows, up to WIDE columns of the result, so that what a row's columns lie in is
read from memory once. Plain torch: kernels.reference.columns_taken.
"""
from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import DTYPES
from kernels.launch import Kept, Launch

WIDE, ELEMENTS = 4096, 8192  # of a row, and of a program
WARPS = 8


@triton.jit(do_not_specialize=["rows"])
def taken_kernel(x, order, out, rows, columns, stride, pitch, across, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    first = tl.program_id(0) // across * ROWS
    column = tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    source = tl.load(order + column, mask=inside, other=0).to(tl.int32)
    for n in tl.static_range(ROWS):
        row = (first + n).to(tl.int64)
        mask = inside & (first + n < rows)
        tl.store(out + row * pitch + column, tl.load(x + row * stride + source, mask=mask), mask=mask)


@cache
def _constants(count: int, block: int) -> Kept:
    return Kept({"ROWS": count, "BLOCK": block})


def taken_launch(x: Tensor, order: Tensor, out: Tensor) -> Launch:
    """out [r, k], its rows contiguous; x likewise."""
    rows, columns = out.shape
    block = min(WIDE, triton.next_power_of_2(columns))
    count, across = max(1, min(8, ELEMENTS // block)), triton.cdiv(columns, block)
    arguments = {"x": x, "order": order, "out": out, "rows": rows, "columns": columns, "stride": x.stride(0),
                 "pitch": out.stride(0), "across": across}
    return Launch(taken_kernel, (triton.cdiv(rows, count) * across,), arguments, _constants(count, block), WARPS)


def taken(x: Tensor, order: Tensor, *, out: Tensor | None = None) -> Tensor:
    """x [r, n] bfloat16 or float32 with contiguous rows, order int64 [k] of columns of x, 0 to n - 1 (not checked) -> [r, k]. out:
    where it is written, given back; its rows are contiguous. Raises ValueError for what does not fit."""
    if x.dtype not in DTYPES or x.stride(1) != 1:
        raise ValueError(f"columns: {x.dtype} {tuple(x.shape)}: expected bfloat16 or float32 with contiguous rows")
    if order.dtype != torch.int64 or order.ndim != 1 or not order.is_contiguous():
        raise ValueError(f"columns: order {order.dtype} {tuple(order.shape)}: expected int64 [k], contiguous")
    shape = len(x), len(order)
    out = torch.empty(shape, dtype=x.dtype, device=x.device) if out is None else out
    if out.shape != shape or out.dtype != x.dtype or (out.numel() and out.stride(1) != 1):
        raise ValueError(f"columns: out {out.dtype} {tuple(out.shape)}: expected {x.dtype} {shape} with contiguous rows")
    if out.numel():
        taken_launch(x, order, out).run()
    return out
