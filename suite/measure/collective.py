"""One collective timed: the case's codec against the plain bf16 all-reduce, and the codec against a copy, in the same call.

A `measure: collective` case sends one message of [data.batch x data.seq, hidden of the model] bf16 values, n of them, `steps`
times. All runs take turns, one after the other in each repeat, so that what disturbs the machine disturbs all of them; each
starts with a barrier and, on a GPU, with the L2 cache overwritten and a message of one number, so that no device waits for
another; all are warmed up before. The sum is checked first.

    all_reduce_gb_per_s       GB/s  2n bytes over the time of the all-reduce with the case's codec, whatever crosses
    all_reduce_bf16_gb_per_s, all_reduce_fp32_gb_per_s     the library's own, in place as ours, the same n values
    all_reduce_speedup        x     time of bf16's over the codec's, repeat by repeat
    all_reduce_host_us, all_reduce_bf16_host_us     us   that the host takes to queue it; on the CPU that is all of it
    ceiling_one_shot, ceiling_two_shot     x     the same of the codec's bytes moved without any codec: an all-gather of whole
                                           tensors; an exchange of shares (Transport.all_to_all) and an all-gather of them
    reduce_scatter_speedup, all_gather_speedup     x     the same of the two halves, as sequence parallelism sends them: along the
                                           tokens, of the message and of a rank's share of it
    all_reduce_error          %     relative L2 error of the sum on the first values
    codec_gb_per_s            GB/s  bytes read and written by encode and decode over their times
    encode_gb_per_s, decode_gb_per_s, reduce_n<N>_gb_per_s (N stripes of n / N values decoded, added, encoded again)
    copy_gb_per_s             GB/s  of a copy of the message, read and written; <step>_share: % of it that each of them reaches

Codec steps are timed on rank 0 while the others wait: ranks may share a GPU. A native codec has none; its rows say so.
"""
from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from suite.case import Case
from suite.comm.counter import Counter
from suite.comm.transport import Transport
from suite.comm.wire import Wire
from suite.measure.quantile import metric_from, quantiles
from suite.measure.turns import timed
from suite.mesh import Mesh
from suite.record import CaseFailed, Metric
from suite.seams import Codec, Key, make
from suite.workload import models

CHECKED = 2**18  # values of the sum that are compared
WRONG = 50.0  # % error of a sum that is no sum
STRIPES = (2, 4, 8)
NONE = "a native codec has no codes"
SHARES = "ranks have no equal shares of its tokens"
HALVES = "a native codec's halves are not timed"


def study(case: Case, mesh: Mesh, outcome: Any) -> None:
    """Fills metrics, traffic and phases of the outcome. Every rank calls it."""
    began = time.perf_counter()
    group, counter = mesh.group("tp"), Counter()
    codec = make("comm", case.comm.tp.forward)
    wire = Wire("tp", group, {"forward": codec, "backward": codec}, counter)
    transport = Transport(group, Counter())
    tokens, hidden = case.data.batch * case.data.seq, models()[case.model]["hidden"]
    draw = torch.Generator(device=mesh.device).manual_seed(1000 * case.seed + mesh.rank)
    x = torch.randn(tokens, hidden, generator=draw, device=mesh.device, dtype=torch.bfloat16)
    total = wire.run("all_reduce", x.clone(), owned=True)[0]  # in place, as it is timed
    outcome.metrics.append(_checked(x, total, transport))
    counter.reset()
    wire.run("all_reduce", x)
    outcome.traffic = counter.snapshot()
    outcome.phases["setup"] = time.perf_counter() - began
    began = time.perf_counter()
    outcome.metrics.append(Metric("message_bytes", float(x.nbytes), "B", "counted"))
    outcome.metrics += _collectives(x, codec, wire, transport, case.steps)
    outcome.facts["paths"] = wire.choices.rows()
    outcome.phases["timed"] = time.perf_counter() - began
    began = time.perf_counter()
    if mesh.rank == 0:
        outcome.metrics += codec_speed(codec, x, case.steps)
    transport.barrier()
    outcome.phases["codec"] = time.perf_counter() - began


def _checked(x: Tensor, total: Tensor, transport: Transport) -> Metric:
    """Error of the sum. Raises CaseFailed where it is none: a wrong result is not timed."""
    ends = torch.cat([x.flatten()[:CHECKED // 2], x.flatten()[-CHECKED // 2:]])
    exact = transport.all_gather(ends).wait().double().sum(0)
    ours = torch.cat([total.flatten()[:CHECKED // 2], total.flatten()[-CHECKED // 2:]]).double()
    error = (100 * (ours - exact).norm() / exact.norm()).item()
    if not error < WRONG:
        raise CaseFailed(f"all-reduce: the sum is {error:.3g} % off: not timed")
    return Metric("all_reduce_error", error, "%", n=len(exact))


def _collectives(x: Tensor, codec: Codec, wire: Wire, transport: Transport, repeats: int) -> list[Metric]:
    buffers = {dtype: x.to(dtype, copy=True) for dtype in (torch.bfloat16, torch.float32)}
    mine = x.clone()
    runs: dict[str, Callable[[], object]] = {
        "bf16": lambda: transport.all_reduce(buffers[torch.bfloat16]).wait(),
        "fp32": lambda: transport.all_reduce(buffers[torch.float32]).wait(),
    }
    if codec.native is None:
        share = -(-x.numel() // transport.size)
        group = getattr(codec, "group", 1)
        rows = torch.zeros(transport.size, codec.nbytes(-(-share // group) * group), dtype=torch.uint8, device=x.device)
        whole = rows.flatten()
        runs |= {
            "codec": lambda: wire.run("all_reduce", mine, owned=True)[0],
            "one_shot": lambda: transport.all_gather(whole).wait(),
            "two_shot": lambda: (transport.all_to_all(rows).wait(), transport.all_gather(rows[0]).wait()),
        }
        if len(x) % transport.size == 0:
            parts = x.unflatten(0, (transport.size, -1))
            runs |= {
                "reduce_scatter_bf16": lambda: transport.reduce_scatter(parts).wait(),
                "reduce_scatter": lambda: wire.run("reduce_scatter", x)[0],
                "all_gather_bf16": lambda: transport.all_gather(parts[0]).wait(),
                "all_gather": lambda: wire.run("all_gather", parts[0])[0],
            }
    elif codec.native not in buffers:
        runs["codec"] = lambda: wire.run("all_reduce", mine, owned=True)[0]

    def fresh() -> None:  # sums in place would grow without end
        for buffer in (*buffers.values(), mine):
            buffer.copy_(x)

    one, host = torch.ones(1, device=x.device), {}
    times = timed(runs, x.device, repeats, transport.barrier, fresh, lambda: transport.all_reduce(one, "max").wait(), host)
    name_of_ours = "codec" if "codec" in times else "bf16" if codec.native == torch.bfloat16 else "fp32"
    ours = times[name_of_ours]
    found = [metric_from([x.numel() * 2 / t / 1e9 for t in taken], name, "GB/s")
             for name, taken in (("all_reduce_gb_per_s", ours), ("all_reduce_bf16_gb_per_s", times["bf16"]),
                                 ("all_reduce_fp32_gb_per_s", times["fp32"]))]
    found.append(metric_from([b / t for b, t in zip(times["bf16"], ours)], "all_reduce_speedup", "x"))
    found += [metric_from([1e6 * t for t in host[run]], name, "us") for name, run in (
        ("all_reduce_host_us", name_of_ours), ("all_reduce_bf16_host_us", "bf16"))]
    why = {"reduce_scatter_speedup": HALVES, "all_gather_speedup": HALVES} if codec.native is not None else {}
    for name, base, timed_as in (("reduce_scatter_speedup", "reduce_scatter_bf16", "reduce_scatter"),
                                 ("all_gather_speedup", "all_gather_bf16", "all_gather"),
                                 ("ceiling_one_shot", "bf16", "one_shot"), ("ceiling_two_shot", "bf16", "two_shot")):
        found.append(metric_from([b / t for b, t in zip(times[base], times[timed_as])], name, "x") if timed_as in times
                     else Metric(name, None, "x", reason=why.get(name, NONE if codec.native is not None else SHARES)))
    return found


def codec_speed(codec: Codec, x: Tensor, repeats: int) -> list[Metric]:
    """Bandwidth of a codec's steps beside a copy, on this process alone."""
    steps = ("codec", "encode", "decode", *(f"reduce_n{n}" for n in STRIPES))
    if codec.native is not None:
        return [Metric(f"{step}_gb_per_s", None, "GB/s", reason=NONE) for step in steps]
    group = getattr(codec, "group", 1)
    n = x.numel() // (group * max(STRIPES)) * group * max(STRIPES)  # whole groups in every stripe
    if n == 0:
        return [Metric(f"{step}_gb_per_s", None, "GB/s", reason="a message of too few groups") for step in steps]
    source = x.flatten()[:n]
    wire = torch.empty(codec.nbytes(n), dtype=torch.uint8, device=x.device)
    target = torch.empty_like(source)
    runs: dict[str, Callable[[], object]] = {
        "copy": lambda: target.copy_(source),
        "encode": lambda: codec.encode(source, wire, Key()),
        "decode": lambda: codec.decode(wire, target),
    }
    moved = {"copy": 2 * source.nbytes, "encode": source.nbytes + wire.numel(), "decode": wire.numel() + target.nbytes}
    for count in STRIPES:
        rows = torch.empty(count, codec.nbytes(n // count), dtype=torch.uint8, device=x.device)
        codec.encode(source.view(count, -1), rows, Key())
        again = torch.empty_like(rows[0])
        runs[f"reduce_n{count}"] = lambda rows=rows, again=again: codec.reencode(rows.unbind(), n // len(rows), again, Key())
        moved[f"reduce_n{count}"] = rows.numel() + again.numel()
    times = timed(runs, x.device, repeats)
    rates = {name: [moved[name] / t / 1e9 for t in taken] for name, taken in times.items()}
    both = [(moved["encode"] + moved["decode"]) / (e + d) / 1e9 for e, d in zip(times["encode"], times["decode"])]
    found = [metric_from(both, "codec_gb_per_s", "GB/s"), *(metric_from(rates[name], f"{name}_gb_per_s", "GB/s") for name in runs)]
    copied = quantiles(rates["copy"])[0]
    found += [metric_from([100 * rate / copied for rate in rates[name]], f"{name}_share", "%") for name in runs if name != "copy"]
    return found
