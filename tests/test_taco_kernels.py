"""TACO's kernels: compiled for six architectures here, interpreted here, run on a GPU. What is compared: taco_checks.py."""
from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import taco_checks
import torch
from interpreter import interpreted
from taco_checks import GRID, check

from kernels import taco, taco_reference
from kernels.entry import compile
from kernels.registry import ENTRIES

MINE = [e for e in ENTRIES if e.function.__module__ == "kernels.taco"]
USUAL = [e for e in MINE if "-g128" in e.name and "fp32" not in e.name and "=" not in e.name]
ARCHITECTURES = (80, 86, 89, 90, 100, 120)
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # KiB a block may have


def meta(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernels_compile_without_spills(arch):
    """The usual ones on each architecture, the others in turn."""
    for entry in {e.name: e for e in USUAL + MINE[ARCHITECTURES.index(arch)::len(ARCHITECTURES)]}.values():
        made = compile(entry, arch)
        assert made.spills == 0 and 16 <= made.registers <= 255 and made.shared <= SHARED[arch] * 1024, (entry.name, made)


def test_wide_accesses_and_tensor_cores():
    for entry in USUAL:
        ptx = compile(entry, 90).ptx
        assert ".v4.b32" in "".join(re.findall(r"st\.global\S*", ptx)), entry.name
        copies = set(re.findall(r"cp\.async\S+ \[[^]]*\], \[[^]]*\], (0x\w+)", ptx))
        assert copies <= {"0x10", "0x8", "0x4"} and copies & {"0x10", "0x8"}, (entry.name, copies)  # 0x4: scales
        assert ("mma" in ptx) == ("reduce" not in entry.name), entry.name


def test_e4m3_is_made_by_an_instruction_from_sm_89_on():
    for entry in USUAL[:1]:
        assert "cvt.rn.satfinite.e4m3x2" in compile(entry, 89).ptx
        assert "e4m3" not in compile(entry, 80).ptx


def test_noise_compiles_nothing_anew():
    def signature(noise):
        return taco.encode_launch(meta(1, 4096, dtype=torch.bfloat16), meta(1, 4224), noise=noise).signature()

    assert signature(1) == signature(16) == signature(2**63 + 2**31) != signature(None)


def test_the_interpreter_equals_the_reference():
    assert interpreted(taco_checks) == "32 settings\n"


@pytest.mark.parametrize("fault", ["", "encode", "uncounted", "decode", "total", "reduce"])
def test_the_check_of_kernels_sees_each_fault(monkeypatch, fault):
    """The references in place of the kernels, one of them a bit off: what runs on devices passes without a fault alone."""
    def off(step, change):
        def run(*given, product=None, **options):
            out = getattr(taco_reference, f"taco_{step}")(*given, **options)
            if step == fault:
                change(out[-1] if out.dim() > 1 else out)
            if fault == "uncounted" and options.get("bad") is not None:
                options["bad"].zero_()
            return out

        return run

    def last_code(wire):
        wire[-64] ^= 1

    def last_value(x):
        x[-1] += 0.1

    kernels = SimpleNamespace(encode=off("encode", last_code), decode=off("decode", last_value), total=off("total", last_value),
                              reduce=off("reduce", last_code))
    monkeypatch.setattr(taco_checks, "taco", kernels)
    options = {"group": 32, "mode": "lean", "hadamard": False, "format": "e4m3"}
    if fault:
        with pytest.raises(AssertionError):
            check("cpu", torch.float32, 600, options)
    else:
        assert check("cpu", torch.float32, 600, options)


@pytest.mark.gpu
@pytest.mark.parametrize("options", GRID, ids=lambda o: "-".join(str(v) for v in o.values()))
def test_on_a_device(options):
    for n in (options["group"] * 64, 100_003):
        assert check("cuda", torch.bfloat16, n, options)
        assert check("cuda", torch.float32, n, options)
        assert check("cuda", torch.float32, n, options, False, False)


@pytest.mark.gpu
def test_every_float32_becomes_the_code_that_torch_makes():
    """All exponents and mantissas: 2^24 positive numbers up to the largest code, and their negatives."""
    bits = torch.arange(0, 1 << 31, 1 << 7, dtype=torch.int64, device="cuda").to(torch.int32)
    x = bits.view(torch.float32)
    x = x[x <= 448.0]
    x = torch.cat([x, -x, torch.zeros(-2 * len(x) % 128, device="cuda")]).view(-1, 128)
    x[:, 0] = 448.0  # of its group the largest, so that the multiplier is 1
    got = taco.encode(x, 128, hadamard=False)[:, :128]
    assert torch.equal(got, taco_reference.to_codes(x, "e4m3"))


@pytest.mark.gpu
def test_past_2_to_the_31_elements():
    x = torch.full((1, 2**31 + 4096), 0.5, dtype=torch.bfloat16, device="cuda")
    x[0, -1] = 3.0
    out = torch.zeros_like(x)
    taco.decode(taco.encode(x), out=out)
    assert bool((out[0, : 2**31] == 0.5).all()) and abs(out[0, -1].item() - 3.0) < 0.2
