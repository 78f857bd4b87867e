"""What ranks tell the runner: JSON lines marked by a record separator (RFC 7464) within the text they print anyway.

The channel is the ranks' standard error, which torchrun passes on and the runner reads through a pipe: it needs no disk
(which may be full), no port, and ends with the process. A line is one write below the size that pipes keep whole.

    {"event": "ready", "rank", "pid", "at"}            the rank has joined the mesh
    {"event": "case", "rank", "id"}                     it begins a case
    {"event": "step", "step", "steps", "loss", "rate"}  first rank of a machine, a few times a second; rate in tokens/s
    {"event": "done", "id", "seconds"}                  global rank 0 has published the record
    {"event": "failed", "rank", "id", "reason", "echo"} the rank ends; echo: it only lost its peers, the cause is elsewhere;
                                                        disk: the record could not be written
"""

from __future__ import annotations

import json
import os
import re
import time
from typing import Any

MARK = "\x1e"
LONGEST = 4000  # bytes; PIPE_BUF on Linux is 4096
EVERY = 0.2  # seconds between two step events
ECHOES = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket timeout|peer|remote process|aborted|"
    r"ncclRemoteError|timed? ?out waiting|Application timeout",
    re.IGNORECASE,
)


def emit(event: str, **values: Any) -> None:
    """Tells the runner; a lost reader is no error of the rank's."""
    line = MARK + json.dumps({"event": event, **values}) + "\n"
    try:
        os.write(2, ("\n" + line).encode()[: LONGEST + 1] if len(line) <= LONGEST else b"\n")
    except OSError:
        return


def parse(line: str) -> dict[str, Any] | None:
    """The event that a line of output holds, None for plain text."""
    _before, mark, text = line.partition(MARK)
    if not mark:
        return None
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) and "event" in value else None


class Progress:
    """What the executor calls: progress(step, steps, loss, tokens_per_second). Cheap enough for a timed loop."""

    def __init__(self, speaks: bool) -> None:
        self.speaks = speaks
        self._next = 0.0

    def __call__(self, step: int, steps: int, loss: float | None = None, tokens_per_second: float | None = None) -> None:
        now = time.monotonic()
        if self.speaks and (now >= self._next or step == steps):
            self._next = now + EVERY
            emit("step", step=step, steps=steps, loss=loss, rate=tokens_per_second)


def reason_of(error: BaseException) -> tuple[str, bool]:
    """(one line, whether the error only echoes another rank's end)."""
    from suite.record import CaseFailed

    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:300]
    if isinstance(error, CaseFailed):
        return first or "failed", False
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "out of memory" in first.lower():
        return "oom", False
    text = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return text, isinstance(error, RuntimeError | OSError) and bool(ECHOES.search(first))
