"""What it costs to quantise an operand, against a copy of it in the same call.

A `measure: quantize` case makes three operands of the case's precision out of one matrix of [data.batch x data.seq, ffn of the
model] bf16 values, `steps` times each. All runs take turns and start with a cold L2 cache (suite/measure/collective.py).

    <kind>      nearest: the forward's X    back: dY for dX, rotated and rounded by chance where the recipe does so
                transposed: dYᵀ for dW, the same, read down the columns as it lies

    rounded_<kind>_gb_per_s     GB/s  dequantised bf16, in one pass: what level emulated multiplies; 4 bytes an element
    packed_<kind>_gb_per_s      GB/s  codes and scales: what levels slab and native multiply; 2.59 bytes an element
    compiled_<kind>_gb_per_s, eager_<kind>_gb_per_s     the plain-torch reference to the same bf16, compiled and not
    copy_gb_per_s               GB/s  of a copy of the matrix, read and written; <run>_share: % of it that each run reaches
    rounded_<kind>_speedup      x     time of the compiled reference over the kernel's, repeat by repeat

Kernels need a GPU: on a CPU their rows, and those of the compiled reference, say so. What a kernel gives is compared with the
reference first, to the bit, over some rows; what differs is not timed.
"""
from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels import nvfp4_reference
from suite.case import Case
from suite.measure.collective import timed
from suite.measure.quantile import metric_from, quantiles
from suite.mesh import Mesh
from suite.precision.operand import Operand, options
from suite.record import CaseFailed, Metric
from suite.seams import make
from suite.workload import models

KEY, SIGNS = 0x5EED, 0x516E
CHECKED = 256  # rows of an operand that are compared
ABSENT, REFUSED = "kernels need a GPU", "torch.compile fails on the reference"


def study(case: Case, mesh: Mesh, outcome: Any) -> None:
    """Fills metrics and phases of the outcome. Raises CaseFailed where the precision has no NVFP4 operands or a kernel is wrong."""
    began = time.perf_counter()
    six = getattr(make("precision", case.precision), "six", None)
    if six is None or not all(operand.fusible for operand in (six.q1, six.q3, six.q5)):
        raise CaseFailed(f"measure: quantize: precision {case.precision.name} has no NVFP4 operands")
    shape = case.data.batch * case.data.seq, models()[case.model]["ffn"]
    draw = torch.Generator(device=mesh.device).manual_seed(case.seed)
    x = torch.randn(shape, generator=draw, device=mesh.device, dtype=torch.bfloat16)
    runs, absent = {}, []
    for kind, operand, source in (("nearest", six.q1, x), ("back", six.q3, x), ("transposed", six.q5, x.t())):
        mine = ways(operand, source)
        runs |= {f"{way}_{kind}": run for way, run in mine.items() if run is not None}
        absent += [f"{way}_{kind}" for way, run in mine.items() if run is None]
    outcome.phases["setup"] = time.perf_counter() - began
    began = time.perf_counter()
    outcome.metrics += speeds(x, runs, case.steps)
    outcome.metrics += [Metric(f"{name}_gb_per_s", None, "GB/s", reason=REFUSED if x.is_cuda else ABSENT) for name in absent]
    outcome.metrics.append(Metric("elements", float(x.numel()), "1", "counted"))
    outcome.phases["timed"] = time.perf_counter() - began


def ways(operand: Operand, x: Tensor) -> dict[str, Callable[[], object] | None]:
    """Each way to make the operand x [r, k]; None where this device cannot. Raises CaseFailed where kernel and reference differ."""
    given = options(operand, KEY if operand.rounding == "stochastic" else None, SIGNS if operand.hadamard else None)
    reference = partial(nvfp4_reference.nvfp4_rounded, **given)
    found: dict[str, Callable[[], object] | None] = dict.fromkeys(("rounded", "packed", "compiled"))
    if x.is_cuda:
        from kernels import nvfp4

        _checked(operand, x, given, nvfp4)
        found = {"rounded": lambda: nvfp4.rounded(x, **given), "packed": lambda: nvfp4.quantize(x, **given),
                 "compiled": _compiled(reference, x)}
    return found | {"eager": lambda: reference(x)}


def _compiled(reference: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], object] | None:
    """None where torch.compile fails on it: the other ways are timed nevertheless."""
    made = torch.compile(lambda values: reference(values), dynamic=False)
    try:
        made(x)
    except Exception as error:
        warnings.warn(f"quantize: the reference is not compiled: {type(error).__name__}: {error}", stacklevel=2)
        return None
    return lambda: made(x)


def _checked(operand: Operand, x: Tensor, given: dict[str, Any], kernels: Any) -> None:
    peak = {} if operand.outer == 128 else {"peak": nvfp4_reference.largest_magnitude(x, given["signs"])}
    rows = x[:CHECKED]
    want = nvfp4_reference.nvfp4_quantize(rows, **given, **peak)
    got = kernels.quantize(x, **given, **peak)
    values = kernels.rounded(x, **given, **peak)[:CHECKED]
    for name in ("codes", "inner", "outer"):
        ours, theirs = (getattr(q, name)[:CHECKED].contiguous().view(torch.uint8) for q in (got, want))
        if not torch.equal(ours, theirs):
            raise CaseFailed(f"quantize: {name} of the kernel differ from the reference: not timed")
    if not torch.equal(values, want.dequantize(values.dtype)):
        raise CaseFailed("quantize: values of the kernel differ from the reference: not timed")


def speeds(x: Tensor, runs: dict[str, Callable[[], object]], repeats: int) -> list[Metric]:
    """Bandwidths of the runs beside a copy of x, and the kernels' speed-up over the compiled reference."""
    n, target = x.numel(), torch.empty_like(x)
    times = timed({"copy": lambda: target.copy_(x), **runs}, x.device, repeats)
    moved = {name: x.nbytes + (n * 76 / 128 if name.startswith("packed") else 2 * n) for name in times}
    rates = {name: [moved[name] / t / 1e9 for t in taken] for name, taken in times.items()}
    found = [metric_from(taken, f"{name}_gb_per_s", "GB/s") for name, taken in rates.items()]
    copied = quantiles(rates["copy"])[0]
    found += [metric_from([100 * rate / copied for rate in taken], f"{name}_share", "%")
              for name, taken in rates.items() if name != "copy"]
    for kind in ("nearest", "back", "transposed"):
        pair = [times.get(f"{way}_{kind}") for way in ("compiled", "rounded")]
        if all(pair):
            found.append(metric_from([slow / fast for slow, fast in zip(*pair)], f"rounded_{kind}_speedup", "x"))
    return found
