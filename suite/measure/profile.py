"""Communication's share of a step, from profiled steps of their own: profiling slows a step, so none of them is timed.

    comm_share      time in which at least one message was on its way / time of the step
    comm_exposed    the part of it in which no other kernel ran on the GPU / time of the step

Times are unions of intervals, clipped to the step: two messages at once count once. On a GPU a message is an NCCL kernel, a
copy between two GPUs, a kernel that codes and reads peers' memory in one, or, with gloo, the library's own range; on the CPU
a c10d or gloo range, which lasts from the call to the completion. Waiting for a slower rank is part of it.
"""
from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from suite.measure.quantile import metric_from
from suite.record import Metric

STEP = "triaxis_profiled_step"
# NCCL up to 2.18 ncclKernel_AllReduce_RING_LL_..., then ncclDevKernel_..., symmetric memory ncclSymkDevKernel_...
NCCL = re.compile(r"^(void )?nccl\w*Kernel")
PEERS = re.compile(r"^exchange_kernel")  # kernels/exchange.py: waiting, transport and both halves of the codec
RANGE = re.compile(r"^(gloo:|c10d::)")

Interval = tuple[float, float]


class ProfileError(RuntimeError):
    """The profile contradicts the run."""


@dataclass(frozen=True)
class Event:
    """An interval of one profile, in microseconds; `gpu`: it ran on the GPU (a kernel or a copy)."""

    name: str
    start: float
    end: float
    gpu: bool


def is_communication(event: Event, gpu: bool) -> bool:
    """gpu: the run's device is a GPU. There c10d's ranges only launch, while gloo's own last as long as the message."""
    if event.gpu:
        return bool(NCCL.match(event.name) or PEERS.match(event.name)) or event.name.startswith("Memcpy PtoP")
    return event.name.startswith("gloo:") or (not gpu and bool(RANGE.match(event.name)))


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals in order that cover the same points."""
    merged: list[list[float]] = []
    for start, end in sorted(i for i in intervals if i[1] > i[0]):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return [(start, end) for start, end in merged]


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in union(intervals))


def clip(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    return [(max(start, window[0]), min(end, window[1])) for start, end in intervals if start < window[1] and end > window[0]]


def shares(events: Sequence[Event], window: Interval, gpu: bool) -> tuple[float, float | None]:
    """(comm_share, comm_exposed) of one step as fractions; exposed is None on the CPU, where compute is no event."""
    whole = window[1] - window[0]
    messages = clip(((e.start, e.end) for e in events if is_communication(e, gpu)), window)
    share = length(messages) / whole
    if not gpu:
        return share, None
    others = clip(((e.start, e.end) for e in events if e.gpu and not is_communication(e, gpu)), window)
    return share, (length([*messages, *others]) - length(others)) / whole


def communication_share(step: Callable[[int], object], steps: int, device: torch.device | str,
                        expected: bool = True) -> list[Metric]:
    """Runs `step(0)` to warm the profiler up and `step(1)` to `step(steps)` to measure; medians in %.

    expected: the ranks must talk in every step (a group of two or more). Raises ProfileError where no message was seen.
    """
    device = torch.device(device)
    gpu = device.type == "cuda"

    def settle() -> None:
        if gpu:
            torch.cuda.synchronize(device)

    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if gpu else [ProfilerActivity.CPU]
    with profile(activities=activities) as profiler:
        step(0)
        settle()
        for number in range(1, steps + 1):
            with record_function(STEP):
                step(number)
                settle()
    found = profiler.events() or []
    windows = [(e.time_range.start, e.time_range.end) for e in found if e.name == STEP and e.device_type == DeviceType.CPU]
    events = [Event(e.name, e.time_range.start, e.time_range.end, e.device_type == DeviceType.CUDA) for e in found
              if e.name != STEP and not (e.device_type == DeviceType.CUDA and getattr(e, "is_user_annotation", False))]
    if len(windows) != steps:
        raise ProfileError(f"the profiler saw {len(windows)} of {steps} steps")
    return metrics([shares(events, window, gpu) for window in windows], expected)


def metrics(found: Sequence[tuple[float, float | None]], expected: bool) -> list[Metric]:
    """Metrics of the profiled steps' shares. Raises ProfileError where a step that must hold messages holds none."""
    if expected and min(share for share, _ in found) == 0:
        raise ProfileError("no communication in a profiled step of several ranks: unknown kernel names, or they never met")
    exposed = [100 * value for _, value in found if value is not None]
    return [
        metric_from([100 * share for share, _ in found], "comm_share", "%"),
        metric_from(exposed, "comm_exposed", "%") if exposed
        else Metric("comm_exposed", None, "%", reason="overlap with compute is not visible on the CPU"),
    ]
