"""NVFP4's kernels: compiled for five architectures here, interpreted here, run on a GPU. What is compared: nvfp4_checks.py."""
from __future__ import annotations

import re

import nvfp4_checks
import pytest
import torch
from interpreter import interpreted
from nvfp4_checks import GRID, INTERPRETED, NOISE, SHAPES, SIGNS, check

from kernels import nvfp4
from kernels.launch import ARCHITECTURES, Launch
from kernels.nvfp4_reference import MARGIN, Quantized

BF16 = torch.bfloat16


def meta(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def given(rows: int, columns: int) -> Quantized:
    return Quantized(meta(rows, columns // 2), meta(rows, columns // 16, dtype=torch.float8_e4m3fn),
                     meta(rows, columns // 128, dtype=torch.float32), columns)


def launches(rows: int = 256, columns: int = 1024, noise: int = NOISE) -> dict[str, Launch]:
    """As a layer uses them: the forward's, one of the transpose, the backward's of a gradient and of what the forward used."""
    x, back = meta(rows, columns, dtype=BF16), {"margin": MARGIN, "noise": noise, "signs": SIGNS}
    made, turned = given(rows, columns), given(columns, rows)

    def quantize(source, q: Quantized, **options) -> Launch:
        return nvfp4.quantize_launch(source, q.codes, q.inner.view(torch.uint8), q.outer, **options)

    return {"nearest": quantize(x, made), "tall": quantize(x, made, block=16, peak=meta(1, dtype=torch.int32)),
            "back": quantize(x, made, **back), "transposed": quantize(x.t(), turned, **back),
            "again": quantize(made, turned, **back), "dequantize": nvfp4.dequantize_launch(made, x)}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernels_compile_without_spills(arch):
    """All on sm_90, those that hold the most on the others."""
    for name, launch in launches().items():
        if arch != 90 and name not in ("back", "again"):
            continue
        made = launch.compile(arch)
        assert made.spills == 0 and 16 <= made.registers <= 255, (name, made)


def test_quotients_are_correctly_rounded():
    """By the full routine; an approximate division would show as rcp.approx or div.full."""
    for name in ("nearest", "back"):
        ptx = launches()[name].compile(90).ptx
        assert "div.rn.f32" in ptx and not re.search(r"div\.(full|approx)|rcp\.approx", ptx), name


def test_noise_compiles_nothing_anew():
    first, second = (launches(noise=noise)["back"].signature() for noise in (1, 2**63 + 2**31))
    assert first == second


def test_the_interpreter_equals_the_reference():
    assert interpreted(nvfp4_checks) == f"{len(GRID)} settings, {INTERPRETED} shapes\n"


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="dequantised in float32 or bfloat16"):
        nvfp4.dequantize(given(16, 128), torch.float16)
    with pytest.raises(ValueError, match="multiple of 8"):
        nvfp4.quantize(torch.zeros(1, 128), "stochastic", noise=1, origin=(0, 4))
    with pytest.raises(ValueError, match="stochastic needs noise"):
        nvfp4.requantize(given(16, 128), "stochastic")


@pytest.mark.parametrize("shape", [(0, 64), (4, 0), (0, 0)])
def test_nothing_to_do_is_done(shape):
    q = nvfp4.quantize(torch.zeros(shape), outer="tensor")
    assert nvfp4.dequantize(q).shape == shape and nvfp4.requantize(q).dequantize().shape == shape[::-1]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("options", GRID, ids=lambda o: "-".join(str(v) for v in o.values()) or "default")
def test_on_a_device(options, dtype):
    for rows, columns in [*SHAPES, (300, 4096)]:
        check("cuda", dtype, rows, columns, options)
        check("cuda", dtype, rows, columns, options, bad=True)
