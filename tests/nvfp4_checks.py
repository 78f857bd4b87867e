"""NVFP4's kernels against kernels/nvfp4_reference.py, bit for bit on any device; run as a program, in Triton's interpreter.

    TRITON_INTERPRET=1 python nvfp4_checks.py

A check gives True, or an AssertionError says what differs.
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
WHOLE = [{}, BY_CHANCE | {"signs": SIGNS}, {"outer": "tensor", "block": 16}]  # of tiles without an edge
SHAPES = [(5, 130), (33, 256), (1, 128), (20, 15)]


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


def edges(rows: int, device: str) -> Tensor:
    """[rows, 128] float32: in each row a largest magnitude, and numbers at most 2 units in the last place from where E2M1's code
    changes, for the divisors that follow from it."""
    g = torch.Generator().manual_seed(rows)
    x = torch.zeros(rows, 8, 16)
    x[..., 0] = torch.rand(rows, 8, generator=g) + 1.0
    q = nvfp4_reference.nvfp4_quantize(x.flatten(1))
    d = q.inner.to(torch.float32) * q.outer
    edge = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])[torch.randint(7, (rows, 8, 15), generator=g)]
    units = torch.randint(-2, 3, (rows, 8, 15), generator=g, dtype=torch.int32)
    near = ((edge * d[..., None]).view(torch.int32) + units).view(torch.float32)
    x[..., 1:] = torch.where(torch.rand(rows, 8, 15, generator=g) < 0.5, near, -near)
    return x.flatten(1).to(device)


def same(got: Quantized, want: Quantized) -> bool:
    assert got.columns == want.columns
    for name in ("outer", "inner", "codes"):
        ours, theirs = (getattr(q, name) for q in (got, want))
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, (name, ours.shape, theirs.shape)
        if name == "outer":
            assert torch.equal(ours.isnan(), theirs.isnan())
            ours, theirs = ours.nan_to_num(0.0), theirs.nan_to_num(0.0)
        ours, theirs = (t.view(torch.uint8) for t in (ours, theirs))
        assert torch.equal(ours, theirs), f"{name}: {(ours != theirs).sum()} of {ours.numel()} bytes"
    return True


def check(device: str, dtype: torch.dtype, rows: int, columns: int, options: dict[str, Any], bad: bool = False) -> bool:
    x = numbers(rows, columns, device, dtype, bad)
    want = nvfp4_reference.nvfp4_quantize(x, **options)
    same(nvfp4.quantize(x, **options), want)
    same(nvfp4.quantize(x.t().contiguous().t(), **options), want)
    drawn = [name for name in ("noise", "signs") if name in options]
    row = nvfp4_reference.drawn([(None, 1), (options.get("noise"), options.get("signs"))]).to(device)[1]
    for one in (nvfp4.quantize, nvfp4_reference.nvfp4_quantize):
        same(one(x, **options | dict.fromkeys(drawn, row)), want)  # keys that lie on the device
    for kind in dict.fromkeys((torch.float32, dtype)):
        for source in (x, x.t().contiguous().t()):
            got, known = nvfp4.rounded(source, **options, dtype=kind), want.dequantize(kind)
            assert got.dtype == kind and torch.equal(got.isnan(), known.isnan())
            assert torch.equal(got.nan_to_num(0.0).view(torch.uint8), known.nan_to_num(0.0).view(torch.uint8))
        if device == "cpu" and kind == torch.bfloat16:
            continue
        got, known = nvfp4.dequantize(want, kind), want.dequantize(kind)
        assert got.dtype == kind and torch.equal(got.isnan(), known.isnan())
        assert torch.equal(got.nan_to_num(0.0), known.nan_to_num(0.0))
    values, over = nvfp4.inner_values(x, **options)
    assert values.dtype == torch.bfloat16 and torch.equal(over.nan_to_num(0.0), want.outer.nan_to_num(0.0))
    hidden = over.isnan().expand(rows, values.shape[1] // 128).repeat_interleave(128, 1)  # where anything may stand
    assert torch.equal(values.float().masked_fill(hidden, 0.0), want.values().masked_fill(hidden, 0.0))
    among = torch.zeros(rows, 3 * known.shape[1], dtype=known.dtype, device=device)  # 16 bytes do not fit its columns
    nvfp4.rounded(x, **options, out=among[:, known.shape[1]:-known.shape[1]])
    assert torch.equal(among.nan_to_num(0.0), torch.nn.functional.pad(known.nan_to_num(0.0), (known.shape[1],) * 2))
    got, sought = (one.largest_magnitude(x, options.get("signs")) for one in (nvfp4, nvfp4_reference))
    assert got.shape == () and (got == sought or bool(got.isnan() & ~sought.isfinite()))
    if "block" not in options and (device == "cuda" or bad):
        near = nvfp4_reference.nvfp4_quantize(x)
        same(nvfp4.requantize(near, **options), nvfp4_reference.nvfp4_requantize(near, **options))
    return True


def interpret() -> None:
    for options in GRID:
        check("cpu", torch.float32, *SHAPES[0], options, bad=True)
    for options in WHOLE:
        check("cpu", torch.float32, 32, 256, options)
    same(nvfp4.quantize(edges(32, "cpu")), nvfp4_reference.nvfp4_quantize(edges(32, "cpu")))
    sys.stdout.write(f"{len(GRID)} settings\n")


if __name__ == "__main__":
    interpret()
