"""Kernels of TACO's competitors: compiled for six architectures, interpreted, run on a GPU. What is compared: grouped_checks.py."""
from __future__ import annotations

import re

import grouped_checks
import pytest
import torch
from grouped_checks import GRID, check, check_close_quotients
from interpreter import interpreted
from test_codecs import codec, gauss
from test_taco_kernels import ARCHITECTURES, SHARED

from kernels import grouped, grouped_reference
from kernels.entry import Entry, compile
from kernels.registry import ENTRIES
from suite.comm import grouped as codecs
from suite.seams import Key

MINE = [e for e in ENTRIES if e.function.__module__ == "kernels.grouped"]
USUAL = [e for e in MINE if "-g128" in e.name and "bf16" in e.name]
NAMES = ["fp8", "int8", "int8-hadamard"]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_kernels_compile_without_spills(arch):
    """In turn; sm_90 has the usual ones too, in the next test."""
    for entry in MINE[ARCHITECTURES.index(arch)::len(ARCHITECTURES)]:
        made = compile(entry, arch)
        assert made.spills == 0 and 16 <= made.registers <= 255 and made.shared <= SHARED[arch] * 1024, (entry.name, made)


def test_wide_accesses_and_tensor_cores():
    for entry in USUAL:
        made = compile(entry, 90)
        assert made.spills == 0, entry.name
        assert ".v4.b32" in "".join(re.findall(r"st\.global\S*", made.ptx)), entry.name
        copies = set(re.findall(r"cp\.async\S+ \[[^]]*\], \[[^]]*\], (0x\w+)", made.ptx))
        assert copies <= {"0x10", "0x8", "0x4"} and copies & {"0x10", "0x8"}, (entry.name, copies)  # 0x4: scales
        assert ("mma" in made.ptx) == ("hadamard" in entry.name and "reduce" not in entry.name), entry.name


def work(entry: Entry) -> float:
    """Instructions of a program for each element of its tile, on sm_90."""
    constants = entry.launch(**entry.inputs("meta")).constants_at(90)
    return 128 * len(compile(entry, 90).instructions) / (constants["ROWS"] * constants["G"])


@pytest.mark.parametrize("entry", [e for e in USUAL if "-n8" not in e.name], ids=lambda e: e.name)
def test_they_work_as_little_as_taco(entry):
    """At most 1.4 times the instructions of TACO's kernel with the same transform."""
    shape = "g128" if "hadamard" in entry.name or "reduce" in entry.name else "g128-hadamard=False"
    name = re.sub(r"grouped(\.\w+/32Mi-bf16)-[^/]*?(-n\d)?$", rf"taco\1-{shape}\2", entry.name)
    (peer,) = (e for e in ENTRIES if e.name == name.replace("None", ""))
    assert work(entry) <= 1.4 * work(peer)


def test_the_interpreter_equals_the_reference():
    assert interpreted(grouped_checks) == "5 settings\n"


@pytest.mark.parametrize("name", NAMES)
def test_the_codec_makes_the_references_bytes(name, monkeypatch):
    """What a GPU runs and what a CPU runs are one codec: through the plain torch of each, with the calls that a GPU gets."""
    c, plain = codec(name), codec(name, fused=False)
    calls = []

    def step(self, device, what):
        def call(*arguments, stripes=None, stripe=None, **options):
            calls.append(what)
            return getattr(grouped_reference, what)(*arguments, group=self.group, format=self.format, **options)
        return call if self.fused else None

    monkeypatch.setattr(codecs.Grouped, "_kernel", step)
    monkeypatch.setattr(codecs, "apart", lambda wires: None)
    x = torch.stack([gauss(384, seed=s) for s in range(3)])
    x[1, 130] = torch.nan
    found = []
    for one in (c, plain):
        wires, again = torch.zeros(3, one.nbytes(384), dtype=torch.uint8), torch.zeros(one.nbytes(384), dtype=torch.uint8)
        out, total = torch.zeros(3, 384), torch.zeros(384)
        one.encode(x, wires, Key())
        one.decode(wires, out)
        one.reduce(wires.unbind(), total)
        one.reencode(wires.unbind(), 384, again, Key())
        found.append((wires, again, out.nan_to_num(7.0), total.nan_to_num(7.0), torch.tensor(one.nonfinite)))
    assert calls == ["encode", "decode", "total", "reduce"]
    assert all(torch.equal(a, b) for a, b in zip(*found)) and found[0][-1] == 2


def test_groups_without_a_kernel_take_plain_torch():
    cuda = torch.device("cuda")
    assert codec("int8")._kernel(cuda, "encode") and not codec("int8", group=48)._kernel(cuda, "encode")
    assert not codec("int8", fused=False)._kernel(cuda, "encode")
    assert not any(codec(name)._kernel(cuda, "encode") for name in ("int8-tensor", "fp8-cast", "tahquant"))
    assert codec("int8", group=48)._kernel(torch.device("cpu"), "encode") is None


@pytest.mark.parametrize("call,words", [
    (lambda: grouped.encode(torch.zeros(128), 48), "group 48: expected a power of two from 32 to 512"),
    (lambda: grouped.encode(torch.zeros(128), format="e5m2"), "format 'e5m2': expected one of e4m3, int8"),
    (lambda: grouped.encode(torch.zeros(128, dtype=torch.int64)), "torch.int64: only floating-point"),
    (lambda: grouped.decode(torch.zeros(131, dtype=torch.uint8)), "131 bytes are no row of groups of 128")])
def test_what_does_not_fit_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.gpu
@pytest.mark.parametrize("options", GRID, ids=lambda o: "-".join(str(v) for v in o.values()))
def test_on_a_device(options):
    for n in (options["group"] * 64, 100_003):
        assert check("cuda", torch.bfloat16, n, options)
        assert check("cuda", torch.float32, n, options)
        assert check("cuda", torch.float32, n, options, False)


@pytest.mark.gpu
def test_close_quotients_on_a_device():
    assert check_close_quotients("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_fused_and_plain_agree_on_a_device(name):
    x = gauss(3, 4096).cuda()
    wires = []
    for fused in (True, False):
        c = codec(name, fused=fused)
        wires.append(torch.zeros(3, c.nbytes(4096), dtype=torch.uint8, device="cuda"))
        c.encode(x, wires[-1], Key())
    off = wires[0][:, :4096].int() - wires[1][:, :4096].int()
    assert (off != 0).sum() <= 12
