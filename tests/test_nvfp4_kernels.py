"""NVFP4's kernels: compiled for five architectures here, interpreted here, run on a GPU. What is compared: nvfp4_checks.py."""
from __future__ import annotations

import math

import nvfp4_checks
import pytest
import torch
from interpreter import interpreted
from nvfp4_checks import GRID, NOISE, SHAPES, SIGNS, check, edges, same

from kernels import nvfp4, nvfp4_reference
from kernels.launch import ARCHITECTURES, Launch
from kernels.nvfp4_reference import MARGIN, Quantized
from kernels.registry import ENTRIES
from kernels.sass import bare

BF16 = torch.bfloat16


def meta(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def given(rows: int, columns: int) -> Quantized:
    return Quantized(meta(rows, columns // 2), meta(rows, columns // 16, dtype=torch.float8_e4m3fn),
                     meta(rows, columns // 128, dtype=torch.float32), columns)


def launches(rows: int = 4096, columns: int = 16384, noise: int = NOISE) -> dict[str, Launch]:
    """As a layer uses them: the forward's, one of the transpose, the backward's of a gradient and of what the forward used."""
    x, back = meta(rows, columns, dtype=BF16), {"margin": MARGIN, "noise": noise, "signs": SIGNS}
    made, turned = given(rows, columns), given(columns, rows)

    def quantize(source, q: Quantized, **options) -> Launch:
        return nvfp4.quantize_launch(source, q.codes, q.inner.view(torch.uint8), q.outer, **options)

    def rounded(source, **options) -> Launch:
        return nvfp4.quantize_launch(source, out=meta(*source.shape, dtype=BF16), **options)

    return {"nearest": quantize(x, made), "back": quantize(x, made, **back), "transposed": quantize(x.t(), turned, **back),
            "rounded nearest": rounded(x), "rounded back": rounded(x, **back),
            "rounded transposed": rounded(x.t(), **back)}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernels_compile_without_spills(arch):
    """Those that hold the most on each architecture, the registry's in turn."""
    mine = [e for e in ENTRIES if e.function.__module__ == "kernels.nvfp4"]
    turn = {e.name: e.launch(**e.inputs("meta")) for e in mine[ARCHITECTURES.index(arch)::len(ARCHITECTURES)]}
    for name, launch in (turn | {"back": launches()["back"]}).items():
        made = launch.compile(arch)
        assert made.spills == 0 and 16 <= made.registers <= 255, (name, made)


# instructions an element of a tile on sm_90, and registers from which too few programs would run at once
BUDGET = {"nearest": (18, 80), "back": (23.5, 128), "transposed": (25.5, 120), "rounded nearest": (19, 80),
          "rounded back": (26, 64), "rounded transposed": (26, 128)}


@pytest.mark.parametrize("name", BUDGET)
def test_a_tile_takes_few_instructions(name):
    """Of the loop over tiles, which everything else is amortised over; no division is left in it, and 16 bytes are read at a time
    where rows lie along the contraction."""
    launch = launches()[name]
    made = launch.compile(90)
    lines = [bare(line) for line in made.instructions]
    loop = max(at - int(line.split("0x")[-1], 16) // 16 for at, line in enumerate(lines) if line.startswith("BRA"))
    elements = 16 * launch.constants["A"] * launch.constants["B"] / (32 * launch.warps)
    most, registers = BUDGET[name]
    assert 10 < loop / elements <= most and made.registers <= registers, (loop / elements, made)
    assert not any(line.startswith(("CALL", "FCHK", "I2F", "F2I")) for line in lines[-loop:])
    if "transposed" not in name:
        assert all(".128" in line.split()[0] for line in lines if line.startswith("LDG"))


def rounded_to(x: torch.Tensor, up: bool) -> torch.Tensor:
    """float64, positive -> float32, never below it (up), or never above."""
    y = x.float()
    wrong = y.double() < x if up else y.double() > x
    return torch.where(wrong, (y.view(torch.int32) + (1 if up else -1)).view(torch.float32), y)


@pytest.mark.parametrize("off", [-1, 0, 1], ids="approximation {:+d}".format)
def test_products_give_the_codes_of_division_at_every_edge(off):
    """x / d as kernels form it, x r + x l, falls on division's side of every edge of E2M1: x within 2 units in the last place of
    edge · d. Every 61st mantissa of d, and the last ones, where l needs its second term; the formula scales with powers of two.
    Over all mantissas the same holds, and of the 293,601,280 quotients themselves 8 differ, by a unit in the last place. off: of
    the approximation of 1 / d that r starts from, in such units."""
    mantissas = torch.cat([torch.arange(0x3F800000, 0x40000000, 61), torch.arange(0x3FFFFF00, 0x40000000)])
    d = mantissas.to(torch.int32).view(torch.float32)
    wide = d.double()
    near = ((1.0 / wide).float().view(torch.int32) + off).view(torch.float32).double()
    r = rounded_to(near + near * (1.0 - near * wide).float().double(), up=False)
    rest = (1.0 - r.double() * wide).float()
    low = rest * r
    low = rounded_to(low.double() * rest.double() + low.double(), up=True).clamp(min=0.0)
    for edge in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0):
        for units in range(-2, 3):
            x = ((edge * d).view(torch.int32) + units).view(torch.float32)
            z, exact = (x.double() * r.double() + (x * low).double()).float(), (x.double() / wide).float()
            assert torch.equal(nvfp4_reference.e2m1(z), nvfp4_reference.e2m1(exact)), (edge, units)
            assert ((z.view(torch.int32) - exact.view(torch.int32)).abs() <= 1).all()
    for nothing in (0.0, -0.0, 1e-45, -1e-45):
        z = torch.full_like(d, nothing)
        z = ((z * 2.0**-64).double() * r.double() + ((z * 2.0**-64) * low).double()).float()  # as tiny beside a huge block
        assert not z.any() and (z.signbit() == (math.copysign(1.0, nothing) < 0)).all()


@pytest.mark.parametrize("number", [6.0, 6.0 * MARGIN, 2688.0, 2688.0 * MARGIN])
def test_a_number_divides_by_two_products(number):
    """q = RN(x / n) from RN(x · RN(1 / n)) and one correction, for every mantissa of x."""
    n = torch.tensor(number).double()
    inverse = torch.tensor(1.0 / number).double()
    for start in range(0x3F800000, 0x40000000, 1 << 21):
        x = torch.arange(start, start + (1 << 21), dtype=torch.int32).view(torch.float32).double()
        q = (x * inverse).float().double()
        q = ((x - q * n).float().double() * inverse + q).float()
        assert torch.equal(q, (x / n).float())


def test_noise_compiles_nothing_anew():
    first, second = (launches(noise=noise)["back"].signature() for noise in (1, 2**63 + 2**31))
    assert first == second


def test_the_interpreter_equals_the_reference():
    assert interpreted(nvfp4_checks) == f"{len(GRID)} settings\n"


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="dequantised in float32 or bfloat16"):
        nvfp4.dequantize(given(16, 128), torch.float16)
    with pytest.raises(ValueError, match="multiple of 8"):
        nvfp4.quantize(torch.zeros(1, 128), "stochastic", noise=1, origin=(0, 4))
    with pytest.raises(ValueError, match="stochastic needs noise"):
        nvfp4.requantize(given(16, 128), "stochastic")
    row, other = nvfp4_reference.drawn([(1, 2), (3, 4)])
    for signs in (2, other):
        with pytest.raises(ValueError, match="expected two keys, or one row on the device for both"):
            nvfp4.quantize(torch.zeros(1, 128), "stochastic", noise=row, signs=signs)


@pytest.mark.parametrize("shape", [(0, 64), (4, 0), (0, 0)])
def test_nothing_to_do_is_done(shape):
    q = nvfp4.quantize(torch.zeros(shape), outer="tensor")
    assert nvfp4.dequantize(q).shape == shape and nvfp4.requantize(q).dequantize().shape == shape[::-1]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("options", GRID, ids=lambda o: "-".join(str(v) for v in o.values()) or "default")
def test_on_a_device(options, dtype):
    for rows, columns in [*SHAPES, (300, 4096)]:
        assert check("cuda", dtype, rows, columns, options)
        assert check("cuda", dtype, rows, columns, options, bad=True)


@pytest.mark.gpu
def test_at_every_edge_on_a_device():
    """By the hardware's own reciprocal."""
    x = edges(1 << 16, "cuda")
    assert same(nvfp4.quantize(x), nvfp4_reference.nvfp4_quantize(x))
