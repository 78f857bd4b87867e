"""Makes one entry of a registry slower by a share, on purpose: what suite/gate/trial.py lays into a copy of the sources.

On a CPU reference and launch spin for that share of the time they took. On a GPU the kernel is followed, on its stream, by a copy
of so many bytes that both together take 1 + share of its device time, both from cold caches, taking turns; what that came to is
appended to slowed.txt beside this file. A copy has to be started too: below some 40 us more than 5 % is what it costs, and that is
written there as well. Imports nothing of suite: it becomes a module of kernels.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

FLUSH = 256 << 20
ROUNDS, TURNS = 8, 15
NEAR = 0.1  # of the share: how close the copy must come to it


def slower(entries: list[Any], name: str, share: float) -> list[Any]:
    """The entries, with the one of that name slower; `host:` before it: only its launch, else function and reference."""
    host, plain = name.startswith("host:"), name.partition(":")[2] or name

    def changed(entry: Any) -> Any:
        if host:
            return replace(entry, launch=spun(entry.launch, share)) if entry.name.partition("/")[0] == plain else entry
        if entry.name != plain:
            return entry
        return replace(entry, function=followed(entry, share), reference=spun(entry.reference, share))

    made = [changed(entry) for entry in entries]
    if all(a is b for a, b in zip(made, entries)):
        raise ValueError(f"no entry is called {name}")
    return made


def spun(function: Callable, share: float) -> Callable:
    def run(*given: Any, **named: Any) -> Any:
        begun = time.perf_counter()
        made = function(*given, **named)
        end = begun + (time.perf_counter() - begun) * (1 + share)
        while time.perf_counter() < end:
            pass
        return made

    return run


def followed(entry: Any, share: float) -> Callable:
    """The function with a copy behind it, whose size is found at the first call."""
    buffers: list[Any] = []

    def run(**given: Any) -> Any:
        if not buffers:
            buffers.extend(fitting(entry, share))
        made = entry.function(**given)
        buffers[1].copy_(buffers[0])
        return made

    return run


def fitting(entry: Any, share: float) -> tuple[Any, Any]:
    """(source, target) of the copy that takes `share` of the kernel's device time."""
    import torch

    given, junk = entry.make("cuda", 1), torch.empty(FLUSH, dtype=torch.uint8, device="cuda")
    size = max(16, int(entry.traffic * share / 2))
    source, target = torch.zeros(2, 4 * size + 16, dtype=torch.uint8, device="cuda").unbind()

    def seconds(copied: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(2):  # also keeps the device busy until the host has started both
            junk.zero_()
        begin.record()
        entry.function(**given)
        if copied:
            target[:copied].copy_(source[:copied])
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)

    def ratio(copied: int) -> float:
        turns = [(seconds(0), seconds(copied)) for _ in range(TURNS)]
        return median(b for _, b in turns) / median(a for a, _ in turns)

    ratio(size)
    for _ in range(ROUNDS):
        got = ratio(size) - 1
        if abs(got - share) <= NEAR * share:
            break
        size = max(16, min(source.numel(), int(size * min(2.0, max(0.5, share / max(got, share / 8))))))
    with Path(__file__).with_name("slowed.txt").open("a", encoding="utf-8") as file:
        file.write(f"{ratio(size)}\n")
    return source[:size].clone(), target[:size].clone()
