"""The kernels of kernels/grouped.py against kernels/grouped_reference.py on any device; run as a program, in Triton's interpreter.

    TRITON_INTERPRET=1 python grouped_checks.py

Bit for bit, but for a product of tensor cores, where at most one code in 10,000 differs, by one step, and for quotients made to
lie next to a tie. The interpreter (seen with
Triton 3.7.1) rounds a product before it is added where an instruction rounds once, so its addition is replaced.

A check gives True, or an AssertionError says what differs.
"""
from __future__ import annotations

import itertools
import math
import sys

import numpy as np
import torch
from torch import Tensor

from kernels import grouped, grouped_reference, taco
from kernels.taco_reference import GROUPS

GRID = [dict(zip(("group", "hadamard", "format"), point)) for point in itertools.product(GROUPS, (False, True), ("e4m3", "int8"))]
SIZES = (1e-42, 1e-38, 1e-36, 1e-30, 1e-5, 1.0, 1e20, 1e30, 3e38)  # of groups, across all scales that float32 has


def rows(n: int, device: str, dtype: torch.dtype, hadamard: bool = False) -> Tensor:
    """Three rows: six decades with a NaN; one that ends in zeros of both signs; groups of very unlike sizes."""
    x = torch.randn(3, n, generator=torch.Generator().manual_seed(n)) * torch.logspace(-3, 3, n)
    x[0, 5] = math.nan
    x[1, n // 2:] = x[1, n // 2:].sign() * 0.0
    unit = x[2, : n // 32 * 32].view(-1, 32)
    sizes = torch.tensor([s for s in SIZES if not hadamard or s > 1e-33])  # below, products of H lose digits
    unit.div_(unit.abs().amax(1)[:, None]).mul_(sizes[torch.arange(len(unit)) % len(sizes)][:, None])
    return x.to(device, dtype)


def same(got: Tensor, want: Tensor) -> bool:
    return got.shape == want.shape and bool(((got == want) | (got.isnan() & want.isnan())).all())


def near(got: Tensor, want: Tensor, group: int) -> None:
    size = want.shape[-1] // (group + 4) * group
    off = (got[..., :size].int() - want[..., :size].int()).abs()
    off = torch.minimum(off, 256 - off)  # -1 follows 0
    assert (off > 0).sum() <= max(8, off.numel() // 10_000), f"{(off > 0).sum()} of {off.numel()} codes"
    assert ((off <= 1) | (off == 128)).all()  # 128: the sign of a zero
    scales = [w[..., size:].contiguous().view(torch.float32) for w in (got, want)]
    torch.testing.assert_close(*scales, rtol=1e-6, atol=0.0, equal_nan=True)


def check(device: str, dtype: torch.dtype, n: int, options: dict, product: bool | None = None) -> bool:
    """Outputs are poisoned before; bytes beside a row stay as they were; two calls give the same bits."""
    x, group = rows(n, device, dtype, options["hadamard"]), options["group"]
    exact = not (options["hadamard"] and (dtype == torch.bfloat16 if product is None else product))
    bad, known = (torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2))
    want = grouped_reference.encode(x, **options, bad=known)
    size = want.shape[-1]
    wide = torch.full((3, size + 8), 0x55, dtype=torch.uint8, device=device)
    got = grouped.encode(x, **options, bad=bad, out=wide[:, 4:4 + size], product=product)
    assert (wide[:, :4] == 0x55).all() and (wide[:, 4 + size:] == 0x55).all(), "written beside the row"
    for wire in (got, grouped.encode(x, **options, product=product)):
        assert torch.equal(wire, want) if exact else near(wire, want, group) is None, options
    assert bad.item() == known.item() == 1
    for out in (torch.float32, dtype):
        result = torch.full((3, n), math.nan, dtype=out, device=device)
        grouped.decode(want, **options, out=result, product=product)
        expected = grouped_reference.decode(want, **options, out=torch.empty_like(result))
        if not options["hadamard"] or product is False:
            assert same(result, expected), options
        torch.testing.assert_close(result[:2], expected[:2], rtol=1e-5 if out == torch.float32 else 8e-3, atol=1e-3, equal_nan=True)
    total = grouped_reference.total(want[:2], **options)
    assert same(grouped.total(want[:2], **options, product=False), total)
    apart = grouped.total(want[:1], **options, product=False, stripes=2, stripe=want.stride(0))
    assert same(apart, total), "rows that are no tensor"
    for wires in (want[:2], want):
        bad.zero_(), known.zero_()
        again = grouped_reference.reduce(wires, **options, bad=known)
        assert torch.equal(grouped.reduce(wires, **options, bad=bad), again), options
        assert bad.item() == known.item() >= 1
    return True


def check_close_quotients(device: str) -> bool:
    """Quotients as near to a tie of two codes as float32 has them, by divisors that bring them nearest to where a rounded quotient
    turns: k / 64 and its neighbours. A product with a rounded reciprocal misses a tenth of these codes."""
    k = torch.arange(64, 128, 4)
    scale = (k.float() / 64)[:, None] * (1 + torch.arange(-2, 3) * 2.0**-23)
    tie = torch.arange(0, 127, 3) + 0.5
    x = (scale[..., None] * tie).view(torch.int32)[..., None] + torch.arange(-1, 2, dtype=torch.int32)
    groups = torch.zeros(scale.numel(), 256)
    groups[:, 1:1 + 3 * len(tie)] = x.view(torch.float32).reshape(len(groups), -1)
    groups[:, 0] = scale.flatten() * 127.0
    groups = groups.view(1, -1).to(device)
    got, want = (how(groups, 256, format="int8") for how in (grouped.encode, grouped_reference.encode))
    off = (got.int() - want.int()).abs()
    assert (off > 0).sum() <= 4 and off.max() <= 1
    wrong = groups.view(-1, 256)
    wrong = (wrong * (1.0 / (wrong[:, :1] / 127.0))).round().to(torch.int8).view(torch.uint8)
    assert (wrong.flatten() != want[0, : wrong.numel()]).float().mean() > 0.01, "these quotients are too easy"
    return True


def interpret() -> None:
    """Small tiles, so that small tensors have several and a tail."""
    from triton.runtime import interpreter

    def fma(self, x, y, z):
        wide = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
        return interpreter.TensorHandle(wide.astype(z.data.dtype), z.dtype.scalar)

    interpreter.InterpreterBuilder.create_fma = fma
    np.seterr(all="ignore")
    taco.TILE = taco.TILE_PLAIN = taco.TILE_SMALL = 1024
    chosen = [o for o in GRID if o["group"] == 128 or (o["group"] == (512 if o["hadamard"] else 32) and o["format"] == "int8")]
    chosen.remove({"group": 128, "hadamard": True, "format": "e4m3"})
    for options in chosen:
        check("cpu", torch.float32, 600, options, False)
        if options["hadamard"]:
            check("cpu", torch.float32, 600, options, True)
    check_close_quotients("cpu")
    sys.stdout.write(f"{len(chosen)} settings\n")


if __name__ == "__main__":
    interpret()
