"""Panels of studies: of one codec error against the number of partial sums, all-reduce by message size, values by octave; of one
layer computation and communication.

They are drawn from records of `measure: codec`, `collective` and `block`, see suite.measure.captured, .collective and .block, and
follow the rules of suite.report.panels.
"""
from __future__ import annotations

import csv
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from suite.record import Metric
from suite.report.panels import TRAINING, Style, _grid, _on_top, _short, _title, _width
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


def layer(ax: Any, entries: Sequence[Entry], style: Style) -> bool:
    """One layer forward: computation solid, its messages by themselves hatched on top; median over records of a bar."""
    parts = ("block_compute_ms", "block_comm_ms")
    having = [e for e in entries if all(_value(e, name) for name in parts)]
    if not having:
        return False
    ticks, cells, offsets = _grid(having, style, TRAINING)
    width, samples = _width(offsets), set()
    for (tick, name), group in cells.items():
        x, base = ticks.index(tick) + offsets[name], 0.0
        for part, hatch in zip(parts, ("", "////")):
            metrics = [_value(e, part) for e in group]
            samples |= {m.n for m in metrics if m.n}
            height = median(m.value for m in metrics)
            base = _on_top(ax, x, base, height, width, style.colours[name], hatch)
        ax.text(x, base, _short(base), ha="center", va="bottom", fontsize=6.5, zorder=4)
    ax.set_xticks(range(len(ticks)), ticks)
    ax.margins(y=0.12)
    ax.set_ylabel("ms")
    _title(ax, "One layer, forward", f"measured; solid: computation, hatched: messages alone; n={min(samples, default=0)} at least")
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
