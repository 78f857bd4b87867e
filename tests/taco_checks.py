"""TACO's kernels against kernels/taco_reference.py on any device; run as a program, in Triton's interpreter.

    TRITON_INTERPRET=1 python taco_checks.py

Bit for bit: mode lean with butterflies or without a transform. Where alpha or a product of tensor cores rounds in another order,
at most one code in 10,000 differs, by one step.

A check gives True, or an AssertionError says what differs.
"""
from __future__ import annotations

import itertools
import math
import sys
from typing import Any

import torch
from torch import Tensor

from kernels import taco, taco_reference
from kernels.taco_reference import GROUPS, MODES

NOISE = 0xFEDCBA9876543210
GRID = [dict(zip(("group", "mode", "hadamard", "format", "noise"), point))
        for point in itertools.product(GROUPS, MODES, (True, False), ("e4m3", "e5m2"), (None, NOISE))]
READ = ("group", "mode", "hadamard", "format")


def rows(n: int, device: str, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Three rows over six decades: one with a NaN, one with zeros at its end."""
    x = torch.randn(3, n, generator=torch.Generator().manual_seed(seed)) * torch.logspace(-3, 3, n)
    x[1, 5] = math.nan
    x[2, n // 2:] = 0
    return x.to(device, dtype)


def same(got: Tensor, want: Tensor) -> bool:
    return got.shape == want.shape and bool(((got == want) | (got.isnan() & want.isnan())).all())


def near(got: Tensor, want: Tensor, options: dict[str, Any]) -> None:
    """Wires whose codes differ rarely and by one step, and whose scales agree within rounding. E5M2 reaches below what a sum of
    float32 numbers resolves: there a code may be anything that small."""
    group, mode, kind = options["group"], options["mode"], taco_reference.FORMATS[options["format"]]
    size = taco_reference.groups_of(want.shape[-1], group, mode) * group
    ours, theirs = (w[..., :size].contiguous() for w in (got, want))
    off = ours != theirs
    ours, theirs, a, b = (w[off] for w in (ours.int(), theirs.int(), *(w.view(kind.dtype).float() for w in (ours, theirs))))
    lost = torch.maximum(a.abs(), b.abs()) <= kind.top * 2.0**-20
    assert (~lost).sum() <= max(8, off.numel() // 10_000), f"{(~lost).sum()} of {off.numel()} codes"
    assert ((ours - theirs).abs()[~lost] <= 1).all()
    scales = [w[..., size:].contiguous().view(torch.float32) for w in (got, want)]
    torch.testing.assert_close(*scales, rtol=1e-6, atol=0.0, equal_nan=True)


def check(device: str, dtype: torch.dtype, n: int, options: dict[str, Any], product: bool | None = None,
          reading: bool | None = None) -> bool:
    """product: how `encode` transforms; reading: how `decode` does."""
    x = rows(n, device, dtype)
    mode, read = options["mode"], {k: options[k] for k in READ}
    exact = mode == "lean" and not (options["hadamard"] and (dtype == torch.bfloat16 if product is None else product))
    bad, want_bad = (torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2))
    want = taco_reference.taco_encode(x, **options, bad=want_bad)
    size = want.shape[-1]
    wide = torch.full((3, size + 8), 0x55, dtype=torch.uint8, device=device)
    got = taco.encode(x, **options, bad=bad, out=wide[:, 4:4 + size], product=product)
    assert (wide[:, :4] == 0x55).all() and (wide[:, 4 + size:] == 0x55).all(), "written beside the row"
    again = torch.full((3, size + 8), 0xAA, dtype=torch.uint8, device=device)[:, 4:4 + size]
    assert torch.equal(got, taco.encode(x, **options, product=product, out=again)), "two calls, two results"
    aligned = taco.encode(x, **options, product=product)  # wider accesses: where alpha is a sum, its order is another
    assert torch.equal(aligned, want) if exact else near(aligned, want, options) is None
    assert bad.item() == want_bad.item() == 1
    assert torch.equal(got, want) if exact else near(got, want, options) is None
    for out in (torch.float32, dtype):
        result = torch.full((3, n), math.nan, dtype=out, device=device)
        taco.decode(want, **read, out=result, product=reading)
        known = taco_reference.taco_decode(want, **read, out=torch.empty_like(result))
        torch.testing.assert_close(result, known, rtol=1e-5 if out == torch.float32 else 8e-3, atol=1e-3, equal_nan=True)
    butterflies = taco.decode(want, **read, product=False)
    assert same(butterflies, taco_reference.taco_decode(want, **read))
    assert same(taco.total(want, **read, product=False), taco_reference.taco_total(want, **read))
    got, want = taco.reduce(want, **options), taco_reference.taco_reduce(want, **options)
    assert torch.equal(got, want) if mode == "lean" else near(got[None], want[None], options) is None
    return True


def interpret() -> None:
    """Small tiles, so that small tensors have several and a tail. A product is tried on what the interpreter has: float32
    values, float16 codes."""
    taco.TILE = taco.TILE_PLAIN = 1024
    chosen = [o for o in GRID if o["group"] == 128 or (o["group"] in (32, 512) and o["mode"] == "lean" and o["noise"] is None)]
    for options in chosen:
        check("cpu", torch.float32, 600, options, False, False)
        if options["hadamard"] and options["noise"] is None:
            check("cpu", torch.float32, 600, options, True, True)
    taco.TILE = 2048  # 8 groups of 256, of which a product takes the halves as rows
    check("cpu", torch.float32, 9 * 256 + 88, {"group": 256, "mode": "lean", "hadamard": True, "format": "e4m3", "noise": None},
          True, True)
    sys.stdout.write(f"{len(chosen)} settings\n")


if __name__ == "__main__":
    interpret()
