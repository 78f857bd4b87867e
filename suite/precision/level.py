"""Execution levels: how a product of two quantised operands runs, and where.

    emulated   the operands dequantised into `compute` (bfloat16: codes times inner scale are exact, the float32 outer scale is
               rounded in), one dense product with float32 sums; any device
    slab       the method's own arithmetic: codes times inner scales are multiplied exactly, summed in float32 over 128 elements
               of the contraction, and the two outer scales applied to each such sum
    native     block-scaled FP4 tensor cores: Blackwell only, refused elsewhere

Operands whose scales are powers of two (MXFP4, MXFP8) are numbers that bfloat16 holds: at every level they are multiplied as these,
with float32 sums. Time at the first two levels says nothing about FP4 hardware: it is `emulated`. E4M3 operands with a scale a row
run on FP8 tensor cores where there are any (sm_89 and later); elsewhere their codes are multiplied in float32 and scaled after.
"""
from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from suite.precision.operand import Given
from suite.record import CaseFailed

LEVELS = ("emulated", "slab", "native")
SLAB = 128
ROWS = ("e4m3", "e5m2")


def refuse(name: str, level: str, device: torch.device) -> None:
    """Raises CaseFailed where `device` cannot run products at `level`."""
    if level not in LEVELS:
        raise CaseFailed(f"precision {name}: level {level!r}: expected one of {', '.join(LEVELS)}")
    if level == "native":
        from kernels.nvfp4_product import NATIVE

        major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
        if 10 * major + minor not in NATIVE:
            here = f"sm_{10 * major + minor}" if major else f"a {device.type}"
            raise CaseFailed(f"precision {name}: level native needs FP4 tensor cores (sm_100, sm_120), this is {here}")


def real(level: str, format: str, device: torch.device) -> bool:
    """Whether products of operands in `format` run on tensor cores for that format."""
    if format in ROWS:
        return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
    return level == "native"


def product(level: str, a: Given, b: Given, dtype: torch.dtype, beside: tuple[Given, Given] | None = None) -> Tensor:
    """a [m, k] · b [n, k]ᵀ -> [m, n] of `dtype`. beside: a second pair whose product is added before rounding; at `emulated` its
    values lie in a and b."""
    if a.by_rows:
        return _by_rows(a, b, dtype)
    if level != "emulated":
        y = _exact(level, a, b, dtype if beside is None else torch.float32)
        return (y if beside is None else y + _numbers(*beside)).to(dtype)
    return (a.dense() @ b.dense().t()).to(dtype)


def _exact(level: str, a: Given, b: Given, dtype: torch.dtype) -> Tensor:
    """By a kernel where both operands were made for one, of which the result's one rounding is then."""
    from kernels import nvfp4_product

    if a.packed is not None and b.packed is not None:
        return {"slab": nvfp4_product.slab, "native": nvfp4_product.native}[level](a.packed, b.packed, dtype)
    if a.inner is None and b.inner is None:
        return _numbers(a, b)
    if all(one.inner is not None and one.inner.is_cuda and one.inner.dtype == torch.bfloat16 for one in (a, b)):
        return nvfp4_product.slab_values(a.inner, a.outer, b.inner, b.outer, dtype)
    return _slabs(a, b)


def _numbers(a: Given, b: Given) -> Tensor:
    """Of values without inner scales, summed in float32; on tensor cores where bfloat16 holds them."""
    if a.narrow and b.narrow and a.values.is_cuda:
        return torch.mm(a.values.to(torch.bfloat16), b.values.to(torch.bfloat16).t(), out_dtype=torch.float32)
    return a.values.to(torch.float32) @ b.values.to(torch.float32).t()


def _slabs(a: Given, b: Given) -> Tensor:
    """Σ over slabs of 128: (codes · inner of a) (those of b)ᵀ in float32, times outer scale of the row times that of the column."""
    a, b = _unpacked(a), _unpacked(b)
    y = torch.zeros(len(a.inner), len(b.inner), device=a.inner.device)
    for slab in range(a.outer.shape[1]):
        part = slice(slab * SLAB, (slab + 1) * SLAB)
        y += (a.inner[:, part].float() @ b.inner[:, part].float().t()) * a.outer[:, slab, None] * b.outer[:, slab]
    return y


def _unpacked(given: Given) -> Given:
    q = given.packed
    if q is None:
        return given
    return replace(given, inner=q.values(), outer=q.outer.expand(len(q.codes), q.codes.shape[1] * 2 // SLAB))


def _by_rows(a: Given, b: Given, dtype: torch.dtype) -> Tensor:
    """Codes [m, k], [n, k] with a scale a row; k is a multiple of 16."""
    if dtype == torch.bfloat16 and real("", ROWS[0], a.values.device):
        n = len(b.values)
        codes, scales = (F.pad(t, (0, 0, 0, -n % 16)) for t in (b.values.view(torch.uint8), b.scales))
        # operands of a backward product are made of transposed tensors, and may lie as these do
        y = torch._scaled_mm(a.values.contiguous(), codes.contiguous().view(b.values.dtype).t(), scale_a=a.scales.contiguous(),
                             scale_b=scales.t().contiguous(), out_dtype=dtype)
        return y[:, :n].contiguous()
    return ((a.values.to(torch.float32) @ b.values.to(torch.float32).t()) * (a.scales * b.scales.t())).to(dtype)
