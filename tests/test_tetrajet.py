"""TetraJet's linear layer: unbiased, keyed as the design says, the same on every shard, each part an option."""
import math
from types import SimpleNamespace

import pytest
import torch
from scipy import stats
from tetrajet_checks import free, given, noise, product, recipe, whole

from kernels.nvfp4_reference import inner_values, largest_magnitude, nvfp4_rounded, slab_product
from kernels.reference import nvfp4_quantize
from suite.precision import level
from suite.precision.level import LEVELS
from suite.precision.level import product as product_at
from suite.precision.linear import STACK, _backward
from suite.precision.operand import Operand, Place, fused, in_pieces, quantise

MEMBERS = ("q", "k", "v")


def relative(y, x):
    return float((y.double() - x.double()).norm() / x.double().norm())


# unbiased


def test_the_mean_gradient_is_that_of_the_quantised_forward():
    """Over 4,096 draws of noise and signs, float32: each element of dX and dW against dY Ŵ and dYᵀ X̂. Largest |z| under the
    two-sided Bonferroni bound at family error 1e-3, RMS of z within 1 +- 0.03."""
    draws, t, d_in, d_out = 4096, 32, 48, 32
    made, place = recipe(compute="float32"), free(d_in, d_out)
    x, w, dy = whole(t, d_in, d_out)
    *_, found = given(made, x, w, dy, place)
    exact = dy.double() @ found[2].double(), dy.double().t() @ found[1].double()
    assert relative(x, found[1]) > 0.05, "the forward is quantised: its gradient is not that of the plain product"
    sums = [torch.zeros(2, *e.shape, dtype=torch.float64) for e in exact]
    call = 0, place.name, list(place.maps[0]), list(place.columns), place.wire.id, made.id
    for draw in range(draws):
        grads = _backward(dy, found[1], found[2], noise(step=draw), None, None, *call)  # what Linear's backward runs
        for total, grad, e in zip(sums, grads, exact):
            total += torch.stack([grad - e, (grad - e).square()])
    z = torch.cat([_z(total, draws) for total in sums])
    bound = stats.norm.isf(1e-3 / len(z) / 2)
    assert float(z.abs().max()) < bound
    assert float(z.square().mean().sqrt()) == pytest.approx(1, abs=0.03)


def _z(total, n):
    mean, square = total / n
    spread = (square - mean.square()).clamp(min=0) * n / (n - 1)
    assert torch.equal(mean[spread == 0], torch.zeros_like(mean[spread == 0]))
    return (mean / (spread / n).sqrt())[spread > 0].flatten()


@pytest.mark.parametrize(("options", "biased"), [({}, False), ({"margin": False}, True), ({"rounding": "nearest"}, True)])
def test_what_biases_is_seen(options, biased):
    """Projection of what Q5 gives onto what it got: the release's scales shrink Gaussian data by 0.26 %."""
    made, place = recipe(compute="float32", hadamard="none", **options), free(16, 512)
    x, w, dy = (torch.randn(s, generator=torch.Generator().manual_seed(1)) for s in ((1024, 16), (512, 16), (1024, 512)))
    *_, found = given(made, x, w, dy, place)
    bias = float((found[5] * dy.t()).sum() / dy.square().sum()) - 1
    error = float((found[5] - dy.t()).norm() / dy.norm()) / math.sqrt(dy.numel())
    assert (abs(bias) > 5 * error) == biased
    if options == {"margin": False}:
        assert bias == pytest.approx(-0.0026, abs=0.0005)


def test_without_alignment_the_mean_is_that_of_the_tensors_before():
    made, place = recipe(compute="float32", aligned="none"), free(64, 64)
    x, w, dy = whole(64, 64, 64)
    grads = [given(made, x, w, dy, place, noise(step=n))[1:3] for n in range(60)]
    dx, dw = (torch.stack(pair).mean(0) for pair in zip(*grads))
    near, far = relative(dw, dy.t() @ x), relative(dw, dy.t() @ given(made, x, w, dy, place)[3][1])
    assert near < 0.7 * far
    assert relative(dx, dy @ w) < 0.06


# noise


def test_the_same_key_gives_the_same_bits_and_another_other_ones():
    made, place, data = recipe(), product(), whole(128, 512, 1536, torch.bfloat16)
    first = given(made, *data, place, noise(1, 2, 3, 0))
    again = given(made, *data, place, noise(1, 2, 3, 0))
    assert all(torch.equal(a, b) for a, b in zip(first[:3], again[:3]))
    for key in ((0, 2, 3, 0), (1, 0, 3, 0), (1, 2, 0, 0), (1, 2, 3, 1)):
        other = given(made, *data, place, noise(*key))
        assert torch.equal(other[0], first[0]), "to nearest: the forward draws nothing"
        assert not torch.equal(other[1], first[1]) and not torch.equal(other[2], first[2])
    other = given(made, *data, place, noise(1, 2, 3, 0), layer=2)
    assert not torch.equal(other[2], first[2])


@pytest.mark.parametrize(("how", "alike"), [("independent", False), ("shared", True)])
def test_the_operands_of_a_product_draw_their_own_noise(how, alike):
    """With the same tensor as both operands, shared noise rounds both alike, which inflates the product's diagonal."""
    made, place = recipe(compute="float32", aligned="none", noise=how), free(128, 128)
    x = torch.randn(256, 128)
    *_, found = given(made, x, torch.zeros(128, 128), x, place)
    assert torch.equal(found[5], found[6]) == alike


# shards


def split(t, dim, place, full):
    """Of a tensor whose `dim` holds the maps one after another, what a shard of them holds."""
    pieces, first = [], 0
    for (_, rows, start), (_, whole_rows, _) in zip(place.maps, full.maps):
        pieces.append(t.narrow(dim, first + start, rows))
        first += whole_rows
    return torch.cat(pieces, dim)


@pytest.mark.parametrize("tp", [2, 4])
def test_column_parallel_operands_are_those_of_one_process(tp):
    """q, k, v in one product, outputs sharded in multiples of 128: all six operands bit for bit; dX summed within rounding."""
    made, full = recipe(), product()
    x, w, dy = whole(200, 512, 1536, torch.bfloat16)
    y, dx, dw, one = given(made, x, w, dy, full)
    parts = []
    for index in range(tp):
        here = product(tp=tp, index=index)
        cut = split(w, 0, here, full), split(dy, 1, here, full)
        y_here, dx_here, dw_here, found = given(made, x, *cut, here)
        assert torch.equal(y_here, split(y, 1, here, full)) and torch.equal(dw_here, split(dw, 0, here, full))
        for number, dim in ((2, 0), (3, 1), (4, 1), (5, 0)):
            assert torch.equal(found[number], split(one[number], dim, here, full)), number
        assert torch.equal(found[1], one[1]) and torch.equal(found[6], one[6])
        parts.append(dx_here.float())
    assert relative(sum(parts), dx) < 0.01


@pytest.mark.parametrize("tp", [2, 4])
def test_row_parallel_operands_are_those_of_one_process(tp):
    made, full = recipe(), product(sub="ffn", names=("down",))
    x, w, dy = whole(200, 1024, 512, torch.bfloat16)
    y, dx, dw, one = given(made, x, w, dy, full)
    parts = []
    for index in range(tp):
        here = product(sub="ffn", names=("down",), tp=tp, index=index)
        mine = slice(here.columns[0], here.columns[0] + 1024 // tp)
        y_here, dx_here, dw_here, found = given(made, x[:, mine], w[:, mine], dy, here)
        for number, cut in ((1, (slice(None), mine)), (2, (slice(None), mine)), (4, mine), (6, mine)):
            assert torch.equal(found[number], one[number][cut]), number
        assert torch.equal(found[3], one[3]) and torch.equal(found[5], one[5])
        assert torch.equal(dx_here, dx[:, mine]) and torch.equal(dw_here, dw[:, mine])
        parts.append(y_here.float())
    assert relative(sum(parts), y) < 0.01


def test_shards_that_are_no_whole_blocks_are_padded_and_draw_different_noise():
    """gpt-tiny at TP 4: 32 rows a map."""
    made, halves = recipe(), []
    for index in range(2):
        here = product("gpt-tiny", "attention", MEMBERS, 4, index)
        x, w, dy = whole(50, 128, 96, torch.bfloat16)
        *_, found = given(made, x, w, dy, here)
        halves.append(found)
    assert torch.equal(halves[0][2], halves[1][2])
    assert all(not torch.equal(halves[0][n], halves[1][n]) for n in (3, 4, 5))


# kernels


@pytest.mark.parametrize("operand", [
    Operand("nvfp4"), Operand("nvfp4", block=16), Operand("nvfp4", "stochastic", True, True),
    Operand("nvfp4", "stochastic", True, False, "tensor"), Operand("nvfp4", hadamard=True, outer="tensor"),
])
@pytest.mark.parametrize("columns", [[(0, 200, 64)], [(0, 128, 0), (128, 128, STACK), (256, 40, 2 * STACK)]])
@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float32])
def test_the_kernels_formats_are_these(operand, columns, kept):
    """What a GPU runs, by the kernels' own reference: values, and what a product by slabs reads, bit for bit."""
    rows = [(0, 40, 8), (40, 24, STACK)]
    x = torch.randn(64, sum(n for _, n, _ in columns), generator=torch.Generator().manual_seed(0)).mul(3).exp().sub(2).bfloat16()
    key, signs = 2**63 + 5 if operand.rounding == "stochastic" else None, 77 if operand.hadamard else None
    place = Place(rows, columns)
    assert in_pieces(place, key)
    here = quantise(x, operand, kept, key=key, signs=signs, place=place)
    by = SimpleNamespace(quantize=nvfp4_quantize, rounded=nvfp4_rounded, largest_magnitude=largest_magnitude,
                         inner_values=inner_values)
    there = fused(x, operand, kept, key, signs, place, lambda amax: amax, True, by)
    assert torch.equal(here.values, there.dense()) and there.rows == 64
    if kept == torch.float32:
        apart = fused(x, operand, kept, key, signs, place, lambda amax: amax, False, by)
        assert torch.equal(apart.dense(), here.values) and torch.equal(apart.inner.float(), here.inner) and apart.rows == 64
        assert torch.equal(product_at("slab", apart, apart, torch.float32), product_at("slab", here, here, torch.float32))
    if kept == torch.float32:
        assert torch.equal(here.inner, there.packed.values())
        y = product_at("slab", here, here, torch.float32)
        assert torch.equal(y, slab_product(there.packed, there.packed, torch.float32))


@pytest.mark.parametrize("operand", [Operand("nvfp4"), Operand("nvfp4", block=16), Operand("nvfp4", "stochastic", True, True)])
def test_what_is_compiled_in_one_gives_the_same(operand):
    x = torch.randn(64, 200, generator=torch.Generator().manual_seed(0)).bfloat16()
    key, signs = (5, 7) if operand.hadamard else (None, None)
    given = {"key": key, "signs": signs, "place": Place([(0, 40, 8), (40, 24, STACK)], [(0, 128, 256), (128, 72, STACK)])}
    want = quantise(x.t().contiguous().t(), operand, torch.bfloat16, **given).values
    assert want.shape[1] == (208 if operand.hadamard else 200)
    assert torch.equal(quantise(x, operand, torch.bfloat16, **given, whole=False, by="compiled").values, want)
    assert torch.equal(quantise(x, operand, torch.bfloat16, **given, whole=False, by="eager").values, want)
    with pytest.raises(ValueError, match="quantiser 'quick': expected one of kernels, compiled, eager"):
        recipe(quantiser="quick")


@pytest.mark.parametrize("turned", [(), (0,), (1,), (0, 1)], ids=str)
def test_fp8_operands_lie_as_the_library_reads_them(turned, monkeypatch):
    """cuBLASLt takes a row-major and a column-major matrix: operands of backward products are made of transposed ones."""
    def multiplied(a, b, *, scale_a, scale_b, out_dtype):
        assert a.stride(1) == b.stride(0) == 1 and a.dtype == b.dtype == torch.float8_e4m3fn and b.shape[1] % 16 == 0
        assert scale_a.is_contiguous() and scale_b.is_contiguous() and scale_b.shape == (1, b.shape[1])
        return ((a.float() @ b.float()) * scale_a * scale_b).to(out_dtype)

    sides = [whole(*shape)[0] for shape in ((24, 48, 8), (40, 48, 8))]
    a, b = (quantise(x.t().contiguous().t() if n in turned else x, Operand("e4m3"), torch.bfloat16) for n, x in enumerate(sides))
    assert all(one.values.is_contiguous() != (n in turned) for n, one in enumerate((a, b))), "they lie as they were given"
    want = product_at("emulated", a, b, torch.bfloat16)
    monkeypatch.setattr(level, "real", lambda *_: True)
    monkeypatch.setattr(torch, "_scaled_mm", multiplied)
    assert torch.equal(product_at("emulated", a, b, torch.bfloat16), want)


@pytest.mark.parametrize("name", ["tetrajet", "nvfp4"])
def test_slabs_and_dense_products_agree(name):
    """Level slab is exact in its operands, level emulated rounds them to bfloat16."""
    x, w, dy = whole(200, 384, 256, torch.bfloat16)
    dense, slabs = (given(recipe(name, level=level), x, w, dy, free(384, 256))[:3] for level in ("emulated", "slab"))
    # the gradients' operands are requantised from values that differ by that rounding, and some draw the next code
    for a, b, limit in zip(dense, slabs, (0.005, 0.1, 0.1)):
        assert a.dtype == b.dtype and 0 < relative(a, b) < limit


def test_scales_that_are_powers_of_two_are_exact_at_every_level():
    x, w, dy = whole(200, 384, 256, torch.float32)
    dense, slabs = (given(recipe("mxfp4", level=level, compute="float32"), x, w, dy, free(384, 256))[:3] for level in LEVELS[:2])
    for a, b in zip(dense, slabs):
        assert b.any() and relative(a, b) < 1e-6


# options


NUMBERS = {  # option -> operands that it may change
    "outer": {1, 2, 3, 4, 5, 6}, "weight": {2, 4}, "aligned": {4, 6}, "hadamard": {3, 4, 5, 6}, "margin": {3, 4, 5, 6},
    "rounding": {3, 4, 5, 6}, "noise": {4, 6},
}


@pytest.mark.parametrize(("option", "value", "changed"), [
    ("outer", "tensor", {1, 2, 3, 4, 5, 6}), ("weight", "16x16", {2, 4}), ("aligned", "weight", {6}), ("aligned", "none", {4, 6}),
    ("hadamard", "dw", {3, 4}), ("hadamard", "none", {3, 4, 5, 6}), ("margin", False, {3, 4, 5, 6}),
    ("rounding", "nearest", {3, 4, 5, 6}), ("noise", "shared", {4, 6}),
])
def test_each_part_is_an_option_and_changes_what_it_names(option, value, changed):
    place, data = product("gpt-tiny", "ffn", ("up",)), whole(128, 128, 512)
    *_, usual = given(recipe(compute="float32"), *data, place)
    *_, other = given(recipe(compute="float32", **{option: value}), *data, place)
    assert {n for n in usual if usual[n].shape != other[n].shape or not torch.equal(usual[n], other[n])} == changed


def test_the_recipe_is_the_papers():
    six = recipe().six
    near, back = Operand("nvfp4"), Operand("nvfp4", "stochastic", True, True)
    assert [six[n] for n in range(1, 7)] == [near, near, back, back, back, back]
    assert recipe().aligned == "both"


@pytest.mark.parametrize("name", ["tetrajet", "nvfp4", "mxfp4", "fp8"])
def test_gradients_point_where_the_plain_products_do(name):
    x, w, dy = whole(256, 128, 512, torch.bfloat16)
    y, dx, dw, _ = given(recipe(name), x, w, dy, product("gpt-tiny", "ffn", ("up",)))
    limit = {"fp8": 0.06}.get(name, 0.35)
    plain = x.float() @ w.t(), dy.float() @ w, dy.float().t() @ x.float()
    errors = [relative(a, b) for a, b in zip((y, dx, dw), plain)]
    assert all(e < limit for e in errors), errors
    assert all(e > 0.01 for e in errors), "nothing was quantised"
    assert (y.dtype, dx.dtype, dw.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)


def test_the_last_layers_of_nvidias_recipe_stay_plain():
    made, place = recipe("nvfp4", tail=1), product("gpt-tiny", "ffn", ("up",))
    made.layers = 4
    x, w, dy = whole(64, 128, 512, torch.bfloat16)
    y, dx, dw, found = given(made, x, w, dy, place, layer=3)
    assert not found and torch.equal(y, x @ w.bfloat16().t())
    assert torch.equal(dx, dy @ w.bfloat16()) and torch.equal(dw, (dy.t() @ x).float())
    assert given(made, x, w, dy, place, layer=2)[3]


# bad input


@pytest.mark.parametrize("shape", [(1, 16, 16), (3, 20, 7), (130, 33, 129), (17, 128, 1), (0, 32, 32)])
def test_any_shape(shape):
    t, d_in, d_out = shape
    made, place = recipe(), free(d_in, d_out)
    g = torch.Generator().manual_seed(0)
    x, dy = torch.randn(t, d_in, generator=g).bfloat16(), torch.randn(t, d_out, generator=g).bfloat16()
    y, dx, dw, _ = given(made, x, torch.randn(d_out, d_in, generator=g), dy, place)
    assert (y.shape, dx.shape, dw.shape) == ((t, d_out), (t, d_in), (d_out, d_in))
    assert torch.isfinite(y).all() and torch.isfinite(dx).all() and torch.isfinite(dw).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["tetrajet", "nvfp4", "mxfp4", "fp8"])
def test_nonfinite_input_is_never_a_plausible_number(name, bad):
    x, w, dy = whole(32, 128, 64, torch.bfloat16)
    x[5, 7], dy[9, 3] = bad, bad
    y, dx, dw, _ = given(recipe(name), x, w, dy, free(128, 64))
    assert not torch.isfinite(y[5]).any()
    assert not torch.isfinite(dx[9]).any()
    assert not torch.isfinite(dw[3]).any()


@pytest.mark.parametrize("name", ["tetrajet", "nvfp4", "mxfp4", "fp8"])
@pytest.mark.parametrize("fill", [0.0, -0.0, 1e-40, 3e38])
def test_zeros_subnormals_and_huge_numbers(name, fill):
    """At the end of float32's range a code rounded up, or a rotation, is infinite: then so is the product, never wrong."""
    x, w, dy = torch.full((32, 128), fill), torch.eye(128), torch.zeros(32, 128)
    y, dx, dw, _ = given(recipe(name, compute="float32"), x, w, dy, free(128, 128))
    assert torch.equal(dx, torch.zeros_like(dx))
    if fill < 1:
        assert torch.equal(dw, torch.zeros_like(dw)) and torch.isfinite(y).all()
    finite = torch.isfinite(y)
    assert torch.allclose(y[finite], x[finite], rtol=0.07, atol=1e-38)
