"""Trains one case and measures it: `execute` turns a case into phases, metrics, traffic and a loss curve.

    loss run     deterministic algorithms, every step's loss kept, validation at the end; may share the machine: not timed
    speed run    `WARMUP` steps (compilation, autotuning), then `steps` timed ones synchronised at both ends only, then
                 separate profiled ones for the share of communication
    codec, collective, ab, block    suite/measure/captured.py, collective.py, interleaved.py and block.py

The step itself: suite/trainer.py.
"""
from __future__ import annotations

import contextlib
import gc
import math
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from suite.case import Case
from suite.checkpoint import Checkpoint
from suite.measure import flops
from suite.measure.clock import StepClock, quantiles
from suite.measure.nvml import Sampler, summarise
from suite.measure.profile import communication_share
from suite.measure.study import study
from suite.mesh import Mesh
from suite.record import CaseFailed, Metric, Traffic
from suite.recorded import EAGER
from suite.trainer import Trainer, rate

WARMUP = {"cpu": 2, "cuda": 6}
PROFILED = 2
CHECK = {"cpu": 1, "cuda": 10}  # steps between looks at the loss: a look synchronises


@dataclass
class Outcome:
    """phases in seconds; losses: one row a step; samples: the GPU sampler's file, where there was one."""

    phases: dict[str, float] = field(default_factory=dict)
    metrics: list[Metric] = field(default_factory=list)
    traffic: list[Traffic] = field(default_factory=list)
    losses: list[dict[str, float]] = field(default_factory=list)
    samples: Path | None = None
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # name -> rows of <case>.<name>.csv
    facts: dict[str, Any] = field(default_factory=dict)  # goes to the record's provenance


def execute(case: Case, mesh: Mesh, *, progress: Callable[..., None], folder: Path) -> Outcome:
    """Every rank of the mesh calls it; rank 0's outcome is the record's. progress(step, steps, loss, tokens_per_second).
    Raises CaseFailed with the reason where the run is no result (NaN loss at a step)."""
    outcome = Outcome()
    if case.measure not in ("loss", "speed"):
        with _numerics(case):
            study(case, mesh, outcome, lambda origin: _trained(origin, mesh, progress), lambda variant: Trainer(variant, mesh))
        return outcome
    started = time.perf_counter()
    with _numerics(case) as warned:
        trainer = Trainer(case, mesh)
        checkpoint = Checkpoint(folder / "checkpoints", trainer) if case.save else None
        first, outcome.losses = checkpoint.resume() if checkpoint else (0, [])
        _synchronise(mesh)
        outcome.phases["setup"] = time.perf_counter() - started
        try:
            if case.measure == "loss":
                _loss_run(case, trainer, outcome, progress, first, checkpoint)
            else:
                _speed_run(case, trainer, outcome, progress, folder)
        except CaseFailed as failure:
            raise CaseFailed(f"{failure}{trainer.nonfinite()}") from None
        outcome.facts["deterministic"] = torch.are_deterministic_algorithms_enabled() and not warned
        outcome.facts |= {"nondeterministic": sorted(warned), "data_digest": trainer.digest, "vocab": trainer.vocab}
        if trainer.assembled:
            outcome.metrics.append(Metric("parameters", float(trainer.model.weights.count()), "1", "counted"))
            seen = sum(wire.nonfinite for wire in (trainer.assembled.tp, trainer.assembled.dp))
            outcome.facts["paths"] = trainer.assembled.tp.choices.rows()
            outcome.metrics.append(Metric("nonfinite_groups", float(seen), "1", "counted"))
        outcome.metrics += [Metric(name, value, getattr(part, "units", {}).get(name, "1"))
                            for part in trainer.parts for name, value in sorted(part.metrics().items())]
        del trainer, checkpoint
    gc.collect()
    return outcome


def _trained(case: Case, mesh: Mesh, progress: Callable[..., None]) -> tuple[Any, Callable[[], Any]]:
    """The tensor-parallel wire of a model that was trained as the case says, and one step more of it."""
    trainer = Trainer(case, mesh)
    curve = _Curve(case, mesh, Outcome(), progress, case.steps, case.data.batch * case.data.seq)
    for step in range(case.steps):
        curve.add(step, *trainer.step(step))
    curve.look()
    return trainer.assembled.tp, lambda: trainer.step(case.steps)


def _synchronise(mesh: Mesh) -> None:
    if mesh.device.type == "cuda":
        torch.cuda.synchronize(mesh.device)


@contextlib.contextmanager
def _numerics(case: Case) -> Iterator[set[str]]:
    """Loss runs repeat bit for bit, timed runs take the fastest algorithm; sums of bfloat16 products stay in float32 in both.
    Gives the operations that have no deterministic form and ran all the same."""
    matmul, filled = torch.backends.cuda.matmul, torch.utils.deterministic.fill_uninitialized_memory
    before, warned = matmul.allow_bf16_reduced_precision_reduction, set()
    repeats = case.measure in ("loss", "codec")
    always, attention = torch.is_warn_always_enabled(), torch.backends.cuda.cudnn_sdp_enabled()

    torch.use_deterministic_algorithms(repeats, warn_only=True)
    torch.set_warn_always(repeats)  # else torch warns once a process, and a later case of it would seem to repeat
    torch.backends.cuda.enable_cudnn_sdp(attention and not repeats)  # its backward pass has no deterministic form
    matmul.allow_bf16_reduced_precision_reduction = False
    torch.utils.deterministic.fill_uninitialized_memory = False  # what reads memory that nobody wrote would not repeat: no cover
    try:
        with warnings.catch_warnings():
            ordinary = warnings.showwarning

            def show(message: Any, *rest: Any) -> None:
                if "deterministic" in str(message):
                    warned.add(str(message).split(" ", 1)[0])
                else:
                    ordinary(message, *rest)

            warnings.showwarning = show
            yield warned
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before
        torch.utils.deterministic.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(False)
        torch.set_warn_always(always)
        torch.backends.cuda.enable_cudnn_sdp(attention)


class _Curve:
    """Keeps every step's loss and norm on the device and looks at them every few steps; a look names the first bad step."""

    def __init__(self, case: Case, mesh: Mesh, outcome: Outcome, progress: Callable[..., None], total: int, tokens: int):
        self.case, self.outcome, self.progress, self.total, self.tokens = case, outcome, progress, total, tokens
        self.every = CHECK[mesh.device.type]
        self.pending: list[tuple[int, Tensor, Tensor]] = []
        self.since = time.perf_counter()

    def add(self, step: int, loss: Tensor, norm: Tensor) -> None:
        self.pending.append((step, loss, norm))
        if len(self.pending) >= self.every:
            self.look()

    def look(self) -> None:
        if not self.pending:
            return
        values = torch.stack([torch.stack([loss.double(), norm.double()]) for _, loss, norm in self.pending]).tolist()
        now = time.perf_counter()
        speed = len(values) * self.tokens / max(now - self.since, 1e-9)
        self.since = now
        for (step, _, _), (loss, norm) in zip(self.pending, values):
            for what, value in (("loss", loss), ("gradient norm", norm)):
                if not math.isfinite(value):
                    raise CaseFailed(f"{what} is {value} at step {step}")
            lr = rate(self.case.optim, min(step, self.case.steps - 1), self.case.steps)
            row = {"step": step, "loss": loss, "lr": lr, "grad_norm": norm, "tokens": (step + 1) * self.tokens}
            self.outcome.losses.append(row)
        self.progress(self.pending[-1][0] + 1, self.total, values[-1][0], speed)
        self.pending = []


def _traffic_of(trainer: Trainer, step: Callable[[], Any]) -> tuple[Any, list[Traffic]]:
    """What one training step sends, and its result."""
    if not trainer.assembled:
        return step(), []
    counter = trainer.assembled.counter
    counter.reset()
    result = step()
    rows = counter.snapshot()
    counter.reset()
    return result, rows


def _loss_run(case: Case, trainer: Trainer, outcome: Outcome, progress: Callable[..., None], first: int,
              checkpoint: Checkpoint | None) -> None:
    tokens = case.data.batch * case.data.seq
    curve = _Curve(case, trainer.mesh, outcome, progress, case.steps, tokens)
    began = time.perf_counter()
    for step in range(first, case.steps):
        result, rows = _traffic_of(trainer, lambda step=step: trainer.step(step))
        outcome.traffic = outcome.traffic or rows
        curve.add(step, *result)
        if checkpoint and (step + 1) % case.save == 0 and step + 1 < case.steps:
            curve.look()
            checkpoint.write(step + 1, outcome.losses)
    curve.look()
    outcome.phases["train"] = time.perf_counter() - began
    began = time.perf_counter()
    valid, windows = trainer.validate()
    if not math.isfinite(valid):
        raise CaseFailed(f"validation loss is {valid} after step {case.steps - 1}")
    outcome.phases["validate"] = time.perf_counter() - began
    last = [row["loss"] for row in outcome.losses[-max(1, case.steps // 10):]]
    outcome.metrics += [
        Metric("validation_loss", valid, "nats/token", n=windows),
        Metric("perplexity", math.exp(min(valid, 700.0)), "PPL", n=windows),
        Metric("train_loss", sum(last) / len(last), "nats/token", n=len(last)),
        Metric("tokens_per_second", None, "tokens/s", reason="loss runs are deterministic and may share the machine: not timed"),
    ]
    outcome.metrics += _volume(outcome.traffic, trainer)


def _speed_run(case: Case, trainer: Trainer, outcome: Outcome, progress: Callable[..., None], folder: Path) -> None:
    mesh, device = trainer.mesh, trainer.device
    tokens = case.data.batch * case.data.seq
    warm = 1 if case.steps <= 3 else WARMUP[device.type]  # so few steps are of a slow link, where one compiles all
    warm = max(warm, EAGER + 1) if case.graph else warm
    curve = _Curve(case, mesh, outcome, progress, warm + case.steps, tokens)
    began = time.perf_counter()
    for step in range(warm):
        result, rows = _traffic_of(trainer, lambda step=step: trainer.step(step))
        outcome.traffic = rows
        curve.add(step, *result)
    curve.look()
    outcome.phases["warmup"] = time.perf_counter() - began
    if case.graph and not trainer.replays:
        raise CaseFailed(f"graph: step {warm} of {case.precision.name} is not replayed: it would be timed as the host issues it")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    results = []
    clock = StepClock(device, trainer.barrier)
    with Sampler(folder / "gpu.csv", mesh) as sampler:
        clock.start()
        for step in range(warm, warm + case.steps):
            results.append((step, *trainer.step(step)))
            clock.mark()
        seconds = clock.stop()
    outcome.phases["timed"] = clock.window
    for row in results:
        curve.add(*row)
    curve.look()
    outcome.metrics += _speed(case, trainer, seconds, clock)
    outcome.metrics += summarise(sampler.path, clock.began, clock.ended, sampler.reason)
    outcome.samples = sampler.path
    began = time.perf_counter()
    if mesh.size == 1:
        outcome.metrics.append(Metric("comm_share", 0.0, "%", "counted"))
    else:
        outcome.metrics += communication_share(lambda n: trainer.step(warm + case.steps + n), PROFILED, device)
        outcome.phases["profile"] = time.perf_counter() - began
    outcome.metrics.append(Metric("validation_loss", None, "nats/token", reason="a timed run is too short to be validated"))
    outcome.metrics += _volume(outcome.traffic, trainer)


def _speed(case: Case, trainer: Trainer, seconds: list[float], clock: StepClock) -> list[Metric]:
    """Throughput and what follows from it. All GPUs together for tokens/s, one GPU for TFLOP/s."""
    tokens = case.data.batch * case.data.seq
    median, q20, q80, n = quantiles(seconds)
    devices = case.gpus or case.mesh.ranks
    layout = trainer.model.layout if trainer.assembled else None
    # products that run in other numbers than they stand for have a time, but not the method's
    kind = getattr(layout.precision, "timing", lambda device: "measured")(trainer.device) if layout else "measured"
    found = [
        Metric("step_time", median * 1e3, "ms", kind, n=n, q20=q20 * 1e3, q80=q80 * 1e3),
        Metric("wall_step_time", median * 1e3, "ms", n=n, q20=q20 * 1e3, q80=q80 * 1e3),  # as it ran, whatever it stands for
        Metric("tokens_per_second", tokens / median, "tokens/s", kind, n=n, q20=tokens / q80, q80=tokens / q20),
        Metric("window_tokens_per_second", tokens * n / clock.window, "tokens/s", kind, n=n),
    ]
    model = 3 * flops.forward_flops(trainer.card, tokens, case.data.seq, trainer.vocab, layout.factor if layout else None)
    tflops = model / median / devices / 1e12
    found.append(Metric("model_tflops", tflops, "TFLOP/s per GPU" if trainer.device.type == "cuda" else "TFLOP/s per process", kind,
                        n=n))
    executed = layout.executed_flops(tokens, case.data.seq, trainer.vocab) / model if layout else 1.0
    found += flops.utilization(tflops, executed, trainer.device, case.precision.name)
    peak, why = None, "no GPU"
    if case.graph:
        why = "a graph's memory is its own"
    elif trainer.device.type == "cuda":
        wires = (trainer.assembled.tp, trainer.assembled.dp) if trainer.assembled else ()
        beside = sum(wire.transport.symmetric_bytes for wire in wires)
        peak = (torch.cuda.max_memory_allocated(trainer.device) + beside) / 2**30
    found.append(Metric("peak_memory", peak, "GiB", reason=why if peak is None else None))
    return found


def _volume(rows: list[Traffic], trainer: Trainer) -> list[Metric]:
    """Bytes a rank sends in one training step, from the counter. Ring-equivalent all-reduces make a sum `modelled`."""
    if not trainer.assembled:
        return []
    found = []
    for way in ("forward", "backward", "step"):
        mine = [row for row in rows if row.way == way]
        kind = "modelled" if any(row.kind == "modelled" for row in mine) else "counted"
        found.append(Metric(f"wire_bytes_{way}", float(sum(row.wire_bytes for row in mine)), "B/step", kind))
        found.append(Metric(f"payload_bytes_{way}", float(sum(row.payload_bytes for row in mine)), "B/step", "counted"))
    return found
