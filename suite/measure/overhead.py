"""What the GPU sampler costs the step it watches: interleaved on and off in one process.

    pair = (block with the sampler, block without it), their order alternating
    block = `steps` timed steps, synchronised at its ends
    ratio = mean over pairs of log(on / off), with a one-sided 95 % upper bound by Student's t

Clocks, temperature and neighbours drift over minutes; two blocks of one pair lie seconds apart, so the drift cancels. Starting
a sampler lets the GPU rest and clock up, so every block starts one, the blocks without it end it again, and `SETTLE` steps run
before the clock does.
"""
from __future__ import annotations

import contextlib
import math
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from suite.record import Metric

CONFIDENCE = 0.95
SETTLE = 4


def bound(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(ratio, 95 % upper bound of it) from (on, off) seconds. Raises ValueError with fewer than two pairs."""
    from scipy import stats

    if len(pairs) < 2:
        raise ValueError(f"overhead: {len(pairs)} pairs give no interval")
    logs = [math.log(on / off) for on, off in pairs]
    mean, error = statistics.fmean(logs), statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean + stats.t.ppf(CONFIDENCE, len(logs) - 1) * error)


def overhead(trainer: Any, pairs: int = 12, steps: int = 10) -> list[Metric]:
    """trainer: a warm `suite.trainer.Trainer`. The ratio of step times with the sampler on and off, and its upper bound."""
    from suite.measure.clock import StepClock
    from suite.measure.nvml import Sampler

    taken: list[tuple[float, float]] = []
    number = 0
    with tempfile.TemporaryDirectory() as folder:
        for pair in range(pairs):
            seconds = {}
            for on in (True, False) if pair % 2 else (False, True):
                with contextlib.ExitStack() as stack:
                    sampler = stack.enter_context(Sampler(Path(folder) / f"{pair}.csv", trainer.mesh))
                    if not sampler:
                        return [Metric("sampler_overhead", None, "ratio", reason=sampler.reason)]
                    if not on:
                        stack.close()
                    clock = StepClock(trainer.device, trainer.barrier)
                    for step in range(SETTLE + steps):
                        if step == SETTLE:
                            clock.start()
                        trainer.step(number)
                        number += 1
                        if step >= SETTLE:
                            clock.mark()
                    clock.stop()
                    seconds[on] = clock.window
            taken.append((seconds[True], seconds[False]))
    ratio, upper = bound(taken)
    ratios = sorted(on / off for on, off in taken)
    return [Metric("sampler_overhead", ratio, "ratio", n=pairs, q20=ratios[pairs // 5], q80=ratios[-1 - pairs // 5]),
            Metric("sampler_overhead_upper_bound", upper, "ratio", n=pairs)]
