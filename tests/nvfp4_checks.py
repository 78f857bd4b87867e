"""NVFP4's kernels against kernels/nvfp4_reference.py, bit for bit on any device; run as a program, in Triton's interpreter.

    TRITON_INTERPRET=1 python nvfp4_checks.py
"""
from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import Tensor

from kernels import nvfp4, nvfp4_reference
from kernels.nvfp4_reference import MARGIN, Quantized

NOISE, SIGNS = 0xFEDCBA9876543210, 0x8123456789ABCDEF
BY_CHANCE = {"rounding": "stochastic", "margin": MARGIN, "noise": NOISE}
GRID: list[dict[str, Any]] = [
    {}, {"margin": MARGIN}, {"block": 16}, {"outer": "tensor"}, {"outer": "tensor", "block": 16, "signs": SIGNS}, {"signs": SIGNS},
    BY_CHANCE, BY_CHANCE | {"signs": SIGNS, "origin": (96, 1 << 20)},
    BY_CHANCE | {"outer": "tensor", "signs": SIGNS, "margin": 1.0}]
SHAPES = [(5, 130), (33, 256), (1, 128), (20, 15)]
INTERPRETED = 2  # of the shapes; the interpreter is slow


def numbers(rows: int, columns: int, device: str, dtype: torch.dtype, bad: bool) -> Tensor:
    """Over 40 binary decades, ties, zeros, subnormal and huge numbers; `bad`: a NaN and an Inf too."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns))
    x *= torch.logspace(-20, 20, columns, base=2.0)
    x[0, ::3] = torch.arange(columns)[::3].remainder(13) / 4
    if rows > 4:
        x[1], x[2] = 0.0, x[2] * 1e-42
        x[3, columns // 2] = 3e38
        x[4, 0] = -0.0
    if bad:
        x[-1, -1] = math.nan
        x[rows // 2, 0] = -math.inf
    return x.to(device, dtype)


def same(got: Quantized, want: Quantized) -> None:
    assert got.columns == want.columns
    for name in ("outer", "inner", "codes"):
        ours, theirs = (getattr(q, name) for q in (got, want))
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, (name, ours.shape, theirs.shape)
        if name == "outer":
            assert torch.equal(ours.isnan(), theirs.isnan())
            ours, theirs = ours.nan_to_num(0.0), theirs.nan_to_num(0.0)
        ours, theirs = (t.view(torch.uint8) for t in (ours, theirs))
        assert torch.equal(ours, theirs), f"{name}: {(ours != theirs).sum()} of {ours.numel()} bytes"


def check(device: str, dtype: torch.dtype, rows: int, columns: int, options: dict[str, Any], bad: bool = False) -> None:
    x = numbers(rows, columns, device, dtype, bad)
    want = nvfp4_reference.nvfp4_quantize(x, **options)
    same(nvfp4.quantize(x, **options), want)
    same(nvfp4.quantize(x.t().contiguous().t(), **options), want)
    for kind in (torch.float32, dtype):
        if device == "cpu" and kind == torch.bfloat16:
            continue
        got, known = nvfp4.dequantize(want, kind), want.dequantize(kind)
        assert got.dtype == kind and torch.equal(got.isnan(), known.isnan())
        assert torch.equal(got.nan_to_num(0.0), known.nan_to_num(0.0))
    if "block" not in options:
        near = nvfp4_reference.nvfp4_quantize(x)
        same(nvfp4.requantize(near, **options), nvfp4_reference.nvfp4_requantize(near, **options))


def interpret() -> None:
    for options in GRID:
        for rows, columns in SHAPES[:INTERPRETED]:
            check("cpu", torch.float32, rows, columns, options)
        check("cpu", torch.float32, *SHAPES[0], options, bad=True)
    sys.stdout.write(f"{len(GRID)} settings, {INTERPRETED} shapes\n")


if __name__ == "__main__":
    interpret()
