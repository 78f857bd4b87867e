"""Times steps. The window is synchronised at its two ends only; nothing waits in between.

    clock = StepClock(device)
    clock.start()
    for ... in ...:
        train_step()
        clock.mark()
    seconds = clock.stop()        seconds of each step
    clock.began, clock.ended      the window on time.monotonic(), for the GPU sampler; clock.window: its length in seconds

On a GPU a step is what lies between two CUDA events, recorded without waiting and read after the window; on the CPU it is
wall clock. Warm-up, compilation and autotuning belong before the window.
"""
from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

import torch

from suite.measure.quantile import metric_from, quantiles

__all__ = ["ClockError", "StepClock", "metric_from", "quantiles"]

SLACK = 0.01  # share by which two clocks may disagree, beside a millisecond


class ClockError(RuntimeError):
    """The times contradict each other: they are not to be published."""


class StepClock:
    """barrier: called before the window opens and after it closed, so that ranks start together (default: nothing)."""

    def __init__(self, device: torch.device | str = "cpu", barrier: Callable[[], None] | None = None) -> None:
        self._device = torch.device(device)
        self._barrier = barrier
        self._marks: list = []
        self.began = self.ended = 0.0

    def start(self) -> None:
        self._synchronise()
        if self._barrier is not None:
            self._barrier()
            self._synchronise()
        self.began = self.ended = time.monotonic()
        self._marks = [self._mark()]

    def mark(self) -> None:
        """A step ends here."""
        self._marks.append(self._mark())

    def stop(self) -> list[float]:
        """Seconds of each step. Raises ClockError where they do not fit into the window."""
        self._synchronise()
        self.ended = time.monotonic()
        if self._barrier is not None:
            self._barrier()
        pairs = list(pairwise(self._marks))
        if self._device.type == "cuda":
            seconds = [before.elapsed_time(after) / 1000 for before, after in pairs]
        else:
            seconds = [after - before for before, after in pairs]
        self._marks = []
        if sum(seconds) > self.window * (1 + SLACK) + 1e-3:
            raise ClockError(f"{len(seconds)} steps took {sum(seconds):.6f} s in a window of {self.window:.6f} s")
        return seconds

    @property
    def window(self) -> float:
        """Seconds of the whole window."""
        return self.ended - self.began

    def _mark(self):
        if self._device.type != "cuda":
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
