"""Products of NVFP4 operands: the reference against the sum it stands for, the kernels compiled, interpreted and run on a GPU."""
from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels import nvfp4_product, nvfp4_reference
from kernels.launch import ARCHITECTURES
from kernels.nvfp4_reference import Quantized, nvfp4_quantize


def operands(m: int, n: int, k: int, device: str = "cpu", outer: int | str = 128) -> tuple[Quantized, Quantized]:
    g = torch.Generator().manual_seed(k)
    return tuple(nvfp4_quantize(torch.randn(rows, k, generator=g).to(device), outer=outer) for rows in (m, n))


def close(got: Tensor, a: Quantized, b: Quantized) -> bool:
    """Whether it is the product by float32 sums of k terms, against float64."""
    left, right = (q.dequantize().double() for q in (a, b))
    bound = 2.0**-20 * (left.abs() @ right.abs().t())
    return bool(((got.double() - left @ right.t()).abs() <= bound).all())


def values(q: Quantized) -> tuple[Tensor, Tensor]:
    return q.values().bfloat16(), q.outer


def meta(rows: int, columns: int) -> Quantized:
    codes, inner, outer = ((columns // 2, torch.uint8), (columns // 16, torch.float8_e4m3fn), (columns // 128, torch.float32))
    return Quantized(*(torch.empty(rows, n, dtype=kind, device="meta") for n, kind in (codes, inner, outer)), columns)


def compiled(arch: int, native: bool):
    out = torch.empty(256, 256, dtype=torch.bfloat16, device="meta")
    return nvfp4_product.launch(meta(256, 1024), meta(256, 1024), out, native=native).compile(arch)


@pytest.mark.parametrize("outer", [128, "tensor"])
@pytest.mark.parametrize("shape", [(5, 7, 128), (33, 70, 300), (2, 3, 0)])
def test_the_reference_is_the_product_of_what_codes_stand_for(shape, outer):
    a, b = operands(*shape, outer=outer)
    assert close(nvfp4_reference.slab_product(a, b, torch.float32), a, b)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_slab_product_uses_tensor_cores(arch):
    made = compiled(arch, False)
    assert ("mma" in made.ptx and ".bf16" in made.ptx) or "kind::f16" in made.ptx
    assert made.shared <= 99 * 1024 and made.spills <= (32 if arch == 80 else 0)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_product_of_values_uses_tensor_cores(arch):
    a, b = (torch.empty(512, 1024, dtype=torch.bfloat16, device="meta") for _ in range(2))
    outer, out = (torch.empty(512, n, device="meta") for n in (8, 512))
    made = nvfp4_product.values_launch(a, outer, b, outer, out).compile(arch)
    assert ("wgmma" if arch == 90 else "tcgen05" if arch == 100 else "mma.sync") in made.ptx
    assert made.shared <= {80: 163, 90: 227, 100: 227}.get(arch, 99) * 1024 and made.spills <= (0 if arch == 90 else 32)


@pytest.mark.parametrize("arch, instruction", [(100, r"tcgen05\.mma\S*kind::mxf4nvf4\.block_scale\.scale_vec::4X"),
                                               (120, r"mma\.sync\S*kind::mxf4nvf4\.block_scale\.scale_vec::4X\S*ue4m3")])
def test_the_native_product_assembles_to_block_scaled_fp4(arch, instruction):
    made = compiled(arch, True)
    assert re.search(instruction, made.ptx) and made.spills == 0


def test_native_is_refused_without_the_hardware():
    with pytest.raises(RuntimeError, match=r"need FP4 tensor cores \(sm_100, sm_120\), this is a CPU; take level slab"):
        nvfp4_product.native(*operands(4, 4, 128))


def test_what_does_not_fit_is_refused():
    for product in (nvfp4_product.slab, nvfp4_product.native, nvfp4_reference.slab_product):
        with pytest.raises(ValueError, match="contraction of 128 columns against 256"):
            product(operands(4, 4, 128)[0], operands(4, 4, 256)[0])


def test_the_interpreter_equals_the_reference():
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("outer", [128, "tensor"])
@pytest.mark.parametrize("shape", [(5, 7, 128), (300, 170, 1000), (1024, 768, 4096)])
def test_on_a_device(shape, outer):
    a, b = operands(*shape, device="cuda", outer=outer)
    assert close(nvfp4_product.slab(a, b, torch.float32), a, b)
    assert close(nvfp4_product.slab_values(*values(a), *values(b), torch.float32), a, b)


if __name__ == "__main__":
    for options in ({"outer": 128}, {"outer": "tensor"}):
        pair = operands(5, 70, 300, **options)
        assert close(nvfp4_product.slab(*pair, torch.float32), *pair)
        assert close(nvfp4_product.slab_values(*values(pair[0]), *values(pair[1]), torch.float32), *pair)
