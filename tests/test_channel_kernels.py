"""Kernels of channels that lie apart: compiled for five architectures, interpreted, run on a GPU. What is compared:
channel_checks.py."""
import math
import re

import channel_checks
import pytest
import torch
from channel_checks import SHAPES, check_rounded, check_taken
from interpreter import interpreted

from kernels import columns, mxfp8, reference
from kernels.entry import compile
from kernels.launch import ARCHITECTURES
from kernels.registry import ENTRIES
from suite.precision import blocks

MINE = [entry for entry in ENTRIES if entry.function.__module__ in ("kernels.columns", "kernels.mxfp8")]
WIDE = [(300, 4096), (64, 12288), (128, 1024)]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_they_compile_without_spills(arch):
    assert len(MINE) == 8
    for entry in MINE:
        made = compile(entry, arch)
        assert made.spills == 0 and 16 <= made.registers <= entry.registers, (entry.name, made)


@pytest.mark.parametrize("entry", [e for e in MINE if e.aligned], ids=lambda e: e.name)
def test_whole_tiles_move_16_bytes_at_a_time_and_fit_the_memory(entry):
    """A copy at full speed leaves time for 31 instructions an element (kernels/nvfp4.py)."""
    launch = entry.launch(**entry.inputs("meta"))
    made = launch.compile(90)
    assert all(access.endswith(".v4.b32") for access in re.findall(r"\b(?:ld|st)\.global\S*", made.ptx))
    assert len(made.instructions) * 128 / (launch.constants["ROWS"] * launch.constants["COLUMNS"]) < 31


def test_the_interpreter_equals_the_reference():
    assert interpreted(channel_checks) == f"{len(SHAPES)} shapes\n"


def test_the_reference_is_the_format():
    """The least power of two under which nothing clips, and the nearest of all E4M3 numbers."""
    x = channel_checks.numbers(20, 96, "cpu", torch.float32, bad=True)
    y = reference.mxfp8_rounded(x, dtype=torch.float32)
    known = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    known, blank = known[known.isfinite()], 0
    for block, found in zip(x.reshape(-1, 32), y.reshape(-1, 32)):
        if not block.isfinite().all():
            assert found.isnan().all()
            blank += 1
            continue
        power = 2.0 ** max(-126, math.ceil(math.log2(float(block.abs().max()) / 448) - 1e-9) if block.any() else -126)
        near = (block.double()[:, None] - known * power).abs()
        assert torch.equal((block.double() - found.double()).abs(), near.amin(1))
    assert blank == 2
    assert torch.equal(blocks.mxfp8(x).values.view(x.shape).nan_to_num(0.0), y.nan_to_num(0.0))


@pytest.mark.parametrize("call, words", [
    (lambda: columns.taken(torch.zeros(2, 4, dtype=torch.float64), torch.arange(2)), "columns: torch.float64"),
    (lambda: columns.taken(torch.zeros(4, 2).t(), torch.arange(2)), r"columns: torch.float32 \(2, 4\)"),
    (lambda: columns.taken(torch.zeros(2, 4), torch.arange(2, dtype=torch.int32)), "order torch.int32"),
    (lambda: columns.taken(torch.zeros(2, 4), torch.arange(2), out=torch.zeros(2, 3)), r"out torch.float32 \(2, 3\)"),
    (lambda: mxfp8.rounded(torch.zeros(2, 4), dtype=torch.float16), "mxfp8: torch.float16"),
    (lambda: mxfp8.rounded(torch.zeros(2, 4, dtype=torch.int32)), "mxfp8: torch.int32"),
    (lambda: mxfp8.rounded(torch.zeros(2, 4), out=torch.zeros(4, 2).t()), r"out \(2, 4\)")])
def test_what_does_not_fit_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_nothing_to_do_is_done(shape):
    assert mxfp8.rounded(torch.zeros(shape)).shape == shape
    assert columns.taken(torch.zeros(shape), torch.arange(shape[1])).shape == shape


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [*SHAPES, *WIDE])
def test_on_a_device(shape, dtype):
    assert check_rounded("cuda", dtype, *shape) and check_rounded("cuda", dtype, *shape, bad=True)
    assert check_taken("cuda", dtype, *shape)
