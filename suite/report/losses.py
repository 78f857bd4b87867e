"""Losses compared: pairwise with the same-seed baseline, with a t-interval over seeds, against the baseline's own band.

    baseline of a case   the same case with comm and precision at their baselines; where they are already there, with the
                         layout at its baseline. The factor belongs to the model and stays.
    difference           d_s = 100 (loss_s / baseline_s - 1) in %, seed by seed
    interval             mean(d) +- t(0.975, n - 1) sd(d) / sqrt(n), over the seeds that both sides finished; none for n < 2
    band                 100 (min / mean - 1) and 100 (max / mean - 1) of the baseline's losses over its seeds

A family is a case without its seed. `of` counts all its seeds, also failed ones and those not run: n of them have a loss.
Records that ran with other versions of torch, triton or CUDA than the baseline's give no difference; `missing` says so.
`place` is where the mean difference lies: below, inside or above the band (below: too good is a finding as well).
"""
from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from scipy import stats

from suite.report.source import BASELINE, NOT_RUN, Entry, ReportError, apart, columns, variant

METRICS = ("train_loss", "validation_loss")
Key = tuple[tuple[str, str], ...]


def t_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of the mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    half = float(stats.t.ppf(0.975, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


def family(entry: Entry) -> Key:
    """Everything about the case but its seed and its name."""
    return tuple(sorted((k, v) for k, v in entry.flat.items() if k != "seed"))


def baseline(key: Key) -> Key:
    """The family that this one is compared with; itself where it is a baseline."""
    flat = dict(key)
    plain = {k: BASELINE["comm.tp.forward"] if k.startswith("comm.") else v for k, v in flat.items()}
    if variant(flat["precision"], BASELINE["precision"]) is None:
        plain["precision"] = BASELINE["precision"]
    if plain == flat:
        plain["layout"] = BASELINE["layout"]
    return tuple(sorted(plain.items()))


@dataclass(frozen=True)
class Family:
    """One case over its seeds at one source."""

    key: Key
    entries: tuple[Entry, ...]  # by seed

    def losses(self, metric: str) -> dict[int, float]:
        """seed -> loss, of the seeds that have one."""
        found = {e.case["seed"]: e.metric(metric) for e in self.entries}
        return {seed: m.value for seed, m in found.items() if m is not None and m.value is not None}

    @property
    def lost(self) -> list[str]:
        """Seeds without a result and why."""
        return [f"seed {e.case['seed']}: {'' if e.status == NOT_RUN else 'failed: '}{e.reason}"
                for e in self.entries if e.status != "ok"]


def families(entries: Sequence[Entry]) -> dict[tuple[str, str], dict[Key, Family]]:
    """source -> family key -> Family, of the loss runs."""
    found: dict[tuple[str, str], dict[Key, list[Entry]]] = {}
    for entry in entries:
        if entry.case["measure"] == "loss":
            found.setdefault(entry.source, {}).setdefault(family(entry), []).append(entry)
    return {source: {key: Family(key, tuple(sorted(group, key=lambda e: (e.case["seed"], e.id)))) for key, group in groups.items()}
            for source, groups in found.items()}


def band(values: Sequence[float]) -> tuple[float, float] | None:
    """Lowest and highest in % of the mean; None for fewer than two."""
    if len(values) < 2:
        return None
    mean = fmean(values)
    return 100 * (min(values) / mean - 1), 100 * (max(values) / mean - 1)


@dataclass(frozen=True)
class Comparison:
    """A family against its baseline, for one loss."""

    family: Family
    base: Family | None
    metric: str
    losses: dict[int, float]
    differences: dict[int, float]  # seed -> %
    apart: tuple[str, ...] = ()  # why seeds that have both losses have no difference

    @property
    def band(self) -> tuple[float, float] | None:
        return band(list(self.base.losses(self.metric).values())) if self.base else None

    @property
    def place(self) -> str | None:
        if self.band is None or not self.differences:
            return None
        mean = fmean(self.differences.values())
        return "below" if mean < self.band[0] else "above" if mean > self.band[1] else "inside"


def compare(entries: Sequence[Entry]) -> list[Comparison]:
    """All comparisons, in the entries' order of sources."""
    rows = []
    for groups in families(entries).values():
        for key in sorted(groups):
            base = groups.get(baseline(key))
            others = {e.case["seed"]: e for e in base.entries} if base else {}
            why = {e.case["seed"]: apart(e, others[e.case["seed"]]) for e in groups[key].entries if e.case["seed"] in others}
            for metric in METRICS:
                losses = groups[key].losses(metric)
                reference = base.losses(metric) if base else {}
                both = [s for s in sorted(losses) if reference.get(s)]
                pairs = {s: 100 * (losses[s] / reference[s] - 1) for s in both if why[s] is None}
                rows.append(Comparison(groups[key], base, metric, losses, pairs, tuple(why[s] for s in both if why[s])))
    return rows


CASE_HEADER = ("metric", "value", "unit", "kind", "baseline", "baseline_value", "difference_percent")
SUMMARY_HEADER = ("metric", "kind", "n", "of", "missing", "mean", "low", "high", "difference_n", "difference_percent",
                  "difference_low", "difference_high", "band_low", "band_high", "place")


def case_rows(comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    """One row a case and loss. Only cases that have the loss; the others are in the summary's `missing`."""
    rows = []
    for c in comparisons:
        reference = {e.case["seed"]: e for e in c.base.entries} if c.base else {}
        for entry in c.family.entries:
            seed, metric = entry.case["seed"], entry.metric(c.metric)
            if metric is None or metric.value is None:
                continue
            other = reference.get(seed)
            value = other.metric(c.metric) if other else None
            rows.append({**columns(entry), "metric": c.metric, "value": metric.value, "unit": metric.unit, "kind": metric.kind,
                         "baseline": other.id if value else None, "baseline_value": value.value if value else None,
                         "difference_percent": c.differences.get(seed)})
    return sorted(rows, key=lambda r: (r["origin"] != "run", r["origin"], r["machine"], r["case"], r["metric"]))


def summary_rows(comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    """One row a family and loss, with n of how many seeds."""
    rows = []
    for c in comparisons:
        interval, differences = t_interval(list(c.losses.values())), list(c.differences.values())
        spread = t_interval(differences)
        first = c.family.entries[0]
        kinds = sorted({m.kind for e in c.family.entries if (m := e.metric(c.metric)) is not None})
        if len(kinds) > 1:
            raise ReportError(f"case {first.id}: {c.metric} is {' and '.join(kinds)} over its seeds: kinds are never mixed")
        row = columns(first)
        row["case"] = " ".join(e.id for e in c.family.entries)
        del row["seed"]
        rows.append({
            **row, "metric": c.metric, "kind": kinds[0] if kinds else None,
            "n": len(c.losses), "of": len({e.case["seed"] for e in c.family.entries}),
            "missing": "; ".join([*c.family.lost, *c.apart]) or None,
            "mean": fmean(c.losses.values()) if c.losses else None,
            "low": interval[0] if interval else None, "high": interval[1] if interval else None,
            "difference_n": len(differences), "difference_percent": fmean(differences) if differences else None,
            "difference_low": spread[0] if spread else None, "difference_high": spread[1] if spread else None,
            "band_low": c.band[0] if c.band else None, "band_high": c.band[1] if c.band else None, "place": c.place,
        })
    return sorted(rows, key=lambda r: (r["origin"] != "run", r["origin"], r["machine"], r["case"], r["metric"]))


@dataclass(frozen=True)
class Curve:
    steps: tuple[int, ...]
    loss: tuple[float, ...]


def curve(entry: Entry) -> Curve | None:
    """The training loss beside the record; None where there is no file. Raises ReportError naming file and row."""
    if entry.path is None:
        return None
    path = entry.path.with_name(f"{entry.id}.loss.csv")
    if not path.exists():
        return None
    return read_curve(path)


def read_curve(path: Path) -> Curve:
    """Columns `step` and `loss` of a loss file; the rest is not looked at."""
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        for key in ("step", "loss"):
            if key not in (reader.fieldnames or ()):
                raise ReportError(f"{path.name}: column {key} is missing")
        steps, losses = [], []
        for number, row in enumerate(reader, 2):
            try:
                steps.append(int(row["step"]))
                losses.append(float(row["loss"]))
                if not math.isfinite(losses[-1]):
                    raise ValueError
            except (TypeError, ValueError):
                raise ReportError(f"{path.name}: line {number}: step {row['step']!r}, loss {row['loss']!r}: no number") from None
    if not steps:
        raise ReportError(f"{path.name}: holds no row")
    return Curve(tuple(steps), tuple(losses))


def smooth(line: Curve, window: int) -> Curve:
    """Running mean over the last `window` rows."""
    means = [fmean(line.loss[max(0, i + 1 - window):i + 1]) for i in range(len(line.loss))]
    return replace(line, loss=tuple(means))
