"""Panels of the figures: each draws one quantity of one model at one source into given axes. Imports no plotting library.

`Style` fixes the colour, marker and dash of a method over the whole figure. A panel draws only numbers of one kind, or says
which part is of which kind, and names n and the spread it shows.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from suite.report.losses import METRICS, Comparison, compare, curve, smooth, t_interval
from suite.report.source import BASELINE, Entry, variant
from suite.workload import models

MARKERS = "osD^vPX*<>"
DASHES = ("-", "--", "-.", ":")
TRAINING = ("steps", "optim.", "data.text", "data.tokenizer", "init")  # moves a loss, neither bytes nor time
HIDDEN = {"model", "seed", "mesh.tp", "factor", "layout", "precision", "implementation", "measure", "device"}  # said elsewhere
BAND = "0.85"


@dataclass(frozen=True)
class Style:
    """method -> colour; markers and dashes follow the order of methods, so that colour is never the only sign."""

    colours: Mapping[str, Any]

    def marker(self, name: str) -> str:
        return MARKERS[list(self.colours).index(name) % len(MARKERS)]

    def dash(self, name: str) -> str:
        return DASHES[list(self.colours).index(name) % len(DASHES)]


@dataclass(frozen=True)
class Bar:
    """One quantity as bars: metric, what it is called and its unit on the axis."""

    metric: str
    title: str
    unit: str


BARS = (
    Bar("tokens_per_second", "Throughput", "tokens/s"),
    Bar("model_tflops", "Model FLOP rate", "TFLOP/s a GPU or process"),
    Bar("peak_memory", "Peak memory", "GiB a GPU"),
    Bar("sm_active", "SMs active", "%"),
    Bar("comm_share", "Communication's share of a step", "%"),
    Bar("codec_l2_error", "Codec error on captured messages", "% (relative L2, spread over messages)"),
    Bar("zero_fraction_forward", "Nonzero activations that decode to zero", "%"),
    Bar("zero_fraction_backward", "Nonzero gradients that decode to zero", "%"),
    Bar("codec_gb_per_s", "Encode and decode", "GB/s read and written"),
    Bar("copy_gb_per_s", "A copy beside them", "GB/s read and written"),
    Bar("default_over_row", "Step with default options over the row's", "x, below 1: the default is faster"),
    Bar("checkpoint_mb_per_ms", "Memory that recomputing saves", "MB a ms of step time"),
)


def places(entries: Sequence[Entry], hidden: tuple[str, ...] = ()) -> dict[str, str]:
    """id -> tick label: TP, and whatever else tells two bars of one method apart; fields that begin with `hidden` do not."""
    told = {}
    for e in entries:
        told[e.id] = {k.rpartition(".")[2]: v for k, v in e.flat.items()
                      if k not in HIDDEN and not k.startswith(("comm.", *hidden)) and (k, v) != ("link", "none")}
        told[e.id] |= {k: options for k in ("layout", "precision") if (options := variant(e.flat[k], BASELINE[k]))}
    keys = sorted({k for one in told.values() for k in one})
    apart = [k for k in keys if len({one.get(k) for one in told.values() if k != "link" or k in one}) > 1]
    return {e.id: "\n".join([f"TP {e.flat['mesh.tp']}", *(_line(k, one[k]) for k in apart if k in (one := told[e.id]))])
            for e in entries}


def _line(key: str, value: str) -> str:
    return value if "=" in value else f"{key} {value}"


Grid = tuple[list[str], dict[tuple[str, str], list[Entry]], dict[str, float]]


def _grid(entries: Sequence[Entry], style: Style, hidden: tuple[str, ...] = ()) -> Grid:
    """Tick labels in order, entries by (tick, method), and each method's offset from the tick."""
    where = places(entries, hidden)
    order = sorted({(e.case["mesh"]["tp"], where[e.id]) for e in entries})
    cells: dict[tuple[str, str], list[Entry]] = {}
    for e in entries:
        cells.setdefault((where[e.id], e.method), []).append(e)
    used = [m for m in style.colours if any(m == name for _, name in cells)]
    width = _width(used)
    return [label for _, label in order], cells, {m: (i - (len(used) - 1) / 2) * width for i, m in enumerate(used)}


def _width(methods: Sized) -> float:
    """Of a bar, in ticks."""
    return min(0.3, 0.8 / max(1, len(methods)))


def _title(ax: Any, what: str, detail: str) -> None:
    ax.set_title(what, fontsize=9.5, pad=17)
    ax.annotate(detail, (0.5, 1), (0, 5), xycoords="axes fraction", textcoords="offset points", ha="center", fontsize=7,
                color="0.35")


def _on_top(ax: Any, x: float, base: float, height: float, width: float, colour: Any, hatch: str) -> float:
    """A part of a stacked bar, filled or hatched; gives where the next one stands."""
    ax.bar([x], [height], width * 0.92, bottom=[base], color="white" if hatch else colour, edgecolor=colour, hatch=hatch,
           linewidth=1, zorder=3)
    return base + height


def _short(value: float) -> str:
    """Three significant digits, as fits above a bar."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _of(counts: set[tuple[int, int]]) -> str:
    """`3 of 3`, or the several that occur."""
    return ", ".join(f"{n} of {of}" for n, of in sorted(counts))


def empty(ax: Any, why: str) -> None:
    ax.text(0.5, 0.5, why, ha="center", va="center", transform=ax.transAxes, color="0.4", fontsize=9, wrap=True)
    ax.set_xticks([])
    ax.set_yticks([])


def curves(ax: Any, entries: Sequence[Entry], style: Style) -> bool:
    """Training loss over steps at the TP that has most methods: mean over seeds, the baseline's seeds as a band."""
    lines = {e.id: c for e in entries if e.status == "ok" and e.case["measure"] == "loss" and (c := curve(e)) is not None}
    having = [e for e in entries if e.id in lines]
    if not having:
        return False
    degrees = {tp: {e.method for e in having if e.case["mesh"]["tp"] == tp} for tp in {e.case["mesh"]["tp"] for e in having}}
    tp = max(degrees, key=lambda d: (len(degrees[d]), d))
    counts = set()
    runs = [e for e in entries if e.case["measure"] == "loss" and e.case["mesh"]["tp"] == tp]
    for place, name in enumerate(style.colours):
        asked = [e for e in runs if e.method == name]
        group = [lines[e.id] for e in asked if e.id in lines]
        if not group:
            continue
        counts.add((len(group), len(asked)))
        length = min(len(c.steps) for c in group)
        smoothed = [smooth(c, max(1, length // 20)) for c in group]
        steps = group[0].steps[:length]
        if name == "baseline" and len(group) > 1:
            low, high = ([f(c.loss[i] for c in smoothed) for i in range(length)] for f in (min, max))
            ax.fill_between(steps, low, high, color=BAND, linewidth=0, zorder=1)
        ax.plot(steps, [fmean(c.loss[i] for c in smoothed) for i in range(length)], style.dash(name), color=style.colours[name],
                linewidth=max(1.0, 3.4 - place), zorder=3)  # thick below thin: equal curves stay visible
    _title(ax, f"Training loss, TP {tp}", f"measured; mean over seeds, n={_of(counts)}; band: baseline's seeds")
    ax.set_xlabel("step")
    ax.set_ylabel("loss (nats/token)")
    return True


def difference(ax: Any, entries: Sequence[Entry], style: Style) -> bool:
    """Final loss against the same-seed baseline in %, with the t-interval over seeds, and the baseline's band behind."""
    runs = [e for e in entries if e.case["measure"] == "loss"]
    every = compare(runs)
    metric = next((m for m in reversed(METRICS) if any(c.metric == m and c.differences for c in every)), None)
    found = [c for c in every if c.metric == metric and c.differences]
    if not found:
        return False
    shown = [e for c in found for e in c.family.entries]
    ticks, _, offsets = _grid(shown, style)
    where = places(shown)
    counts: set[tuple[int, int]] = set()
    for c in found:
        name, x = c.family.entries[0].method, ticks.index(where[c.family.entries[0].id])
        if name == "baseline":
            if c.band:
                ax.fill_between([x - 0.45, x + 0.45], *[[edge] * 2 for edge in c.band], color=BAND, linewidth=0, zorder=1)
            continue
        _point(ax, c, x + offsets[name], style, name)
        counts.add((len(c.differences), len(c.family.entries)))
    if not counts:
        return False
    ax.axhline(0, color="0.3", linewidth=0.8, zorder=2)
    ax.set_xticks(range(len(ticks)), ticks)
    ax.set_xlim(-0.6, len(ticks) - 0.4)
    name = str(metric).replace("_", " ")
    _title(ax, f"Final {name} against baseline", f"measured; 95 % t-interval over seeds, n={_of(counts)}; band: baseline's seeds")
    ax.set_ylabel("difference (%)")
    return True


def _point(ax: Any, c: Comparison, x: float, style: Style, name: str) -> None:
    values = list(c.differences.values())
    interval = t_interval(values)
    mean = fmean(values)
    spread = [[mean - interval[0]], [interval[1] - mean]] if interval else None
    ax.errorbar([x], [mean], yerr=spread, fmt=style.marker(name), color=style.colours[name], markersize=6, capsize=3,
                linewidth=1.4, zorder=3)


def wire(ax: Any, entries: Sequence[Entry], style: Style) -> bool:
    """Bytes one rank sends in a step: counted part solid, modelled part (the library's collectives) hatched."""
    having = [e for e in entries if e.metric("wire_bytes") and e.case["measure"] != "collective"]  # that sends one message
    if not having:
        return False
    ticks, cells, offsets = _grid(having, style, TRAINING)
    top = max(m.value for e in having if (m := e.metric("wire_bytes")))
    scale, unit = next((s, u) for s, u in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")) if top >= s or s == 1.0)
    width = _width(offsets)
    for (tick, name), group in cells.items():
        x, base = ticks.index(tick) + offsets[name], 0.0
        for kind, hatch in (("counted", ""), ("modelled", "////")):
            values = [m.value for e in group if (m := e.metric(f"wire_bytes_{kind}"))]
            if not values:
                continue
            height = median(values) / scale
            base = _on_top(ax, x, base, height, width, style.colours[name], hatch)
        ax.text(x, base, _short(base), ha="center", va="bottom", fontsize=6.5, zorder=4)
    ax.set_xticks(range(len(ticks)), ticks)
    ax.margins(y=0.12)
    _title(ax, "Sent by one rank in a training step", "solid: counted; hatched: modelled (ring-equivalent)")
    ax.set_ylabel(unit)
    return True


def bars(ax: Any, entries: Sequence[Entry], style: Style, bar: Bar) -> bool:
    """A metric as bars with q20 to q80 of the step samples; more than one record of a bar: median, lowest and highest."""
    having = [e for e in entries if (m := e.metric(bar.metric)) is not None and m.value is not None]
    if not having:
        return False
    ticks, cells, offsets = _grid(having, style, TRAINING)
    width = _width(offsets)
    kinds, samples, quantiles = set(), set(), False
    for (tick, name), group in sorted(cells.items()):
        metrics = [m for e in group if (m := e.metric(bar.metric)) is not None and m.value is not None]
        kinds |= {m.kind for m in metrics}
        samples |= {m.n for m in metrics if m.n}
        quantiles |= any(m.q20 is not None for m in metrics)
        value = median(m.value for m in metrics)
        low = min(m.value if m.q20 is None else m.q20 for m in metrics)
        high = max(m.value if m.q80 is None else m.q80 for m in metrics)
        x = ticks.index(tick) + offsets[name]
        ax.bar([x], [value], width * 0.92, color=style.colours[name], edgecolor="white", linewidth=0.5, zorder=3)
        if high > low:
            reach = [[max(0.0, value - low)], [max(0.0, high - value)]]
            ax.errorbar([x], [value], yerr=reach, color="0.2", capsize=2, linewidth=1, zorder=4)
        ax.text(x, max(high, value), _short(value), ha="center", va="bottom", fontsize=6.5, zorder=5)
    device = " and ".join(sorted({"GPU" if e.case["device"] == "cuda" else "CPU" for e in having}))
    n = f"{min(samples)}" if len(samples) == 1 else f"{min(samples)} to {max(samples)}" if samples else ""
    ax.set_xticks(range(len(ticks)), ticks)
    ax.margins(y=0.12)
    detail = f"; median, q20 to q80, n={n}" if quantiles else f"; n={n} samples" if n else ""
    _title(ax, f"{bar.title} ({device})", f"{' and '.join(sorted(kinds))}{detail}")
    ax.set_ylabel(bar.unit)
    return True


def order(entries: Sequence[Entry]) -> list[str]:
    """Methods, the baseline first."""
    return sorted({e.method for e in entries}, key=lambda name: (name != "baseline", name))


def caption(entries: Sequence[Entry]) -> str:
    """What is not in the figure, and why."""
    failed = [f"{e.id} ({e.reason})" for e in entries if e.status == "failed"]
    waiting: dict[str, int] = {}
    for e in entries:
        if e.record is None:
            waiting[str(e.reason)] = waiting.get(str(e.reason), 0) + 1
    texts = [f"failed: {'; '.join(failed[:4])}{f' and {len(failed) - 4} more' if len(failed) > 4 else ''}"] if failed else []
    texts += [f"not run: {', '.join(f'{n} ({reason})' for reason, n in sorted(waiting.items()))}"] if waiting else []
    return "Not shown: " + ". ".join(texts) if texts else ""


def rows_of(entries: Sequence[Entry]) -> dict[tuple[str, str, str], list[Entry]]:
    """(source, model, device) -> its entries, also those without numbers, where at least one is ok; in order."""
    found: dict[tuple[str, str, str], list[Entry]] = {}
    for e in entries:
        found.setdefault((e.label, e.case["model"], "GPU" if e.case["device"] == "cuda" else "CPU"), []).append(e)
    cards = list(models())
    ordered = sorted(found, key=lambda key: (key[0], cards.index(key[1]) if key[1] in cards else len(cards), key))
    return {key: found[key] for key in ordered if any(e.status == "ok" for e in found[key])}
