"""Two records compared: their metrics or the reason against it, the number, its spread, and how far apart in time they are.

    comparison      value a | ratio a / b | difference a - b | difference % 100 (a / b - 1)

Spread, from the q20 and q80 of the medians a and b, taken as independent (for `difference %` as for a / b):

    a / b    low  = a/b - |a/b| √(((a - a20)/a)² + ((b80 - b)/b)²)      high = a/b + |a/b| √(((a80 - a)/a)² + ((b - b20)/b)²)
    a - b    low  = a - b - √((a - a20)² + (b80 - b)²)                  high = a - b + √((a80 - a)² + (b - b20)²)
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime

from suite.record import Metric
from suite.report.source import NOT_RUN, Entry, apart, started


def metrics(pair: Sequence[Entry], name: str) -> tuple[list[Metric], str | None]:
    """The metric of each entry, or why there is no number."""
    found: list[Metric] = []
    for entry in pair:
        if entry.status != "ok":
            return [], str(entry.reason) if entry.status == NOT_RUN else f"failed: {entry.id}: {entry.reason}"
        metric = entry.metric(name)
        if metric is None or metric.value is None:
            return [], f"{entry.id}: no {name}: {metric.reason if metric else 'not in the record'}"
        found.append(metric)
    if len(found) > 1:
        if any(m.kind == "emulated" for m in found):
            return [], f"{name} is emulated: never compared"
        if not found[1].value:
            return [], f"{pair[1].id}: {name} is 0"
        if reason := apart(*pair):
            return [], reason
    return found, None


def number(comparison: str, values: Sequence[float]) -> float:
    """One value as it is; two as `comparison` says."""
    if len(values) == 1:
        return float(values[0])
    if comparison == "difference":
        return values[0] - values[1]
    ratio = values[0] / values[1]
    return ratio if comparison == "ratio" else 100 * (ratio - 1)


def spread(comparison: str, metrics: Sequence[Metric]) -> tuple[float, float] | None:
    """The number's q20 and q80 as the module's docstring has it; None where a side has none or is 0."""
    if any(m.q20 is None or m.q80 is None for m in metrics):
        return None
    a, *rest = metrics
    if not rest:
        return a.q20, a.q80
    (b,) = rest
    one, other = (1.0, 1.0) if comparison == "difference" else (abs(a.value), abs(b.value))
    if not one:
        return None
    down = math.hypot((a.value - a.q20) / one, (b.q80 - b.value) / other)
    up = math.hypot((a.q80 - a.value) / one, (b.value - b.q20) / other)
    if comparison == "difference":
        return a.value - b.value - down, a.value - b.value + up
    ratio = a.value / b.value
    scale = abs(ratio)
    low, high = ratio - scale * down, ratio + scale * up
    return (low, high) if comparison == "ratio" else (100 * (low - 1), 100 * (high - 1))


def seconds(pairs: Sequence[Sequence[Entry]]) -> float | None:
    """Between the starts of the two records, the longest over the pairs; None where a start is not known."""
    longest = 0.0
    for top, bottom in pairs:
        try:
            times = [datetime.fromisoformat(started(e.record) or "") for e in (top, bottom)]
            longest = max(longest, abs((times[0] - times[1]).total_seconds()))
        except (ValueError, TypeError):
            return None
    return longest
