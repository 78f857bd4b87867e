"""Runs that take turns, one after the other in each repeat, so that what disturbs the machine disturbs all of them."""
from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

WARM = 3
COLD = 2**30  # bytes written between two runs: more than an L2 cache holds, for longer than a run takes to be queued


def timed(runs: Mapping[str, Callable[[], object]], device: torch.device, repeats: int, barrier: Callable[[], None] | None = None,
          prepare: Callable[[], object] | None = None) -> dict[str, list[float]]:
    """Seconds of each run in each repeat, between events on a GPU. `prepare` comes before every run and is not counted."""
    flush = torch.empty(COLD, dtype=torch.uint8, device=device) if device.type == "cuda" else None
    marks: dict[str, list[tuple[Any, Any]]] = {name: [] for name in runs}
    for repeat in range(WARM + repeats):
        for name, run in runs.items():
            if prepare is not None:
                prepare()
            if barrier is not None:
                barrier()
            if flush is not None:
                flush.zero_()  # also keeps the device busy until the run is queued
            began = _mark(device)
            run()
            ended = _mark(device)
            if repeat >= WARM:
                marks[name].append((began, ended))
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
