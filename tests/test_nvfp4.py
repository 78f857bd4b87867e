"""NVFP4's format, in plain torch: golden vectors, scales, rounding by chance, what is not finite, layouts."""
from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from scipy.stats import norm

from kernels import nvfp4_reference, reference
from kernels.nvfp4_reference import GRID, MARGIN, by_reciprocal, e2m1, pack, rotate, swizzle, uniform, unpack, unswizzle
from kernels.philox import halves

GOLDEN = json.loads((Path(__file__).parent / "nvfp4_rtn.json").read_text())
quantize = reference.nvfp4_quantize


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def floats(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.float32)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda c: c["name"])
def test_golden_vectors(case):
    found = quantize(floats(case["x_hex"]).view(case["shape"]))
    assert found.codes.numpy().tobytes().hex() == case["packed_hex"]
    assert found.inner.view(torch.uint8).numpy().tobytes().hex() == case["inner_hex"]
    assert found.outer.numpy().tobytes().hex() == case["outer_hex"]
    want = floats(case["dq_hex"]).view(case["shape"])
    assert torch.equal(found.dequantize().view(torch.int32), want.view(torch.int32))


def test_every_product_of_code_and_inner_scale_is_exact_in_bfloat16():
    scales = torch.arange(1, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float64)
    products = scales[:, None] * torch.tensor(GRID, dtype=torch.float64)
    assert products.shape == (126, 8) and torch.equal(products.to(torch.bfloat16).double(), products)


def test_nearest_takes_the_nearest_code_and_ties_the_even_one():
    z = torch.linspace(-7, 7, 7 * 2**12 + 1)  # holds every tie
    grid = torch.tensor(GRID)
    distance = (z.abs().clamp(max=6)[:, None] - grid).abs()
    least = distance.amin(1, keepdim=True)
    tied = distance == least
    first = tied.int().argmax(1)
    want = torch.where((tied.sum(1) == 2) & (first % 2 == 1), first + 1, first)
    assert torch.equal((e2m1(z) & 7).long(), want)
    assert (tied.sum(1) == 2).sum() == 14


def test_chance_is_unbiased():
    """1,000 points over the grid and beyond its gaps' middles, 2^24 samples; exact where the variance is 0."""
    points, samples = 1000, 2**24 // 1000 // 8 * 8
    z = torch.cat([torch.tensor(GRID), torch.linspace(-6, 6, points - 8)])
    grid = torch.tensor(GRID, dtype=torch.float64)
    a = z.double().abs()
    low = grid[(torch.searchsorted(grid, a, right=True) - 1).clamp(0, 6)]
    high = grid[torch.searchsorted(grid, a, right=True).clamp(1, 7)]
    variance = (a - low) * (high - a)
    total = torch.zeros(points, dtype=torch.float64)
    for start in range(0, samples, 2048):
        n = min(2048, samples - start)
        u = uniform(7, points, n, (0, start))
        total += grid[(e2m1(z[:, None].expand(-1, n), u) & 7).long()].sum(1)
    error = total / samples - a
    exact = variance < 1e-12
    assert exact.sum() >= 8 and not error[exact].any()
    score = error[~exact] / (variance[~exact] / samples).sqrt()
    assert score.abs().max() < norm.isf(1e-3 / (2 * points))
    assert abs(score.square().mean().sqrt().item() - 1) < 0.03


def test_what_chance_rounds_is_the_quotient_to_2_to_the_minus_24():
    """By a reciprocal, whatever the scale: from float32's subnormal numbers to the largest scale there is, 2^128 / 6."""
    torch.manual_seed(0)
    d = torch.cat([(1 + torch.rand(64)) * 2.0**e for e in range(-126, 125)] + [torch.arange(1.0, 512.0) * 2.0**-149])
    share = torch.cat([torch.tensor([6.0, -6.0, 1.0, -0.5, 2.0**-20]), torch.rand(11) * 12 - 6])
    x = (d.double()[:, None] * share.double()).float()
    z, exact = by_reciprocal(x, d[:, None]), x.double() / d.double()[:, None]
    assert ((z - exact).abs() <= exact.abs() * 2.0**-24).all()
    nothing = by_reciprocal(torch.tensor([0.0, -0.0]), torch.tensor([3.0]))
    assert not nothing.any() and nothing.signbit().tolist() == [False, True]


def test_the_margin_removes_the_bias_of_clipping():
    """The release's figures on Gaussian data: projection -0.26 %, mean |x| -0.165 %; with the margin neither, and nothing clips."""
    x = normal(4096, 1024, seed=1)
    found = {}
    for margin in (1.0, MARGIN):
        y = quantize(x, "stochastic", margin, noise=11).dequantize()
        projection = (x.double() * y).sum() / x.double().square().sum() - 1
        found[margin] = projection.item(), (y.abs().mean() / x.abs().mean() - 1).item()
    assert found[1.0] == pytest.approx((-0.0026, -0.00165), abs=2e-4)
    assert abs(found[MARGIN][0]) < 3e-4 and abs(found[MARGIN][1]) < 3e-4


@pytest.mark.parametrize("low", [0, -20, -40])
def test_with_the_margin_nothing_clips(low):
    """Blocks down to 2^low of the largest: inner scales that are normal, subnormal and at the floor."""
    x = normal(256, 1024, seed=2).view(256, 8, 8, 16) * torch.logspace(0, low, 8, base=2.0)[:, None]
    x = x.view(256, 1024)
    q = quantize(x, margin=MARGIN)
    scale = q.inner.float().repeat_interleave(16, 1) * q.outer.repeat_interleave(128, 1)
    assert (x.abs() / scale).max() <= 6.0 * (1 + 2**-22)
    if low:
        q = quantize(x)
        scale = q.inner.float().repeat_interleave(16, 1) * q.outer.repeat_interleave(128, 1)
        assert (x.abs() / scale).max() > 6.3


def test_errors_are_those_known():
    """Squared error of Gaussian data, in thousandths: 9.0 to nearest; by chance 18.7, with the margin 23.6."""
    x = normal(2048, 2048, seed=3)

    def error(*options, **more) -> float:
        return ((quantize(x, *options, **more).dequantize() - x).square().mean() / x.square().mean()).item() * 1e3

    assert error() == pytest.approx(9.0, abs=0.15)
    assert error("stochastic", noise=3) == pytest.approx(18.7, abs=0.3)
    assert error("stochastic", MARGIN, noise=3) == pytest.approx(23.6, abs=0.4)


@pytest.mark.parametrize("outer", [128, "tensor"])
@pytest.mark.parametrize("block", [1, 16])
def test_quantising_twice_changes_nothing(outer, block):
    once = quantize(normal(48, 256), outer=outer, block=block)
    again = quantize(once.dequantize(), outer=outer, block=block)
    assert torch.equal(again.codes, once.codes)
    torch.testing.assert_close(again.dequantize(), once.dequantize(), rtol=3e-7, atol=0.0)


def test_blocks_of_16x16_are_those_of_the_transpose():
    x = normal(256, 384)
    assert torch.equal(quantize(x, outer="tensor", block=16).dequantize(),
                       quantize(x.t(), outer="tensor", block=16).dequantize().t())


def test_a_shard_draws_what_the_whole_draws():
    x = normal(64, 512)
    whole = quantize(x, "stochastic", MARGIN, noise=5, signs=9)
    below = quantize(x[32:], "stochastic", MARGIN, noise=5, signs=9, origin=(32, 0))
    right = quantize(x[:, 256:], "stochastic", MARGIN, noise=5, signs=9, origin=(0, 256))
    assert torch.equal(whole.codes[32:], below.codes) and torch.equal(whole.outer[32:], below.outer)
    assert torch.equal(whole.codes[:, 128:], right.codes) and torch.equal(whole.inner[:, 16:].float(), right.inner.float())
    assert not torch.equal(whole.codes, quantize(x, "stochastic", MARGIN, noise=6, signs=9).codes)


def test_keys_on_a_device_are_the_numbers():
    keys = [0, 1, 2**31, 2**32 - 1, 2**63, 0x8123456789ABCDEF, 2**64 - 1]
    table = nvfp4_reference.drawn([(key, other) for key, other in zip(keys, reversed(keys))])
    assert table.dtype == torch.int32 and table.shape == (len(keys), 4) and not table[:, 3].any()
    for row, noise, signs in zip(table, keys, reversed(keys)):
        assert row[0].item() == nvfp4_reference.sign_bits(signs) and row[1:3].tolist() == list(halves(noise))
        assert nvfp4_reference.key_of(row).item() % 2**64 == noise == nvfp4_reference.key_of(noise)
        assert torch.equal(nvfp4_reference.factors(row), nvfp4_reference.factors(signs))
    assert nvfp4_reference.drawn([(None, None)]).tolist() == nvfp4_reference.drawn([(0, 0)]).tolist()
    assert nvfp4_reference.drawn([]).shape == (0, 4)


def test_the_rotation_is_orthogonal_and_shared():
    a, b = normal(8, 64).double(), normal(8, 64, seed=1).double()
    turned = [rotate(t.float(), 3).double() for t in (a, b)]
    torch.testing.assert_close(turned[0] @ turned[1].t(), a @ b.t(), rtol=0, atol=1e-5)
    one = rotate(torch.eye(16), 3)
    assert torch.equal(one.abs(), torch.full((16, 16), 0.25)) and torch.equal(one @ one.t(), torch.eye(16))
    assert not torch.equal(one, rotate(torch.eye(16), 4))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("outer", [128, "tensor"])
def test_what_is_not_finite_shows_in_its_outer_block(bad, outer):
    x = normal(4, 300)
    x[1, 130] = bad
    y, clean = quantize(x, outer=outer).dequantize(), quantize(normal(4, 300)).dequantize()
    if outer == "tensor":
        assert y.isnan().all()
        return
    assert y[1, 128:256].isnan().all() and y.isnan().sum() == 128
    keep = ~y.isnan()
    assert torch.equal(y[keep], clean[keep])


def test_zeros_subnormal_and_huge_numbers():
    zeros = quantize(torch.tensor([[0.0, -0.0] * 64]))
    assert zeros.outer.item() == 1.0 and (zeros.inner.view(torch.uint8) == 1).all() and (zeros.codes == 0x80).all()
    assert not zeros.dequantize().any()
    for scale in (1e-45, 1e-40, 1e-38, 3e38 / 6, 1.0):
        x = (torch.tensor(GRID) * scale).repeat(16)[None].clamp(max=3e38)
        y = quantize(x).dequantize()
        assert y.isfinite().all() and (y - x).abs().max() <= max(0.2 * x.max().item(), 2.0**-133)
    tiny = torch.full((1, 128), 1e-12)
    tiny[0, 0] = 1.0
    assert (quantize(tiny, "stochastic", MARGIN, noise=1).inner.float() > 0).all(), "a tiny block keeps a scale"


@pytest.mark.parametrize("shape", [(3, 1), (5, 15), (17, 100), (1, 129), (0, 64), (4, 0), (0, 0)])
@pytest.mark.parametrize("signs", [None, 2])
def test_sizes_that_do_not_divide(shape, signs):
    for options in ({}, {"outer": "tensor"}, {"block": 16}, {"rounding": "stochastic", "noise": 4}):
        q = quantize(normal(*shape), signs=signs, **options)
        width = shape[1] + (-shape[1] % 16 if signs else 0)
        assert q.codes.shape == (shape[0], (shape[1] + 127) // 128 * 64) and q.dequantize().shape == (shape[0], width)
        if shape[1]:
            filled = torch.nn.functional.pad(normal(*shape), (0, -shape[1] % 128))
            assert torch.equal(q.dequantize(), quantize(filled, signs=signs, **options).dequantize()[:, :width])


def test_packing_both_ways():
    codes = torch.arange(16, dtype=torch.uint8)[None]
    assert pack(codes).tolist() == [[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]]
    assert unpack(pack(codes))[0].tolist() == [*GRID, *(-g for g in GRID)]


@pytest.mark.parametrize("shape", [(128, 4), (256, 8), (1, 1), (130, 5), (300, 64)])
def test_swizzled_scales_both_ways(shape):
    scales = torch.arange(math.prod(shape)).remainder(251).add(1).to(torch.uint8).view(shape)
    flat = swizzle(scales)
    assert torch.equal(unswizzle(flat, *shape), scales) and flat.count_nonzero() == scales.numel()
    across = -(-shape[1] // 4)
    for r, c in {(0, 0), (shape[0] - 1, shape[1] - 1), (shape[0] // 2, shape[1] // 3)}:
        at = (r // 128 * across + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
        assert flat[at] == scales[r, c]
    with pytest.raises(ValueError, match="swizzled scales are no"):
        unswizzle(flat[:-1], *shape)


@pytest.mark.parametrize("call, words", [
    (lambda: quantize(torch.zeros(4)), r"float32 \(4,\): expected a matrix"),
    (lambda: quantize(torch.zeros(4, 4, dtype=torch.int32)), "int32"),
    (lambda: quantize(torch.zeros(4, 4), "up"), "rounding 'up'"),
    (lambda: quantize(torch.zeros(4, 4), "stochastic"), "stochastic needs noise"),
    (lambda: quantize(torch.zeros(4, 4), noise=1), "nearest takes no noise"),
    (lambda: quantize(torch.zeros(4, 4), margin=2.0), "margin 2"),
    (lambda: quantize(torch.zeros(4, 4), outer=64), "outer 64"),
    (lambda: quantize(torch.zeros(4, 4), block=8), "block 8"),
    (lambda: quantize(torch.zeros(4, 8), "stochastic", noise=1, origin=(0, 3)), "multiple of 8")])
def test_what_does_not_fit_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()
