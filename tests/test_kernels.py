"""Triton kernels against their plain-torch references: compiled for five architectures here, interpreted here, run on a GPU.

What is compared stands in kernel_checks.py: in float32 in the interpreter, which needs a process of its own, and in bfloat16 too
on a GPU.
"""
from __future__ import annotations

import re
from collections import Counter

import kernel_checks
import pytest
import torch
from interpreter import interpreted
from kernel_checks import (
    BF16,
    FLOAT32,
    GATES,
    ROWS,
    SHAPES,
    WEIGHTS,
    check_bottleneck,
    check_bottleneck_nonfinite,
    check_gradient,
    check_nonfinite,
    check_statistics,
    check_step,
    check_swiglu,
    check_swiglu_nonfinite,
    close,
)
from torch import Tensor

from kernels import adamw, cross_entropy, reference, swiglu
from kernels.entry import Entry, compile
from kernels.launch import ARCHITECTURES
from kernels.registry import ENTRIES, logits_and_targets, step_inputs, swiglu_inputs


def distinct() -> list[Entry]:
    """One entry of each kernel, types and hints: the rest compile to the same. Codecs are compiled in test_taco_kernels.py,
    test_grouped_kernels.py and test_exchange.py, NVFP4's in test_nvfp4_kernels.py, those beside in test_channel_kernels.py."""
    own = ("kernels.taco", "kernels.grouped", "kernels.exchange", "kernels.nvfp4", "kernels.columns", "kernels.mxfp8")
    return list({(e.function.__qualname__, e.function.__module__, str(e.launch(**e.inputs("meta")).signature())): e
                 for e in reversed(ENTRIES) if not e.function.__module__.startswith(own)}.values())


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_entry_compiles_without_spills(arch):
    for entry in distinct():
        made = compile(entry, arch)
        assert made.spills == 0, entry.name
        assert 16 <= made.registers <= entry.registers, (entry.name, made)


@pytest.mark.parametrize("entry", [e for e in distinct() if e.aligned], ids=lambda e: e.name)
def test_aligned_rows_move_16_bytes_at_a_time(entry):
    accesses = re.findall(r"\b(?:ld|st)\.global\S*", compile(entry, 90).ptx)
    # target, picked and statistics of a row; clip
    single = {"statistics": 5, "gradient": 3, "step": 1, "backward": 0,
              "scale": 1 + entry.inputs("meta").get("local", 0), "epilogue": None, "epilogue_backward": 2}[entry.function.__name__]
    narrow = [a for a in accesses if ".v4.b32" not in a]
    if single is None:  # statistics of as many rows as a thread sees; p read and h written in 16 bytes
        launch, size = entry.launch(**entry.inputs("meta")), entry.inputs("meta")["p"].element_size()
        wide = launch.constants["ROWS"] * launch.constants["BLOCK"] * size // (16 * 32 * launch.warps)
        assert len(accesses) - len(narrow) == 2 * wide and len(narrow) <= wide, accesses
    else:
        assert len(narrow) == single, accesses


def test_names_are_unique_and_traffic_is_what_the_arguments_hold():
    assert len({e.name for e in ENTRIES}) == len(ENTRIES)
    for entry in ENTRIES:
        if entry.function.__module__.startswith(("kernels.nvfp4", "kernels.columns", "kernels.mxfp8")):
            # each of the launch's tensors once
            held = entry.launch(**entry.inputs("meta")).arguments.values()
            assert entry.traffic == sum(x.numel() * x.element_size() for x in held if isinstance(x, Tensor)), entry.name
            continue
        size = {name: x.numel() * x.element_size() for name, x in entry.inputs("meta").items() if isinstance(x, Tensor)}
        codec = {"x": 1, "wire": 1, "wires": 1, "out": 1}
        passes = {"encode": codec, "decode": codec, "total": codec, "reduce": codec, "loopback": {"x": 1, "out": 1, "slot": 2},
                  "statistics": {"logits": 1}, "gradient": {"logits": 2}, "backward": {"gu": 2, "dz": 1},
                  "scale": {"x": 2, "gain": 1}, "epilogue": {"p": 2, "square": 1},
                  "epilogue_backward": {"p": 2, "dh": 1, "square": 2},
                  "step": {"param": 2, "grad": 1, "exp_avg": 2, "exp_avg_sq": 2}}[entry.function.__name__]
        given = entry.inputs("meta")
        rows = 4 * (1 + given["local"]) * len(given["x"]) if "gain" in size else 0  # the statistics that scale writes
        assert entry.traffic == rows + sum(size.get(name, 0) * n for name, n in passes.items()), entry.name


def test_what_changes_each_step_compiles_nothing_anew():
    def signature(shape=(64, 64), **changed):
        return adamw.step_launch(**step_inputs(shape, BF16, BF16, "meta", 0) | changed).signature()

    first = signature(step=1, lr=1.0)
    assert first == signature(step=10**6, lr=0.0) == signature(step=2, beta1=0.0, decay=0)
    assert first != signature(clip=None)
    assert signature((1 << 16, 1 << 16))[0]["numel"] == "i64" and first[0]["numel"] == "i32"

    def valid(n: int):
        logits, target = logits_and_targets(4, 64, BF16, "meta", 0)
        return cross_entropy.gradient_launch(logits, target, torch.empty(4), torch.empty(4), 1.0, n).signature()

    assert valid(1) == valid(32) == valid(33)


def test_offsets_are_64_bits_wide():
    """A row's or a block's place is multiplied out in 64 bits: logits and weights pass 2^31 elements."""
    for entry in distinct():
        assert re.search(r"arith\.muli .* : i64", compile(entry, 90).ir), entry.name


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_what_torch_compile_launches_has_nothing_to_contract(arch):
    """It drops the option that forbids contraction: as many additions and fused multiply-adds with it as without it."""
    def sums(entry: Entry, fusion: bool) -> Counter:
        made = entry.launch(**entry.inputs("meta")).compile(arch, fusion)
        return Counter(word for line in made.instructions for word in re.findall(r"\bF(?:ADD|FMA)2?\b", line))

    for entry in (e for e in distinct() if e.function is swiglu.backward):
        pinned = sums(entry, fusion=False)
        assert {word[:4] for word in pinned} == {"FADD", "FFMA"}
        assert sums(entry, fusion=True) == pinned, entry.name


def test_a_maximum_keeps_nan():
    """The interpreter keeps it whatever the kernel says; an instruction without .NaN would drop it."""
    for entry in distinct():
        maxima = re.findall(r"\bmax\.\S*f32", compile(entry, 90).ptx)
        assert set(maxima) <= {"max.NaN.f32"}
        assert bool(maxima) == (entry.function is cross_entropy.statistics)


def test_the_interpreter_equals_the_references():
    assert interpreted(kernel_checks) == f"{len(SHAPES)} shapes, {len(WEIGHTS)} weights, {len(GATES)} gates\n"


# the references themselves


def test_the_reference_is_the_log_softmax_and_its_gradient():
    logits, target = logits_and_targets(9, 50, torch.float64, "cpu", 3)
    target %= 40
    logits.requires_grad_()
    want = torch.nn.functional.cross_entropy(logits[:, :40], target, reduction="sum")
    want.backward()
    with torch.no_grad():
        peak, total, picked = reference.cross_entropy_statistics(logits, target, 40)
        assert (total.log() + peak - picked).sum().item() == pytest.approx(want.item(), rel=1e-14)
        gradient = logits.clone()
        reference.cross_entropy_gradient(gradient, target, peak, total, 1.0, 40)
    torch.testing.assert_close(gradient, logits.grad, rtol=1e-12, atol=1e-15)


def test_statistics_of_shards_combine_to_the_whole():
    logits, target = logits_and_targets(8, 96, torch.float64, "cpu", 4)
    target = target.clamp(0, 95)
    whole = reference.cross_entropy_statistics(logits, target, 60)
    parts = [reference.cross_entropy_statistics(logits[:, lo:lo + 32], target - lo, min(32, max(0, 60 - lo))) for lo in (0, 32, 64)]
    peak = torch.stack([p[0] for p in parts]).amax(0)
    total = sum(p[1] * torch.exp(p[0] - peak) for p in parts)
    assert torch.equal(peak, whole[0]) and torch.equal(sum(p[2] for p in parts), whole[2])
    close(total, whole[1], 1e-14)
    assert not parts[2][1].any(), "a rank of padding alone holds no mass"


def test_swiglu_is_silu_times_up_and_its_gradient():
    given = swiglu_inputs(3, 7, torch.float64, "cpu", 5)
    gu = given["gu"].requires_grad_()
    g, u = gu.chunk(2, dim=-1)
    want = torch.nn.functional.silu(g) * u
    assert torch.equal(swiglu.swiglu(gu), want)
    (gradient,) = torch.autograd.grad(want, gu, given["dz"])
    torch.testing.assert_close(reference.swiglu_backward(gu.detach(), given["dz"]), gradient, rtol=1e-12, atol=1e-14)
    assert torch.autograd.gradcheck(swiglu.swiglu, gu)
    assert torch.autograd.gradcheck(swiglu.swiglu, torch.randn(2, 3, 2, dtype=torch.float64, requires_grad=True))


def test_swiglu_of_a_strided_gradient():
    """A gradient that autograd expands or transposes on the way back is no contiguous tensor."""
    gu = swiglu_inputs(4, 6, FLOAT32, "cpu", 1)["gu"].requires_grad_()
    swiglu.swiglu(gu).sum().backward()
    want = reference.swiglu_backward(gu.detach(), torch.ones(4, 6))
    assert torch.equal(gu.grad, want)


def rows(*shape: int, dtype: torch.dtype = FLOAT32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize("call, words", [
    (lambda: cross_entropy.statistics(rows(2, 8, dtype=torch.float64), rows(2, dtype=torch.int64), 8), "logits are torch.float64"),
    (lambda: cross_entropy.statistics(rows(8, 2).t(), rows(2, dtype=torch.int64), 8), r"logits \(2, 8\) with strides \(1, 2\)"),
    (lambda: cross_entropy.statistics(rows(2, 8), rows(2, dtype=torch.int32), 8), "target is torch.int32, expected int64"),
    (lambda: cross_entropy.statistics(rows(2, 8), rows(3, dtype=torch.int64), 8), r"target \(3,\) does not fit logits \(2, 8\)"),
    (lambda: cross_entropy.gradient(rows(2, 8), rows(2, dtype=torch.int64), rows(2), rows(1), 1.0, 8), r"total \(1,\)"),
    (lambda: adamw.step(**step_inputs((4, 4), FLOAT32, torch.float64, "cpu", 0)), "exp_avg is torch.float64"),
    (lambda: adamw.step(**step_inputs((4, 4), FLOAT32, FLOAT32, "cpu", 0) | {"grad": rows(4, 5)}), r"grad \(4, 5\)"),
    (lambda: adamw.step(**step_inputs((4, 5), FLOAT32, FLOAT32, "cpu", 0) | {"grad": rows(5, 4).t()}), "grad .* no contiguous"),
    (lambda: adamw.step(**step_inputs((4, 4), FLOAT32, FLOAT32, "cpu", 0) | {"clip": rows(2)}), "clip is torch.float32"),
    (lambda: adamw.step(**step_inputs((4, 4), FLOAT32, FLOAT32, "cpu", 0) | {"step": 0}), "step 0: steps count from 1"),
    (lambda: swiglu.backward(rows(2, 8), rows(2, 8)), r"swiglu: \(2, 8\) and its gradient \(2, 8\)"),
    (lambda: swiglu.backward(rows(8, 2).t(), rows(2, 4)), r"swiglu: \(2, 8\) and its gradient \(2, 4\)")])
def test_what_does_not_fit_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_nothing_to_do_is_done():
    empty = cross_entropy.statistics(rows(0, 8), rows(0, dtype=torch.int64), 8)
    assert [x.shape for x in empty] == [(0,)] * 3
    cross_entropy.gradient(rows(0, 8), rows(0, dtype=torch.int64), rows(0), rows(0), 1.0, 8)
    adamw.step(**step_inputs((0, 4), FLOAT32, FLOAT32, "cpu", 0))
    assert swiglu.backward(rows(0, 8), rows(0, 4)).shape == (0, 8)
    assert swiglu.backward(rows(3, 0), rows(3, 0)).shape == (3, 0)


# on a GPU


@pytest.fixture
def poison():
    """Memory that a kernel was to write and did not is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


WIDE = [(17, 4096, 4096), (5, 12288, 12288), (9, 50304, 50257), (3, 151936, 151936), (4, 5003, 4999), (6, 8192, 0), (2, 4112, 1)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
@pytest.mark.parametrize("shape", SHAPES + WIDE)
def test_cross_entropy_on_a_device(poison, dtype, shape):
    assert check_statistics("cuda", dtype, *shape)
    assert check_gradient("cuda", dtype, *shape)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
def test_nonfinite_logits_on_a_device(poison, dtype):
    assert check_nonfinite("cuda", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("dtype, states", [(BF16, BF16), (FLOAT32, FLOAT32), (BF16, FLOAT32)])
@pytest.mark.parametrize("shape", [(64, 1024), (37, 41), (5000,)])
def test_adamw_on_a_device(poison, dtype, states, shape, clip):
    assert check_step("cuda", shape, dtype, states, clip)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
@pytest.mark.parametrize("shape", [*GATES, (17, 4864), (3, 1025), (5, 18944)])
def test_swiglu_on_a_device(poison, dtype, shape):
    assert check_swiglu("cuda", dtype, *shape)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
def test_nonfinite_gates_on_a_device(poison, dtype):
    assert check_swiglu_nonfinite("cuda", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
def test_passes_around_the_bottleneck_on_a_gpu(dtype):
    for shape in [*ROWS, (64, 3072), (33, 1003)]:
        assert check_bottleneck("cuda", dtype, *shape)
    assert check_bottleneck_nonfinite("cuda", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FLOAT32])
def test_swiglu_compiled_gives_the_same_bits(dtype):
    given = swiglu_inputs(33, 4864, dtype, "cuda", 2)
    gradients = []
    for function in (swiglu.swiglu, torch.compile(swiglu.swiglu, fullgraph=True)):
        gu = given["gu"].clone().requires_grad_()
        function(gu).backward(given["dz"])
        gradients.append(gu.grad)
    assert torch.equal(*gradients)


@pytest.mark.gpu
def test_cross_entropy_reaches_past_2_to_the_31_elements():
    width, tokens = 1 << 17, (1 << 14) + 2
    logits = torch.zeros(tokens, width, dtype=BF16, device="cuda")
    target = torch.full((tokens,), 5, device="cuda")
    logits[-1, 5] = 3.0
    peak, total, picked = cross_entropy.statistics(logits, target, width)
    assert peak[-1].item() == picked[-1].item() == 3.0 and bool((total[:-1] == width).all())
    cross_entropy.gradient(logits, target, peak, total, 1.0, width)
    assert bool((logits[:-1, 5] == -1.0).all()) and bool((logits[:-1, 6:] == 2**-17).all())


@pytest.mark.gpu
def test_adamw_reaches_past_2_to_the_31_elements():
    given = {name: torch.full((2**31 + 5000,), value, dtype=BF16, device="cuda")
             for name, value in [("param", 1.0), ("grad", 0.5), ("exp_avg", 0.0), ("exp_avg_sq", 0.0)]}
    numbers = {"lr": 0.25, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "decay": 0.0, "step": 1}
    adamw.step(**given, **numbers)
    assert bool((given["param"] == 0.75).all())


@pytest.mark.gpu
@pytest.mark.parametrize("entry", [e for e in ENTRIES if "embed" not in e.name], ids=lambda e: e.name)
def test_the_launcher_compiles_what_is_compiled_without_a_gpu(entry):
    launch = entry.launch(**entry.inputs("cuda"))
    major, minor = torch.cuda.get_device_capability()
    arch = 10 * major + minor
    made = launch.kernel[launch.grid](**launch.arguments, **launch.constants_at(arch), num_warps=launch.warps,
                                      enable_fp_fusion=False)
    want = compile(entry, arch)
    assert (made.n_regs, made.n_spills, made.metadata.shared) == (want.registers, 0, want.shared)
    assert code_of(made.asm["ptx"]) == code_of(want.ptx)


def code_of(ptx: str) -> list[str]:
    """Without the source lines, which torch.compile turns off in a process that used it."""
    kept = (line for line in ptx.partition("\t.section")[0].splitlines() if line.strip() and not line.strip().startswith("//"))
    return [line for line in kept if not re.match(r"\s*(\.loc|\.file|\$L__\w+:|\.target|\.version)", line)]
