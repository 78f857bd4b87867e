"""Whole collectives as one kernel: compiled for six architectures here, interpreted here, run on a GPU. What is compared:
exchange_checks.py."""
from __future__ import annotations

import re

import exchange_checks
import pytest
import torch
from exchange_checks import EXCHANGED, check
from interpreter import interpreted
from test_taco_kernels import ARCHITECTURES, SHARED, meta

from kernels import exchange


@pytest.mark.parametrize("arch, sent, received", [*((arch, 1, 1) for arch in ARCHITECTURES), (90, 2, 1), (90, 1, 2)])
def test_an_exchange_compiles_without_spills_and_meets_at_system_scope(arch, sent, received):
    n = 1 << 20
    made = exchange.exchange_launch(meta(sent, n, dtype=torch.bfloat16), meta(received, n, dtype=torch.bfloat16),
                                         *[meta(2, dtype=torch.int64)] * 2, 0).compile(arch)
    assert made.spills == 0 and made.registers <= 255 and made.shared <= SHARED[arch] * 1024
    assert {*re.findall(r"(?:sys\.)(release|acquire)", made.ptx)} == {"release", "acquire"}
    assert not re.search(r"(LDG|STG)\S*\.U8", "\n".join(made.instructions)), "codes must not cross byte by byte"


@pytest.mark.gpu
@pytest.mark.parametrize("options", EXCHANGED, ids=lambda o: "-".join(str(v) for v in o.values()))
def test_an_exchange_on_a_device(options):
    for n in (options["group"] * 8192, 100_003):
        assert check("cuda", torch.bfloat16, n, options)
        assert check("cuda", torch.float32, n, options)


def test_the_interpreter_equals_encode_and_total():
    assert interpreted(exchange_checks) == f"{len(EXCHANGED)} settings\n"


def test_two_passes_are_refused():
    with pytest.raises(ValueError, match="mode coarse takes two passes"):
        exchange.exchange_launch(*[meta(1, 256, dtype=torch.bfloat16)] * 2, *[meta(2, dtype=torch.int64)] * 2, 0, mode="coarse")
