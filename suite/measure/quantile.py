"""Median, 20 % and 80 % quantile of samples, and the metric made of them. Imports no torch."""
from __future__ import annotations

import math
from collections.abc import Iterable

from suite.record import Kind, Metric


def quantiles(samples: Iterable[float]) -> tuple[float, float, float, int]:
    """(median, q20, q80, n), linear between order statistics. Raises ValueError on no sample or one that is no number."""
    ordered = sorted(float(value) for value in samples)
    if not ordered:
        raise ValueError("no samples")
    if not all(map(math.isfinite, ordered)):
        raise ValueError("a sample is NaN or infinite")

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = math.floor(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (place - low)

    return at(0.5), at(0.2), at(0.8), len(ordered)


def metric_from(samples: Iterable[float], name: str, unit: str, kind: Kind = "measured") -> Metric:
    """The median of the samples as a metric; of none: a metric without a value, and the reason."""
    values = list(samples)
    if not values:
        return Metric(name, None, unit, kind, reason="no samples")
    median, q20, q80, n = quantiles(values)
    return Metric(name, median, unit, kind, n, q20, q80)
