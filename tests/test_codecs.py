"""Codecs alone: error, bytes, extremes. The oracle is written out in NumPy; no process group."""
import numpy as np
import pytest
import torch

from suite.case import Choice
from suite.options import AXES
from suite.seams import Key, make

BYTES = ["int8", "fp8"]
NATIVE = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def codec(name, **options):
    return make("comm", Choice(name=name, options=options), device="cpu")


def through(c, x):
    """Decoded float32 values; the output starts as NaN, so that what is not written shows."""
    wire = torch.full((*x.shape[:-1], c.nbytes(x.shape[-1])), 0x7F, dtype=torch.uint8)
    c.encode(x, wire, Key())
    out = torch.full(x.shape, torch.nan)
    c.decode(wire, out)
    return out


def error(y, x):
    return float((y.double() - x.double()).norm() / x.double().norm())


def gauss(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def e4m3_grid():
    """All finite magnitudes of E4M3 (bias 7, three mantissa bits, largest 448), ascending."""
    small = [m / 8 * 2.0**-6 for m in range(8)]
    return np.array(small + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)])


def oracle(name, x, group):
    """Group by group in float32 scales; nearest code, ties to the even one."""
    out = np.empty_like(x)
    grid = e4m3_grid()
    for start in range(0, len(x), group):
        part = x[start : start + group]
        top = {"int8": 127.0, "fp8": 448.0}[name]
        scale = np.float32(np.abs(part).max()) / np.float32(top)
        y = part / scale if scale > 0 else part
        if name == "int8":
            q = np.rint(y)
        else:
            mag = np.minimum(np.abs(y), np.float32(448))
            high = np.searchsorted(grid, mag).clip(1, len(grid) - 1)
            low = high - 1
            to_low, to_high = mag - grid[low], grid[high] - mag
            q = np.sign(y) * grid[np.where((to_low < to_high) | ((to_low == to_high) & (low % 2 == 0)), low, high)]
        out[start : start + group] = q.astype(np.float32) * scale
    return out


@pytest.mark.parametrize("name", BYTES)
@pytest.mark.parametrize("group,n", [(128, 1024), (32, 100), (1, 5), (3, 31)])
def test_equals_the_oracle(name, group, n):
    x = gauss(n, seed=n) * 1e-2
    assert np.array_equal(through(codec(name, group=group), x).numpy(), oracle(name, x.numpy(), group))


@pytest.mark.parametrize("name,expected", [("int8", 0.0065), ("fp8", 0.0257)])
def test_error_of_a_gaussian(name, expected):
    x = gauss(1 << 18) * 1e-2
    assert error(through(codec(name), x), x) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("name", BYTES)
def test_bytes(name):
    c = codec(name)
    assert c.nbytes(1024) == 1024 * (1 + 4 / 128)
    assert c.nbytes(1) == c.nbytes(128) == 132
    assert codec(name, group=32).nbytes(64) == 64 + 8
    assert [codec(n).nbytes(10) for n in NATIVE] == [20, 40, 80]


@pytest.mark.parametrize("name", BYTES)
@pytest.mark.parametrize("group", [4, 16])
def test_tails_of_every_length(name, group):
    c = codec(name, group=group)
    for n in range(1, 2 * group + 1):
        x = gauss(n, seed=n)
        y = through(c, x)
        assert torch.isfinite(y).all()
        assert (y - x).abs().max() <= x.abs().max() * (0.5 / 127 if name == "int8" else 1 / 16) * 1.01


@pytest.mark.parametrize("name", BYTES)
def test_zeros_one_hot_and_constants_are_exact(name):
    c = codec(name)
    assert torch.equal(through(c, torch.zeros(300)), torch.zeros(300))
    hot = torch.zeros(256)
    hot[130] = 448 * 127 * 0.25
    assert torch.equal(through(c, hot), hot)
    constant = torch.full((256,), -0.3)
    torch.testing.assert_close(through(c, constant), constant, rtol=2e-7, atol=0)


@pytest.mark.parametrize("name", BYTES)
@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e-6, 1.0, 1e20, 3e38])
def test_extreme_magnitudes(name, size):
    unit = gauss(512)
    x = unit / unit.abs().max() * size
    y = through(codec(name), x)
    assert torch.isfinite(y).all()
    assert error(y / size, x / size) < 0.03


@pytest.mark.parametrize("name", BYTES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_nonfinite_reaches_the_output_and_the_count(name, bad):
    c = codec(name)
    x = gauss(4 * 128)
    x[200] = bad
    y = through(c, x)
    assert torch.isnan(y[128:256]).all()
    assert torch.isfinite(y[:128]).all() and torch.isfinite(y[256:]).all()
    assert c.nonfinite == 1
    through(c, gauss(128))
    assert c.nonfinite == 1
    wires = torch.empty(2, c.nbytes(512), dtype=torch.uint8)
    c.encode(torch.stack([gauss(512), x]), wires, Key())
    again = torch.empty(c.nbytes(512), dtype=torch.uint8)
    c.reencode(wires.unbind(), 512, again, Key())
    out = torch.empty(512)
    c.decode(again, out)
    assert torch.isnan(out[128:256]).all() and torch.isfinite(out[256:]).all()


@pytest.mark.parametrize("name", BYTES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_pass_through_float32(name, dtype):
    c, x = codec(name), gauss(256).to(dtype)
    wire, out = torch.empty(c.nbytes(256), dtype=torch.uint8), torch.empty(256, dtype=dtype)
    c.encode(x, wire, Key())
    c.decode(wire, out)
    assert torch.equal(out, through(c, x.float()).to(dtype))


@pytest.mark.parametrize("name", BYTES)
def test_rows_at_any_offset_are_the_same_bytes(name):
    c, x = codec(name, group=5), gauss(3, 20)
    n = c.nbytes(20)
    wide = torch.zeros(3, n + 7, dtype=torch.uint8)
    c.encode(x, wide[:, 3 : 3 + n], Key())
    for i in range(3):
        alone = torch.empty(n, dtype=torch.uint8)
        c.encode(x[i], alone, Key())
        assert torch.equal(alone, wide[i, 3 : 3 + n])
    assert not wide[:, :3].any() and not wide[:, 3 + n :].any()
    out = torch.empty(3, 20)
    c.decode(wide[:, 3 : 3 + n], out)
    assert torch.equal(out, through(c, x))


@pytest.mark.parametrize("name", BYTES)
def test_reduce_adds_in_rank_order_and_reencode_is_encode_of_it(name):
    c, x = codec(name), torch.stack([gauss(384, seed=s) * 10.0 ** (3 * s) for s in range(3)])
    wires = torch.empty(3, c.nbytes(384), dtype=torch.uint8)
    c.encode(x, wires, Key())
    parts = [through(c, row) for row in x]
    out = torch.empty(384)
    c.reduce(wires.unbind(), out)
    assert torch.equal(out, (parts[0] + parts[1]) + parts[2])
    a, b = torch.empty(c.nbytes(384), dtype=torch.uint8), torch.empty(c.nbytes(384), dtype=torch.uint8)
    c.reencode(wires.unbind(), 384, a, Key())
    c.encode(out, b, Key())
    assert torch.equal(a, b)
    with pytest.raises(ValueError, match="whole groups"):
        c.reencode(wires.unbind(), 380, a, Key())


@pytest.mark.parametrize("name", BYTES)
def test_options_out_of_range(name):
    for options in ({"group": 0}, {"min_bytes": -1}, {"algorithm": "three-shot"}):
        with pytest.raises(ValueError, match="comm"):
            codec(name, **options)


def test_every_listed_codec_builds():
    for name in AXES["comm"]:
        c = make("comm", Choice(name=name), device="cpu")
        assert c.name == name
        assert c.native == NATIVE.get(name)
