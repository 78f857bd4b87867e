"""pytest-benchmark over the registry: `pytest --benchmark-only`. Files are compared by `triaxis gate compare OLD NEW`.

On a GPU each kernel, with device time in `extra_info`; without one the plain-torch references that move at most 4 MiB.
"""
from __future__ import annotations

import pytest
import torch

from kernels.registry import ENTRIES
from suite.gate.worker import Bench

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LARGEST = 4 << 20  # bytes, on a CPU
TOLERANCE = {"cpu": 0.05, "cuda": 0.02}
SAMPLES = 20


@pytest.mark.parametrize("entry", [e for e in ENTRIES if DEVICE == "cuda" or e.traffic <= LARGEST], ids=lambda e: e.name)
def test_kernel(entry, benchmark, request):
    timed = request.config.getoption("benchmark_only")  # else it is checked and called once
    gpu = DEVICE == "cuda"
    bench = Bench(entry.function if gpu else entry.reference, entry.make, DEVICE, entry.reference if gpu else None)
    assert (fault := bench.check()) is None, fault
    junk = torch.empty((256 << 20) if gpu else (8 << 20), dtype=torch.uint8, device=DEVICE)
    benchmark.extra_info |= {"kernel": entry.name, "tolerance": TOLERANCE[DEVICE], "traffic": entry.traffic}
    if gpu and timed:
        def sample() -> float:
            junk.zero_()
            return bench.seconds(1)

        benchmark.extra_info["device_seconds"] = [sample() for _ in range(SAMPLES)]

    def flush() -> None:
        junk.zero_()

    benchmark.pedantic(bench.call, setup=flush, rounds=SAMPLES if timed else 1, warmup_rounds=1 if timed else 0)
