"""What a run shows: progress bars with loss, tokens/s and time left in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

PLAIN_EVERY = 20.0  # seconds between two plain lines of one case


class Show:
    """Plain lines; `Bars` is the form for a terminal."""

    def __init__(self, out: TextIO | None = None, every: float = PLAIN_EVERY) -> None:
        self.out, self.every = out or sys.stderr, every
        self._next, self._case, self._began = 0.0, "", 0.0

    def say(self, text: str) -> None:
        print(text, file=self.out, flush=True)

    def launch(self, name: str, cases: int, pending: int) -> None:
        kept = cases - pending
        self.say(f"{name}: {pending} of {cases} cases to run" + (f", {kept} kept" if kept else ""))

    def waiting(self, what: str) -> None:
        self.say(f"waiting for {what}")

    def case(self, name: str) -> None:
        self._case, self._began = name, time.monotonic()
        self._next = self._began + self.every

    def step(self, step: int, steps: int, loss: float | None, rate: float | None) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self.every
        left = (now - self._began) / max(step, 1) * (steps - step)
        self.say(f"{self._case}: step {step}/{steps}{_figures(loss, rate)}, {left:.0f} s left")

    def done(self, name: str, seconds: float) -> None:
        self.say(f"{name}: ok in {seconds:.1f} s")

    def failed(self, name: str, reason: str) -> None:
        self.say(f"{name}: failed: {reason}")

    def close(self) -> None:
        return


class Bars(Show):
    """One bar for the case at hand below the lines of finished ones."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        super().__init__()
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self.task = None
        self.progress.start()

    def say(self, text: str) -> None:
        self.progress.console.print(text, markup=False, highlight=False)

    def case(self, name: str) -> None:
        super().case(name)
        self._clear()
        self.task = self.progress.add_task(name, total=None, figures="")

    def step(self, step: int, steps: int, loss: float | None, rate: float | None) -> None:
        if self.task is not None:
            self.progress.update(self.task, completed=step, total=steps, figures=_figures(loss, rate).lstrip(", "))

    def done(self, name: str, seconds: float) -> None:
        self._clear()
        super().done(name, seconds)

    def failed(self, name: str, reason: str) -> None:
        self._clear()
        super().failed(name, reason)

    def close(self) -> None:
        self._clear()
        self.progress.stop()

    def _clear(self) -> None:
        if self.task is not None:
            self.progress.remove_task(self.task)
            self.task = None


def _figures(loss: float | None, rate: float | None) -> str:
    return (f", loss {loss:.4f}" if loss is not None else "") + (f", {rate:,.0f} tokens/s" if rate else "")


def best(plain: bool = False) -> Show:
    return Bars() if sys.stderr.isatty() and not plain else Show()
