"""What this machine reaches, measured: copy bandwidth, bf16 products and all-reduce. Used by doctor and by records.

    copy_bandwidth          GB/s     bytes read and written / time of a device-to-device (or memory-to-memory) copy
    gemm_bf16               TFLOP/s  2·n³ / time of an n x n x n product of random normal data (zeros would draw less power and
                                     clock higher)
    all_reduce_<n>MiB       GB/s     payload bytes / time (algorithm bandwidth; with two ranks equal to the bus bandwidth)

GB is 1e9 bytes, MiB 2**20. Each is the median over repeats after a warm-up, with q20, q80 and n.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from suite.measure.clock import StepClock, metric_from
from suite.record import Metric

MIB = 2**20
COPY_BYTES = {"cuda": 1024 * MIB, "cpu": 32 * MIB}
GEMM_SIZE = {"cuda": 8192, "cpu": 256}


def calibrate(device: torch.device | str) -> list[Metric]:
    """Copy bandwidth and product speed of one device. Takes about a second."""
    return [copy_bandwidth(device), gemm(device)]


def copy_bandwidth(device: torch.device | str, nbytes: int | None = None, repeats: int = 10) -> Metric:
    device = torch.device(device)
    nbytes = nbytes or COPY_BYTES.get(device.type, COPY_BYTES["cpu"])
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    times = seconds(lambda: target.copy_(source), device, repeats)
    return metric_from([2 * nbytes / t / 1e9 for t in times], "copy_bandwidth", "GB/s")


def gemm(device: torch.device | str, size: int | None = None, repeats: int = 10) -> Metric:
    device = torch.device(device)
    size = size or GEMM_SIZE.get(device.type, GEMM_SIZE["cpu"])
    draw = torch.Generator(device=device).manual_seed(0)
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16, generator=draw) for _ in range(2))
    out = torch.empty(size, size, device=device, dtype=torch.bfloat16)
    times = seconds(lambda: torch.mm(a, b, out=out), device, repeats)
    return metric_from([2 * size**3 / t / 1e12 for t in times], "gemm_bf16", "TFLOP/s")


def all_reduce(reduce: Callable[[Tensor], object], device: torch.device | str, mib: Sequence[int] = (1, 16, 256),
               dtype: torch.dtype = torch.bfloat16, repeats: int = 10, barrier: Callable[[], None] | None = None) -> list[Metric]:
    """Every rank calls it. `reduce` sums a tensor over the group in place and returns when the result may be used (on a GPU:
    in stream order). Zeros are sent: they stay finite over any number of sums, and wires do not compress."""
    device = torch.device(device)
    found = []
    for size in mib:
        x = torch.zeros(size * MIB // dtype.itemsize, dtype=dtype, device=device)
        times = seconds(lambda x=x: reduce(x), device, repeats, barrier)
        found.append(metric_from([size * MIB / t / 1e9 for t in times], f"all_reduce_{size}MiB", "GB/s"))
    return found


def seconds(run: Callable[[], object], device: torch.device, repeats: int,
            barrier: Callable[[], None] | None = None) -> list[float]:
    """Times of `repeats` runs after three that are not counted."""
    for _ in range(3):
        run()
    clock = StepClock(device, barrier)
    clock.start()
    for _ in range(repeats):
        run()
        clock.mark()
    return clock.stop()
