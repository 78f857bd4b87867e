"""Gaps to the baseline, and how much of another method's gap a method closes: paired over seeds, with their uncertainty.

    gap            g_s = loss_s - baseline_s, of a method; h_s that of another whose case differs in precision alone (or in comm)
    difference     mean(g - h) with its t-interval over the seeds that all three have
    smallest       t(0.975, n - 1) sd(g - h) / √n: a difference below it the run could not have shown
    closed         100 (1 - Σ g / Σ h) in %, of the other's gap; its 95 % interval by Fieller's theorem on the pairs (g_s, h_s)
    finding        smaller, larger, or not separable: the interval of the difference lies below 0, above it, or holds it

Fieller's interval holds the shares R for which mean(g - R h) is within t(0.975, n - 1) standard errors of 0. Where the other's
own gap is not separable from 0, those are no bounded range: then there is no interval. None is taken over one seed.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from scipy import stats

from suite.report import losses
from suite.report.compare import metrics
from suite.report.losses import Key
from suite.report.source import Entry, columns

COMPARISON = "gap closed %"
HEADER = ("metric", "other", "n", "gap", "other_gap", "difference", "difference_low", "difference_high", "smallest",
          "closed_percent", "closed_low", "closed_high", "finding")


@dataclass(frozen=True)
class Gaps:
    """Of a method and of another one, seed by seed, in the loss's unit."""

    mine: tuple[float, ...]
    other: tuple[float, ...]

    @property
    def differences(self) -> list[float]:
        return [g - h for g, h in zip(self.mine, self.other)]

    @property
    def smallest(self) -> float | None:
        n = len(self.mine)
        return None if n < 2 else float(stats.t.ppf(0.975, n - 1)) * stdev(self.differences) / math.sqrt(n)

    @property
    def finding(self) -> str | None:
        found = losses.t_interval(self.differences)
        return None if found is None else "smaller" if found[1] < 0 else "larger" if found[0] > 0 else "not separable"

    @property
    def closed(self) -> float | None:
        """In %; None where the other has no gap to close."""
        return 100 * (1 - fmean(self.mine) / fmean(self.other)) if fmean(self.other) > 0 else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Of `closed`, in %; None for one seed, or where it is not bounded."""
        n = len(self.mine)
        if n < 2 or self.closed is None:
            return None
        g, h = fmean(self.mine), fmean(self.other)
        scale = float(stats.t.ppf(0.975, n - 1)) ** 2 / n / (n - 1)
        mine, other = [x - g for x in self.mine], [x - h for x in self.other]
        gg, hh, gh = (scale * sum(x * y for x, y in zip(*both)) for both in ((mine, mine), (other, other), (mine, other)))
        a, b, c = h * h - hh, g * h - gh, g * g - gg  # a R² - 2 b R + c <= 0
        if a <= 0:
            return None
        half = math.sqrt(max(b * b - a * c, 0.0))
        return 100 * (1 - (b + half) / a), 100 * (1 - (b - half) / a)


def gathered(pairs: Sequence[tuple[Entry, Entry]], entries: Sequence[Entry], metric: str) -> tuple[dict[Key, Gaps], list[str]]:
    """Of pairs of a method and another: family of the method -> gaps, and why pairs are in none."""
    known = {(losses.family(e), e.case["seed"]): e for e in entries if e.case["measure"] == "loss"}
    found: dict[Key, list[tuple[float, float]]] = {}
    lost = []
    for pair in pairs:
        key = losses.family(pair[0])
        bases = [known.get((losses.baseline(losses.family(e)), e.case["seed"])) for e in pair]
        if bases[0] is None or bases[0] is not bases[1] or any(base is e for base, e in zip(bases, pair)):
            lost.append(f"{pair[0].id}: no common baseline here")
            continue
        gap = []
        for entry in pair:
            values, reason = metrics((entry, bases[0]), metric)
            if reason:
                lost.append(reason)
                break
            gap.append(values[0].value - values[1].value)
        if len(gap) == 2:
            found.setdefault(key, []).append((gap[0], gap[1]))
    return {key: Gaps(*map(tuple, zip(*values))) for key, values in found.items()}, lost


def rows(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """One row for each two methods with a common baseline and each loss, of those that have a gap over two seeds at least."""
    made = []
    for groups in losses.families(entries).values():
        everyone = [e for family in groups.values() for e in family.entries]
        for key in sorted(groups):
            for other in sorted(groups):
                base = losses.baseline(key)
                if other in (key, base) or base in (key, other) or losses.baseline(other) != base:
                    continue
                partners = {e.case["seed"]: e for e in groups[other].entries}
                pairs = [(e, partners[e.case["seed"]]) for e in groups[key].entries if e.case["seed"] in partners]
                for metric in losses.METRICS:
                    found = gathered(pairs, everyone, metric)[0].get(key)
                    if found and len(found.mine) > 1:
                        made.append(_row(groups, key, other, metric, found))
    return sorted(made, key=lambda r: (r["origin"] != "run", r["origin"], r["machine"], r["case"], r["other"], r["metric"]))


def _row(groups: Mapping[Key, losses.Family], key: Key, other: Key, metric: str, found: Gaps) -> dict[str, Any]:
    row = columns(groups[key].entries[0])
    del row["seed"]
    spread, closed = losses.t_interval(found.differences), found.interval or (None, None)
    return {**row, "case": groups[key].entries[0].id, "metric": metric, "other": groups[other].entries[0].id, "n": len(found.mine),
            "gap": fmean(found.mine), "other_gap": fmean(found.other), "difference": fmean(found.differences),
            "difference_low": spread[0], "difference_high": spread[1], "smallest": found.smallest,
            "closed_percent": found.closed, "closed_low": closed[0], "closed_high": closed[1], "finding": found.finding}
