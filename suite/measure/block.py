"""One layer and its pieces timed: where the time of a layout goes. A `measure: block` case, forward unless said otherwise.

One layer of the model is built as the case says, with the residual stream of one micro-batch. All runs take turns in `steps`
repeats, as those of suite.measure.collective. A layer runs CHAIN times in a row, so that the device never waits for the host.

    block_ms                     ms   the layer                block_train_ms: forward and backward
    block_comm_ms                ms   its messages alone, one after the other; block_comm_backward_ms: those of the gradients
    block_compute_ms             ms   the layer with messages that come back at once
    block_payload, block_payload_backward    MiB  of those messages (counted)
    norm_ms                      ms   one norm with its message; under a norm that is applied behind a product, also that pass
    gemm_hfu_attn, gemm_hfu_mlp  %    products of one map d -> d and one d -> f, on this rank's shapes, over the dense peak
                                      (boost.md's E4); gemm_ms_attn, gemm_ms_mlp: their time
    <pass>_gb_per_s, <pass>_share     bandwidth of each pass around the bottleneck, and % of what a copy that reads and writes as
                                      many bytes reaches beside it; on rank 0 while the others wait
"""
from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from suite.assemble import assemble
from suite.case import Case
from suite.comm.wire import Wire
from suite.measure import flops
from suite.measure.collective import timed
from suite.measure.quantile import metric_from
from suite.mesh import Mesh
from suite.model import maps
from suite.record import Metric
from suite.workload import models

CHAIN = 4
VOCAB = 256
MIB = 2**20
PAIRS = {"attn": ("attention", "q"), "mlp": ("ffn", "up")}
PASSES = ("scale", "epilogue", "epilogue_backward")


def study(case: Case, mesh: Mesh, outcome: Any) -> None:
    """Fills metrics and phases of the outcome. Every rank calls it."""
    began = time.perf_counter()
    card = {**models()[case.model], "layers": 1}
    made = assemble(case, mesh, VOCAB, card)
    model, wire, layout = made.model, made.tp, made.model.layout
    draw = torch.Generator(device=mesh.device).manual_seed(case.seed)
    ids = torch.randint(0, VOCAB, (case.micro, case.data.seq), generator=draw, device=mesh.device)
    with torch.no_grad():
        x = layout.embed(model.ends, ids)
    x.requires_grad_()

    def forward() -> Tensor:
        return model.run(model.blocks[0], x, 0, {})[0]

    def train() -> None:
        forward().backward(gradient)
        for leaf in (x, *model.weights.leaves.values()):
            leaf.grad = None

    gradient = torch.ones_like(x) / x.numel()
    sent = _captured(wire, train)
    muted = Mute(wire)
    norm = torch.compile(layout.norm_alone, fullgraph=True) if case.compile else layout.norm_alone
    runs: dict[str, Callable[[], object]] = {
        "block": lambda: [forward() for _ in range(CHAIN)].clear(),
        "block_train": lambda: [train() for _ in range(CHAIN)],
        "block_compute": lambda: muted.during(lambda: [forward() for _ in range(CHAIN)].clear()),
        "block_comm": _replay(wire, [one for one in sent if one["way"] == "forward"], mesh.device),
        "block_comm_backward": _replay(wire, [one for one in sent if one["way"] == "backward"], mesh.device),
        "norm": torch.no_grad()(lambda: norm(model.blocks[0], x)),
    }
    work = {name: _pair(layout, card, *where, case.micro * case.data.seq, mesh.device) for name, where in PAIRS.items()}
    runs |= {f"gemm_{name}": run for name, (run, _) in work.items()}
    outcome.phases["setup"] = time.perf_counter() - began
    began = time.perf_counter()
    times = timed(runs, mesh.device, case.steps, wire.barrier)
    chained = ("block", "block_train", "block_compute")
    outcome.metrics += [metric_from([1e3 * t / (CHAIN if name in chained else 1) for t in times[name]], f"{name}_ms", "ms")
                        for name in runs if not name.startswith("gemm")]
    for name, way in (("block_payload", "forward"), ("block_payload_backward", "backward")):
        size = sum(one["bytes"] for one in sent if one["way"] == way)
        outcome.metrics.append(Metric(name, size / MIB, "MiB", "counted"))
    for name, (_, count) in work.items():
        outcome.metrics.append(metric_from([1e3 * t for t in times[f"gemm_{name}"]], f"gemm_ms_{name}", "ms"))
        outcome.metrics.append(_hfu(count, times[f"gemm_{name}"], name, case, mesh.device))
    if mesh.rank == 0:
        outcome.metrics += passes(layout, case.micro * case.data.seq, mesh.device, case.steps)
    wire.barrier()
    outcome.phases["timed"] = time.perf_counter() - began


def _captured(wire: Wire, step: Callable[[], object]) -> list[dict[str, Any]]:
    """What the wire is asked to send during a step, in order."""
    sent, run = [], wire.run

    def watch(op: str, x: Tensor, **rest: Any) -> Any:
        exact, rest = rest.get("exact"), {name: rest[name] for name in ("dim", "site", "way", "purpose") if name in rest}
        size = x.nbytes * (wire.size if op == "all_gather" else 1) + (0 if exact is None else exact.nbytes)
        sent.append({"op": op, "shape": x.shape, "dtype": x.dtype, "exact": None if exact is None else (exact.shape, exact.dtype),
                     "bytes": size, "way": rest.get("way", "forward"), "rest": rest})
        return run(op, x, exact=exact, **rest)

    wire.run = watch
    try:
        step()
    finally:
        del wire.run
    return sent


def _replay(wire: Wire, sent: list[dict[str, Any]], device: torch.device) -> Callable[[], object]:
    """The messages by themselves, each of a tensor of ones."""
    given = [(one["op"], torch.ones(one["shape"], dtype=one["dtype"], device=device),
              None if one["exact"] is None else torch.ones(one["exact"][0], dtype=one["exact"][1], device=device), one["rest"])
             for one in sent]
    return lambda: [wire.run(op, x, exact=exact, **rest) for op, x, exact, rest in given].clear()


class Mute:
    """A wire whose messages come back at once, with this rank's values: what is left of a layer is computation."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire

    def during(self, step: Callable[[], object]) -> None:
        self.wire.run = self.run
        try:
            step()
        finally:
            del self.wire.run

    def run(self, op: str, x: Tensor, dim: int = 0, exact: Tensor | None = None, owned: bool = False,
            **rest: Any) -> tuple[Tensor, Tensor | None]:
        if op == "all_gather":
            x = torch.cat([x] * self.wire.size, dim)
        elif op == "reduce_scatter":
            x = x.chunk(self.wire.size, dim)[0].clone(memory_format=torch.contiguous_format)
        elif not owned:
            x = x.clone(memory_format=torch.contiguous_format)
        return x, None if exact is None else exact.to(torch.promote_types(exact.dtype, torch.float32), copy=True)


def _pair(layout: Any, card: dict[str, Any], sub: str, name: str, tokens: int,
          device: torch.device) -> tuple[Callable[[], object], int]:
    """(the products of one map on this rank's shapes, each of an input of its own; their FLOPs)."""
    d_in, d_out, _ = maps(card)[sub][name]
    operands, work = [], 0
    for matrix, shape in layout.factor.shapes((0, f"{sub}.{name}"), d_in, d_out).items():
        local, spec = list(shape), layout.spec(f"layers.0.{sub}.{name}.{matrix}", shape)
        if spec.dim is not None:
            local[spec.dim] = spec.span(shape, layout.tp.index, layout.tp.size)[1]
        operands.append([torch.randn(n, local[1], device=device).to(layout.precision.compute) for n in (tokens, local[0])])
        work += 2 * tokens * local[0] * local[1]
    return torch.no_grad()(lambda: [F.linear(x, w) for x, w in operands].clear()), work


def _hfu(work: int, seconds: list[float], name: str, case: Case, device: torch.device) -> Metric:
    shares = []
    for t in seconds:
        share = next(m for m in flops.utilization(work / t / 1e12, 1.0, device, case.precision.name) if m.name == "hfu")
        if share.value is None:
            return Metric(f"gemm_hfu_{name}", None, "%", reason=share.reason)
        shares.append(share.value)
    return metric_from(shares, f"gemm_hfu_{name}", "%")


def passes(layout: Any, tokens: int, device: torch.device, repeats: int) -> list[Metric]:
    """Bandwidth of the layout's own passes over memory, each beside a copy of as many bytes."""
    own = layout.passes(tokens, device) if hasattr(layout, "passes") else {}
    runs: dict[str, Callable[[], object]] = {}
    for name, (run, moved) in own.items():
        source, target = (torch.empty(moved // 2, dtype=torch.uint8, device=device) for _ in range(2))
        runs |= {name: run, f"{name} copy": lambda source=source, target=target: target.copy_(source)}
    times = timed(runs, device, repeats) if runs else {}
    found = []
    for name in PASSES:
        if name not in own:
            why = "the layout has no pass of its own around a bottleneck"
            found += [Metric(f"{name}_gb_per_s", None, "GB/s", reason=why), Metric(f"{name}_share", None, "%", reason=why)]
            continue
        found.append(metric_from([own[name][1] / t / 1e9 for t in times[name]], f"{name}_gb_per_s", "GB/s"))
        found.append(metric_from([100 * c / t for t, c in zip(times[name], times[f"{name} copy"])], f"{name}_share", "%"))
    return found
