"""Panels of studies of one codec: error against the number of partial sums, all-reduce by message size, values by octave.

They are drawn from records of `measure: codec` and `measure: collective`, see suite.measure.captured and suite.measure.collective,
and follow the rules of suite.report.panels.
"""
from __future__ import annotations

import csv
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from suite.record import Metric
from suite.report.panels import Style, _title
from suite.report.source import Entry

MIB = 2**20


def against_n(ax: Any, entries: Sequence[Entry], style: Style) -> bool:
    """Error of an all-reduce in two shots over the number of partial sums: median over messages."""
    found: dict[str, dict[int, list[float]]] = {}
    for e in entries:
        for m in e.record.metrics if e.record and e.status == "ok" else ():
            if m.name.startswith("two_shot_error_n") and m.value is not None:
                found.setdefault(e.method, {}).setdefault(int(m.name.removeprefix("two_shot_error_n")), []).append(m.value)
    lines = {name: {n: median(values) for n, values in sorted(found[name].items())} for name in style.colours if name in found}
    _lines(ax, lines, style)
    ax.set_xlabel("partial sums N")
    ax.set_ylabel("relative L2 error (%)")
    _title(ax, "Error of a two-shot all-reduce", "measured on captured messages; median over messages")
    return bool(lines)


def by_size(ax: Any, entries: Sequence[Entry], style: Style) -> bool:
    """Time of the library's bf16 all-reduce over the codec's, by message size, on the link with most sizes."""
    having = [(e, speed, size) for e in entries
              if (speed := _value(e, "all_reduce_speedup")) is not None and (size := _value(e, "message_bytes")) is not None]
    links: dict[str, set[float]] = {}
    for e, _, size in having:
        links.setdefault(e.flat["link"], set()).add(size.value)
    if not links:
        return False
    link = max(sorted(links), key=lambda name: len(links[name]))
    lines: dict[str, dict[float, float]] = {}
    for e, speed, size in sorted(having, key=lambda one: one[2].value):
        if e.flat["link"] == link and e.method in style.colours:
            lines.setdefault(e.method, {})[size.value / MIB] = speed.value
    _lines(ax, lines, style)
    ax.axhline(1, color="0.3", linewidth=0.8, zorder=2)
    ax.set_xlabel("message (MiB in bf16)")
    ax.set_ylabel("x, bf16 time over codec time")
    samples = min((speed.n for _, speed, _ in having if speed.n), default=0)
    _title(ax, f"All-reduce against bf16, {link}", f"measured in one call; median of pairs, n={samples} at least")
    return True


def octaves(ax: Any, entries: Sequence[Entry], style: Style) -> bool:
    """Where the values of messages lie below their peak: mean share over layers, forward and backward; the same for all codecs."""
    beside = [e.path.with_name(f"{e.id}.messages.csv") for e in entries if e.status == "ok" and e.path]
    path = next((p for p in beside if p.exists()), None)
    if path is None:
        return False
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    counts = []
    for way, dash in (("forward", "-"), ("backward", "--")):
        mine = [row for row in rows if row["way"] == way]
        names = [key for key in rows[0] if key.startswith("octave_") and key != "octave_below"]
        if mine:
            shares = [100 * fmean(float(row[name]) for row in mine) for name in names]
            ax.plot(range(len(names)), shares, dash, color="0.3", label=way, zorder=3)
            counts.append(f"{len(mine)} {way}")
    ax.legend(frameon=False, fontsize=7)
    ax.set_xlabel("octaves below the message's peak")
    ax.set_ylabel("share of values (%)")
    _title(ax, "Captured values by magnitude", f"measured before coding; mean over {', '.join(counts)} messages")
    return True


def _value(entry: Entry, name: str) -> Metric | None:
    metric = entry.metric(name)
    return metric if metric is not None and metric.value is not None else None


def _lines(ax: Any, lines: dict[str, dict[Any, float]], style: Style) -> None:
    for name, points in lines.items():
        ax.plot(list(points), list(points.values()), style.dash(name), marker=style.marker(name), markersize=4,
                color=style.colours[name], linewidth=1.2, zorder=3)
    ax.set_xscale("log", base=2)
    ax.margins(y=0.1)
