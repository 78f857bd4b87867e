"""Runs that take turns, one after the other in each repeat, so that what disturbs the machine disturbs all of them."""
from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

WARM = 3
COLD = 2**30  # bytes written between two runs: more than an L2 cache holds
COVER = 4  # times that they are written: over a millisecond, longer than the host takes to queue a run


def timed(runs: Mapping[str, Callable[[], object]], device: torch.device, repeats: int, barrier: Callable[[], None] | None = None,
          prepare: Callable[[], object] | None = None, meet: Callable[[], object] | None = None,
          host: dict[str, list[float]] | None = None) -> dict[str, list[float]]:
    """Seconds of each run in each repeat: on a GPU those of the device, between events, while the host is ahead of it as it is
    in a training step; those that the host takes to queue the run go to `host`.

    prepare: before every run, not counted. barrier: hosts meet; meet: what devices do together just before a run, so that none
    waits for another within it.
    """
    flush = torch.empty(COLD, dtype=torch.uint8, device=device) if device.type == "cuda" else None
    marks: dict[str, list[tuple[Any, Any]]] = {name: [] for name in runs}
    for repeat in range(WARM + repeats):
        for name, run in runs.items():
            if prepare is not None:
                prepare()
            if barrier is not None:
                barrier()
            if flush is not None:
                for _ in range(COVER):
                    flush.zero_()
            if meet is not None:
                meet()
            began, queued = _mark(device), time.perf_counter()
            run()
            queued, ended = time.perf_counter() - queued, _mark(device)
            if repeat >= WARM:
                marks[name].append((began, ended))
                if host is not None:
                    host.setdefault(name, []).append(queued)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return {name: [a.elapsed_time(b) / 1e3 for a, b in pairs] for name, pairs in marks.items()}
    return {name: [b - a for a, b in pairs] for name, pairs in marks.items()}


def _mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event
