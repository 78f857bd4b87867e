"""Metrics from the GPU sampler's rows over one window: a value or a reason for each reading. Imports no torch.

    gpu_utilization, sm_active, sm_occupancy, tensor_active, dram_active   %     mean over samples and GPUs
    gpu_power           W     mean over samples, summed over GPUs
    gpu_energy          J     difference of the counter at the window's two ends (interpolated), summed over GPUs; windows of
                              2 s and more, for the driver refreshes the counter only some ten times a second
    sm_clock            MHz   median, q20, q80
    gpu_temperature     C     highest
    gpu_memory_used     MiB   highest of one GPU, everybody's contexts included
    nvlink_rx, nvlink_tx  B   differences of the counters, summed over GPUs; a counter that stands at 0 is dead, not a zero
    shared              -     most foreign processes seen at once on one GPU: over 0 the numbers beside it are shared

`gpu_utilization` says that a kernel was resident and reads near 100 % while ranks wait for each other; `sm_active` stands
beside it for that reason. All GPUs must answer, else the metric is a reason that names the first that did not.
"""
from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from statistics import fmean

from suite.measure.quantile import quantiles
from suite.record import Metric

MIB = 2**20
ENERGY_WINDOW = 2.0  # seconds
LATE = 1.0  # seconds that the last sample may lie before the window's end
Series = list[tuple[float, float]]


@dataclass
class Samples:
    """gpus: UUID -> reading -> [(time, value)]; reasons: (UUID, reading) -> why it is missing."""

    gpus: dict[str, dict[str, Series]] = field(default_factory=dict)
    reasons: dict[tuple[str, str], str] = field(default_factory=dict)


class _Missing(Exception):
    pass


def read(path: Path) -> Samples:
    """Raises ValueError naming file and line where a row is no sample; a last line that was cut off is left out."""
    samples = Samples()
    text = path.read_text(encoding="utf-8")
    lines = text[: text.rfind("\n") + 1].splitlines()
    rows = csv.reader(lines)
    header = next(rows, [])
    for number, row in enumerate(rows, 2):
        if row[:1] == ["#"] and len(row) == 4:
            samples.reasons.setdefault((row[1], row[2]), row[3])
            continue
        try:
            cells = dict(zip(header, row, strict=True))
            moment, series = float(cells.pop("time")), samples.gpus.setdefault(cells.pop("gpu"), {})
            for name, cell in cells.items():
                if cell:
                    series.setdefault(name, []).append((moment, float(cell)))
        except (KeyError, ValueError):
            raise ValueError(f"{path.name}: line {number}: not a sample") from None
    return samples


def summarise(path: Path | None, t0: float, t1: float, reason: str | None = None) -> list[Metric]:
    """Metrics over the window [t0, t1] of time.monotonic(). Without a file every metric is `reason` (default: no GPU)."""
    samples = read(path) if path is not None and path.exists() else Samples()
    if not samples.gpus:
        reason = reason or ("no GPU" if path is None else "the GPU sampler wrote no row")
    return [_metric(name, unit, reason, lambda rule=rule: rule(samples, t0, t1)) for name, (unit, rule) in RULES.items()]


def _metric(name: str, unit: str, reason: str | None, rule: Callable[[], Mapping]) -> Metric:
    if reason is not None:
        return Metric(name, None, unit, reason=reason)
    try:
        return Metric(name, unit=unit, **rule())
    except _Missing as error:
        return Metric(name, None, unit, reason=str(error))


def _within(samples: Samples, reading: str, t0: float, t1: float) -> list[list[float]]:
    """Values in the window, a list a GPU."""
    found = []
    for gpu, series in samples.gpus.items():
        values = [value for moment, value in series.get(reading, ()) if t0 <= moment <= t1]
        if not values:
            raise _Missing(samples.reasons.get((gpu, reading), f"no sample of {reading} in {t1 - t0:.2f} s"))
        if series[reading][-1][0] + LATE < t1 < math.inf:
            raise _Missing(f"sampling of {reading} ended before the window did")
        found.append(values)
    return found


def _pooled(samples: Samples, reading: str, t0: float, t1: float) -> list[float]:
    return list(chain.from_iterable(_within(samples, reading, t0, t1)))


def _mean(reading: str) -> Callable:
    def rule(samples: Samples, t0: float, t1: float) -> dict:
        values = _pooled(samples, reading, t0, t1)
        return {"value": fmean(values), "n": len(values)}

    return rule


def _summed_mean(reading: str) -> Callable:
    def rule(samples: Samples, t0: float, t1: float) -> dict:
        gpus = _within(samples, reading, t0, t1)
        return {"value": sum(map(fmean, gpus)), "n": min(map(len, gpus))}

    return rule


def _median(reading: str) -> Callable:
    def rule(samples: Samples, t0: float, t1: float) -> dict:
        median, q20, q80, n = quantiles(_pooled(samples, reading, t0, t1))
        return {"value": median, "q20": q20, "q80": q80, "n": n}

    return rule


def _highest(reading: str, unit: float = 1.0) -> Callable:
    def rule(samples: Samples, t0: float, t1: float) -> dict:
        values = _pooled(samples, reading, t0, t1)
        return {"value": max(values) / unit, "n": len(values)}

    return rule


def _counted(reading: str, unit: float = 1.0, shortest: float = 0.0) -> Callable:
    """Growth of a counter over the window, summed over GPUs."""

    def rule(samples: Samples, t0: float, t1: float) -> dict:
        total = 0.0
        for gpu, series in samples.gpus.items():
            points = series.get(reading)
            if not points:
                raise _Missing(samples.reasons.get((gpu, reading), f"no sample of {reading}"))
            if not any(value for _, value in points):
                raise _Missing(f"the counter {reading} of {gpu} stands at 0: dead, or there is no such link")
            if any(later < earlier for (_, earlier), (_, later) in pairwise(points)):
                raise _Missing(f"the counter {reading} of {gpu} ran backwards")
            if points[0][0] > t0 or points[-1][0] < t1:
                raise _Missing(f"the samples of {reading} do not cover the window")
            if t1 - t0 < shortest:
                raise _Missing(f"a window of {t1 - t0:.2f} s is too short: {shortest:g} s or more")
            total += (_at(points, t1) - _at(points, t0)) / unit
        return {"value": total, "n": len(samples.gpus)}

    return rule


def _at(points: Sequence[tuple[float, float]], moment: float) -> float:
    """A counter between its two nearest samples, linearly."""
    after = next(i for i, (time, _) in enumerate(points) if time >= moment)
    (t1, v1), (t0, v0) = points[after], points[max(0, after - 1)]
    return v1 if t0 == t1 else v0 + (v1 - v0) * (moment - t0) / (t1 - t0)


def _shared(samples: Samples, t0: float, t1: float) -> dict:
    # Looked at about once a second: a short window takes the looks of the whole run.
    values = _pooled(samples, "foreign", -math.inf, math.inf)
    return {"value": max(values), "n": len(values)}


RULES: dict[str, tuple[str, Callable[[Samples, float, float], dict]]] = {
    "gpu_utilization": ("%", _mean("utilization")),
    "sm_active": ("%", _mean("sm_active")),
    "sm_occupancy": ("%", _mean("sm_occupancy")),
    "tensor_active": ("%", _mean("tensor_active")),
    "dram_active": ("%", _mean("dram_active")),
    "gpu_power": ("W", _summed_mean("power")),
    "gpu_energy": ("J", _counted("energy", 1000.0, ENERGY_WINDOW)),
    "sm_clock": ("MHz", _median("clock")),
    "gpu_temperature": ("C", _highest("temperature")),
    "gpu_memory_used": ("MiB", _highest("memory_used", MIB)),
    "nvlink_rx": ("B", _counted("nvlink_rx")),
    "nvlink_tx": ("B", _counted("nvlink_tx")),
    "shared": ("processes", _shared),
}
