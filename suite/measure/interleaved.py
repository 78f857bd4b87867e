"""Two variants of a training step in one launch: a layout against the same with its options at their defaults, or, where they
are, a codec against the plain bf16 wire.

A `measure: ab` case trains two models of the same seed on the same batches, in turn. `steps` is the number of pairs:

    pair    a block of the row's steps and a block of the default's, their order alternating
    block   SETTLE steps that are not counted, then STEPS that are, synchronised at their ends only

Clocks, temperature and neighbours drift over minutes; the blocks of a pair lie seconds apart, so that the drift cancels.

    step_time                       ms   of the row, median over pairs;  default_step_time: of the default
    default_over_row                x    exp of the mean over pairs of log(default / row): below 1 the default is faster
    default_over_row_upper_bound    x    its one-sided 95 % bound (Student's t): at most 1.01 says `not slower` to a percent
    default_over_row_lower_bound    x    the other one: at least 0.99 says that the row is not slower
    comm_share                      %    communication's share of the default's step, profiled apart; where a codec is compared
    speedup_ceiling                 x    1 / (1 - c + c / k): c that share, k how many times fewer bytes the row's wire carries
    speedup_reached                 %    (default_over_row - 1) / (speedup_ceiling - 1)
    memory_saved                    MB   peak of the default's blocks less that of the row's, weights and states aside
    checkpoint_mb_per_ms            MB/ms  memory_saved over the time that a step takes longer (BOOST, its Table 3), for rows that
                                    save memory and pay time; others say why not

Both step at rate 0, so that their weights stay equal: in every step, the timed ones too, their losses must agree within AGREE
(AGREE_CODED with a codec), and each variant's second step, taken again behind the first ones, must give its own loss again within
AGAIN: a variant that computes something else, or a graph that replays an old batch, is no result.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from suite.case import Case
from suite.measure.clock import StepClock
from suite.measure.overhead import bound
from suite.measure.profile import communication_share
from suite.measure.quantile import metric_from, quantiles
from suite.record import CaseFailed, Metric
from suite.recorded import EAGER

WARM, SETTLE, STEPS = EAGER + 1, 1, 2
AGREE, AGREE_CODED = 0.01, 0.05  # of the loss; layouts never change the function, a codec has its error
AGAIN = 1e-4  # of the loss: the same weights and batch; other batches of random text differ by ten times as much
PROFILED = 2
MB = 1e6


def default_of(case: Case) -> Case:
    """What the case is compared with, a timed one."""
    other = {"comm": {}} if _codec(case) else {"layout": {"name": case.layout.name}}
    return Case.model_validate(case.row() | other | {"measure": "speed", "name": None})


def _codec(case: Case) -> bool:
    return not case.layout.off_default("layout")


def study(case: Case, outcome: Any, trainer: Callable[[Case], Any]) -> None:
    """Fills metrics and phases of the outcome. trainer: a case -> a `suite.trainer.Trainer`. Every rank calls it."""
    began = time.perf_counter()
    row, default = trainer(case), trainer(default_of(case))
    row.still = default.still = True
    coded = _codec(case)
    losses: dict[Any, dict[int, float]] = {one: {step: _loss(one, step) for step in range(WARM)} for one in (row, default)}
    for one in (row, default):
        first, again = losses[one][1], _loss(one, 1)
        if not abs(again - first) <= AGAIN * abs(first):
            raise CaseFailed(f"ab: {'the row' if one is row else 'the default'}: the same step gave {first:.6f} and {again:.6f}: "
                             "not timed")
    _agree(losses[row], losses[default], coded)
    if case.graph and not (row.replays and default.replays):
        raise CaseFailed("graph: a step is not replayed: it would be timed as the host issues it")
    outcome.phases["setup"] = time.perf_counter() - began
    began = time.perf_counter()
    taken: list[tuple[float, float]] = []
    peaks: list[tuple[float | None, float | None]] = []
    for pair in range(case.steps):
        found = {}
        for one in (row, default) if pair % 2 else (default, row):
            *found[one], seen = _block(one, WARM + pair * (SETTLE + STEPS))
            losses[one] |= seen
        taken.append((found[row][0], found[default][0]))
        peaks.append((found[row][1], found[default][1]))
    _agree(losses[row], losses[default], coded)
    outcome.phases["timed"] = time.perf_counter() - began
    outcome.metrics += metrics(taken, peaks)
    if coded:
        began = time.perf_counter()
        next_step = WARM + case.steps * (SETTLE + STEPS)
        share = communication_share(lambda n: default.step(next_step + n), PROFILED, default.device)
        outcome.metrics += share + ceiling(outcome.metrics, share, _sent(default, next_step + 9) / _sent(row, next_step + 9))
        outcome.facts["paths"] = row.assembled.tp.choices.rows()
        outcome.phases["profile"] = time.perf_counter() - began


def _loss(trainer: Any, step: int) -> float:
    return float(trainer.step(step)[0])


def _agree(mine: dict[int, float], others: dict[int, float], coded: bool) -> None:
    """Raises CaseFailed at the first step whose losses do not agree; a NaN never does."""
    for step, one in mine.items():
        other = others[step]
        if not abs(one - other) <= (AGREE_CODED if coded else AGREE) * abs(other):
            raise CaseFailed(f"ab: losses of step {step}: {one:.4f} and, with default options, {other:.4f}: no result")


def _sent(trainer: Any, step: int) -> float:
    """Bytes a rank sends over the tensor-parallel group in a step."""
    trainer.assembled.counter.reset()
    trainer.step(step)
    return sum(row.wire_bytes for row in trainer.assembled.counter.snapshot() if row.group == "tp")


def ceiling(found: Iterable[Metric], share: Iterable[Metric], fewer: float) -> list[Metric]:
    """What the share of communication leaves to win, and how much of it was won. fewer: bytes of the default over the row's."""
    ratio = next(m.value for m in found if m.name == "default_over_row")
    c = next(m.value for m in share if m.name == "comm_share") / 100
    most = 1 / (1 - c + c / fewer)
    reached = 100 * (ratio - 1) / (most - 1) if fewer > 1 and c > 0 else None
    return [Metric("speedup_ceiling", most, "x"),
            Metric("speedup_reached", reached, "%", reason="the row sends no fewer bytes" if reached is None else None)]


def _block(trainer: Any, first: int) -> tuple[float, float | None, dict[int, float]]:
    """(seconds a step, bytes at the peak above what lay there before, None without a GPU, losses by step)."""
    device, before, losses = trainer.device, 0, {}
    gpu = device.type == "cuda" and not trainer.case.graph  # a graph's memory is its own
    if gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    clock = StepClock(device, trainer.barrier)
    for step in range(SETTLE + STEPS):
        if step == SETTLE:
            clock.start()
        losses[first + step] = trainer.step(first + step)[0]
        if step >= SETTLE:
            clock.mark()
    clock.stop()
    peak = float(torch.cuda.max_memory_allocated(device) - before) if gpu else None
    return clock.window / STEPS, peak, {number: float(loss) for number, loss in losses.items()}


def metrics(taken: Iterable[tuple[float, float]], peaks: Iterable[tuple[float | None, float | None]]) -> list[Metric]:
    """taken: (seconds of the row's step, of the default's) a pair; peaks: bytes, alike. Raises ValueError with fewer than two."""
    taken, peaks = list(taken), list(peaks)
    ratio, upper = bound([(default, row) for row, default in taken])
    ratios = quantiles(default / row for row, default in taken)
    found = [metric_from([1e3 * row for row, _ in taken], "step_time", "ms"),
             metric_from([1e3 * default for _, default in taken], "default_step_time", "ms"),
             Metric("default_over_row", ratio, "x", n=len(taken), q20=ratios[1], q80=ratios[2]),
             Metric("default_over_row_upper_bound", upper, "x", n=len(taken)),
             Metric("default_over_row_lower_bound", ratio**2 / upper, "x", n=len(taken))]
    names = (("memory_saved", "MB"), ("checkpoint_mb_per_ms", "MB/ms"))
    if any(peak is None for pair in peaks for peak in pair):
        return found + [Metric(name, None, unit, reason="no GPU, or a graph, whose memory is its own") for name, unit in names]
    saved = (max(default for _, default in peaks) - max(row for row, _ in peaks)) / MB
    extra = found[0].value - found[1].value
    found.append(Metric("memory_saved", saved, "MB", n=len(peaks)))
    if saved <= 0 or extra <= 0:
        why = "the row saves no memory" if saved <= 0 else "the row's step is not longer"
        return [*found, Metric("checkpoint_mb_per_ms", None, "MB/ms", reason=why)]
    return [*found, Metric("checkpoint_mb_per_ms", saved / extra, "MB/ms", n=len(taken))]
