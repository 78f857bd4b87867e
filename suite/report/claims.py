"""Claims and their verdicts: workloads/claims.csv x records -> results/tables/claims.csv and claims.md.

Columns of workloads/claims.csv; `-` where there is nothing, an empty cell is an error:

    id, paper, where, statement    what is claimed and where it stands
    metric, unit                   the metric of the records that answers it, and the unit of the compared number
    paper_value                    number or text, as it stands there, or `not public`; - in a claim of our own (paper: triaxis)
    comparison                     value | ratio (numerator / denominator) | difference (numerator - denominator) |
                                   difference % (100 (numerator / denominator - 1)) | gap closed % (of the denominator's gap
                                   to the baseline of both, over seeds; suite.report.gaps)
    numerator, denominator         selectors (suite.report.selector)
    combine                        over the pairs: mean (with a t-interval), min or max (`up to`)
    direction, target, tolerance   at least | at most | about; our own number to judge against (-: paper_value); slack in `unit`
    same_setting                   selector which all records must match for `setting: same`; - where the paper's is not public
    note                           what a reader must know

Verdicts: `replicated` where the number meets its target within the tolerance and every pair has one; `partly` where it
goes the claimed way without reaching it, meets it only within the measured spread, or a pair is missing (n of N, where a
numerator without a denominator and the reverse are missing pairs too); `not replicated`; `not run: reason`. A ratio is formed
only from ok records of one source, machine and version of torch, triton and CUDA, never from emulated numbers, and says how
far apart in time its records were started. A claim gives one row a source that has its cases. A metric of
suite.report.overhead is in no record: `triaxis overhead` measures it with one of the numerator's cases.

The spread of a number (q20, q80: see suite.report.compare) is that of the pair shown (min, max) or the mean of the pairs' ends.
"""
from __future__ import annotations

import argparse
import csv
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from suite.case import Case
from suite.record import RESULTS, publish
from suite.report import compare, gaps, overhead, selector
from suite.report.losses import t_interval
from suite.report.overhead import Overhead
from suite.report.source import NOT_RUN, RUN, Entry, ReportError, commit, main
from suite.report.write import markdown, number, write_csv
from suite.workload import FOLDER, Workload

HEADER = ("id", "paper", "where", "statement", "metric", "paper_value", "unit", "comparison", "numerator", "denominator", "combine",
          "direction", "target", "tolerance", "same_setting", "note")
WORDS = {"comparison": ("value", "ratio", "difference", "difference %", gaps.COMPARISON), "combine": ("mean", "min", "max"),
         "direction": ("at least", "at most", "about", "-")}
UNDEFINED = "not run: no case defined yet"
NAMED = 2  # reasons that a note gives
OWN = "triaxis"  # the paper of our own claims, which have targets and no paper's values
NO_EFFECT = {"ratio": 1.0, "difference": 0.0, "difference %": 0.0, gaps.COMPARISON: 0.0}
OUT = ("id", "paper", "where", "statement", "metric", "paper_value", "unit", "comparison", "direction", "target", "tolerance",
       "origin", "machine", "value", "low", "high", "q20", "q80", "samples", "n", "of", "kind", "seconds_apart", "verdict",
       "setting", "cases", "note")


@dataclass(frozen=True)
class Claim:
    """One row as text. `error`: file, line and column of what is wrong with it; then only the verdict says so."""

    cells: Mapping[str, str]
    error: str | None = None

    def __getitem__(self, key: str) -> str:
        return self.cells.get(key, "-")

    @property
    def target(self) -> float | None:
        """The number to be met; None where neither the row nor the paper gives one."""
        given = self["paper_value"] if self["target"] == "-" else self["target"]
        try:
            return float(given) if math.isfinite(float(given)) else None
        except ValueError:
            return None


@dataclass(frozen=True)
class Outcome:
    """A claim at one source. `interval`: of the mean over pairs; `spread`: q20 and q80 of the number; `samples`: behind each
    median, the fewest. `apart`: seconds between the starts of the compared records, the longest over the pairs."""

    claim: Claim
    verdict: str
    origin: str = "-"
    machine: str = "-"
    setting: str = "other"
    value: float | None = None
    interval: tuple[float, float] | None = None
    spread: tuple[float, float] | None = None
    samples: int | None = None
    n: int = 0
    of: int = 0
    kind: str | None = None
    apart: float | None = None
    cases: tuple[str, ...] = ()  # behind the number
    note: str = ""

    @property
    def run(self) -> bool:
        return not self.verdict.startswith(NOT_RUN)


def read(path: Path) -> list[Claim]:
    """All rows. A faulty row becomes a Claim with an error; a faulty header or a repeated id raises ReportError."""
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.reader(file)
        header = tuple(next(reader, ()))
        if header != HEADER:
            odd = sorted(set(header) ^ set(HEADER)) or ["order"]
            raise ReportError(f"{path.name}: line 1: column {odd[0]} is missing, unknown or misplaced")
        claims = [_claim(f"{path.name}: line {reader.line_num}", cells) for cells in reader if cells]
    ids = [c["id"] for c in claims if c.error is None]
    twice = sorted({i for i in ids if ids.count(i) > 1})
    if twice:
        raise ReportError(f"{path.name}: id {twice[0]} is there twice")
    return claims


def _claim(where: str, cells: Sequence[str]) -> Claim:
    row = dict(zip(HEADER, (c.strip() for c in cells)))
    if len(cells) != len(HEADER):
        return Claim(row, f"{where}: {len(cells)} cells, expected {len(HEADER)}")
    for key in HEADER:
        if not row[key]:
            return Claim(row, f"{where}: column {key}: is empty")
        if key in WORDS and row[key] not in WORDS[key]:
            return Claim(row, f"{where}: column {key}: {row[key]!r}, expected {' | '.join(WORDS[key])}")
        try:
            if key in ("numerator", "denominator", "same_setting") and row[key] != "-":
                selector.parse(row[key])
            if key in ("target", "tolerance") and row[key] != "-" and not math.isfinite(float(row[key])):
                raise ValueError(f"{row[key]} is no number")
        except ValueError as error:
            return Claim(row, f"{where}: column {key}: {error}")
    if row["numerator"] == "-" or (row["denominator"] == "-") != (row["comparison"] == "value"):
        key = "numerator" if row["numerator"] == "-" else "denominator"
        return Claim(row, f"{where}: column {key}: {row[key]!r} does not fit comparison {row['comparison']}")
    if row["paper"] == OWN and row["paper_value"] != "-":
        return Claim(row, f"{where}: column paper_value: {row['paper_value']!r}, expected - in a claim of our own: it has a target")
    claim = Claim(row)
    if claim.target is not None and row["direction"] == "-":
        return Claim(row, f"{where}: column direction: a number needs at least | at most | about")
    return claim


def judge(claim: Claim, value: float, complete: bool, spread: float = 0.0, interval: tuple[float, float] | None = None) -> str:
    """The verdict on a number. `spread`: half its measured spread, in its unit; `complete`: every pair has a number. A mean is
    as good as its `interval`: wholly within the target it is replicated, wholly outside it is not, else partly."""
    target, direction, slack = claim.target, claim["direction"], 0.0 if claim["tolerance"] == "-" else float(claim["tolerance"])
    if target is None:
        return "not run: no public value to compare with"

    def met(allowed: float, number: float = value) -> bool:
        below, above = number >= target - allowed, number <= target + allowed
        return {"at least": below, "at most": above, "about": below and above}[direction]

    if met(slack):
        return "replicated" if complete and all(met(slack, end) for end in interval or ()) else "partly"
    if interval and (met(slack, interval[0]) or met(slack, interval[1])):
        return "partly"
    none = NO_EFFECT.get(claim["comparison"])
    way = {"at least": 1.0, "at most": -1.0, "about": math.copysign(1.0, target - none) if none is not None else 0.0}[direction]
    if met(slack + spread) or (none is not None and (value - none) * way > 0):
        return "partly"
    return "not replicated"


def defined(workloads: Mapping[str, Workload]) -> list[Entry]:
    """Every case that there is, as one without a record."""
    return [Entry(RUN, "-", row.id, row.case.row(), NOT_RUN, "no record yet", row.workload, row.size)
            for w in workloads.values() for row in w.rows]


def outcomes(claims: Sequence[Claim], entries: Sequence[Entry], workloads: Mapping[str, Workload],
             overheads: Sequence[Overhead] = ()) -> list[Outcome]:
    """Every claim at every source that has its cases, in the order of the file; one row where there is none."""
    known_cases, lacking = defined(workloads), _lacking(entries, workloads)
    rows: list[Outcome] = []
    for claim in claims:
        if claim.error:
            rows.append(Outcome(claim, f"not run: {claim.error}"))
            continue
        if claim["metric"] in overhead.NAMES:
            rows += [_overhead(claim, one) for one in overheads] or [Outcome(claim, overhead.MISSING)]
            continue
        top = selector.parse(claim["numerator"])
        bottom = selector.parse(claim["denominator"]) if claim["denominator"] != "-" else None
        mine = [e for e in entries if top.matches(e)]
        others = [e for e in entries if bottom and bottom.matches(e)]
        sources = list(dict.fromkeys(e.source for e in mine))
        found = []
        for source in sources:
            here = [[e for e in side if e.source == source] for side in (mine, others)]
            for side, one in zip(here, (top, bottom)):
                side += [e for e in lacking[source] if one and one.matches(e)]
            if claim["comparison"] == gaps.COMPARISON:
                outcome = _closed(claim, *here, selector.free(top, bottom), [e for e in entries if e.source == source])
            else:
                outcome = _at(claim, *here, selector.free(top, bottom) if bottom else frozenset(), bottom is not None)
            found.append(replace(outcome, origin=source[0], machine=source[1]))
        if not found:
            anywhere = any(map(top.matches, known_cases)) and (bottom is None or any(map(bottom.matches, known_cases)))
            found = [Outcome(claim, "not run: no record yet" if anywhere else UNDEFINED)]
        rows += found
    return rows


def _lacking(entries: Sequence[Entry], workloads: Mapping[str, Workload]) -> dict[tuple[str, str], list[Entry]]:
    """For each source the cases that its machine could run and that it has no record of. Those of a run are entries already."""
    found = {source: [] for source in dict.fromkeys(e.source for e in entries)}
    cases = {row.id: row.case for workload in workloads.values() for row in workload.rows}
    for origin, machine in found:
        known = {e.id for e in entries if e.source == (origin, machine)}
        found[origin, machine] = [
            replace(e, origin=origin, machine=machine, reason=f"{e.id}: no record here") for e in defined(workloads)
            if origin != RUN and e.id not in known and _could_run(cases[e.id], machine)]
    return found


def _could_run(case: Case, machine: str) -> bool:
    """Whether a machine of that name (`cpu2`, `h200x2`) has what a case needs."""
    gpus = re.fullmatch(r".*x(\d+)", machine)
    return case.gpus <= int(gpus[1]) and case.device == "cuda" if gpus else case.device == "cpu"


def _overhead(claim: Claim, measured: Overhead) -> Outcome:
    metric = measured.metric(claim["metric"])
    known = {"origin": measured.origin, "machine": measured.machine, "of": 1}
    if metric is None or metric.value is None:
        reason = next((m.reason for m in measured.metrics if m.reason), f"no {claim['metric']} in it")
        return Outcome(claim, f"not run: triaxis overhead: {reason}", **known)
    same = claim["same_setting"]
    here = selector.parse(same).terms.get("machine") if same != "-" else None
    setting = "same" if here and selector.fits(here, measured.machine) else "other"
    spread = compare.spread("value", [measured.metric(overhead.NAMES[0])])  # of the pairs; a bound has none of its own
    return Outcome(claim, judge(claim, metric.value, True), setting=setting, value=metric.value, spread=spread, samples=metric.n,
                   n=1, kind=metric.kind, **known)


def _at(claim: Claim, top: list[Entry], bottom: list[Entry], may_differ: frozenset[str], paired: bool) -> Outcome:
    try:
        pairs = selector.pairs(top, bottom, may_differ) if paired else [(e,) for e in top]
    except ValueError as error:
        return Outcome(claim, f"not run: {error}")
    numbers: list[float] = []
    spreads: list[tuple[float, float] | None] = []
    used, lost = [], []
    kinds: set[str] = set()
    counts: set[int] = set()
    for pair in pairs:
        metrics, reason = compare.metrics(pair, claim["metric"])
        if reason:
            lost.append(reason)
            continue
        numbers.append(compare.number(claim["comparison"], [m.value for m in metrics]))
        spreads.append(compare.spread(claim["comparison"], metrics))
        kinds.add(" / ".join(dict.fromkeys(m.kind for m in metrics)))
        counts |= {m.n for m in metrics if m.n is not None and spreads[-1]}
        used.append(pair)
    lost += selector.alone(top, bottom, pairs) if paired else []
    of = len(numbers) + len(lost)
    same = claim["same_setting"]
    known = [e for pair in used or pairs or [top] for e in pair]
    setting = "same" if same != "-" and all(selector.parse(same).matches(e) for e in known) else "other"
    reasons = sorted(set(lost))
    more = [f"and {len(reasons) - NAMED} more"] if len(reasons) > NAMED else []
    missing = f"{len(numbers)} of {of}: {'; '.join(reasons[:NAMED] + more)}" if lost else ""
    if not numbers:
        return Outcome(claim, f"not run: {lost[0]}", setting=setting, of=of, note=missing if of > 1 else "")
    value = {"mean": fmean, "min": min, "max": max}[claim["combine"]](numbers)
    if claim["combine"] == "mean":
        spread = tuple(map(fmean, zip(*spreads))) if None not in spreads else None
    else:
        spread = spreads[numbers.index(value)]
    interval = t_interval(numbers) if claim["combine"] == "mean" else None
    seconds = compare.seconds(used) if paired else None
    notes = [missing, "start times unknown" if paired and seconds is None else "",
             "" if len({commit(e.record) for e in known if e.record}) < 2 else "from different commits"]
    return Outcome(
        claim, judge(claim, value, not lost, (spread[1] - spread[0]) / 2 if spread else 0.0, interval), setting=setting,
        value=value, interval=interval, spread=spread, samples=min(counts, default=None),
        n=len(numbers), of=of, kind="; ".join(sorted(kinds)), apart=seconds,
        cases=tuple(dict.fromkeys(e.id for pair in used for e in pair)), note="; ".join(n for n in notes if n))


def _closed(claim: Claim, top: list[Entry], bottom: list[Entry], may_differ: frozenset[str], everyone: list[Entry]) -> Outcome:
    """Mean over the numerator's families of what each closes over its seeds; their intervals' ends are averaged likewise."""
    try:
        pairs = selector.pairs(top, bottom, may_differ)
    except ValueError as error:
        return Outcome(claim, f"not run: {error}")
    found, lost = gaps.gathered(pairs, everyone, claim["metric"])
    lost += selector.alone(top, bottom, pairs)
    n = sum(len(one.mine) for one in found.values())
    missing = [f"{n} of {n + len(lost)}: {'; '.join(sorted(set(lost)))}"] if lost else []
    if not found or any(one.closed is None for one in found.values()):
        reason = "the denominator has no gap to close" if found else lost[0]
        return Outcome(claim, f"not run: {reason}", n=n, of=n + len(lost), note="; ".join(missing))
    intervals = [one.interval for one in found.values()]
    interval = tuple(map(fmean, zip(*intervals))) if None not in intervals else None
    value = fmean(one.closed for one in found.values())
    same = claim["same_setting"]
    setting = "same" if same != "-" and all(selector.parse(same).matches(e) for pair in pairs for e in pair) else "other"
    shown = [] if interval else ["no bounded interval: one seed, or the denominator's gap is not separable from 0"]
    return Outcome(claim, judge(claim, value, not lost and interval is not None, interval=interval), setting=setting, value=value,
                   interval=interval, n=n, of=n + len(lost), kind="measured", apart=compare.seconds(pairs),
                   cases=tuple(dict.fromkeys(e.id for pair in pairs for e in pair)), note="; ".join([*missing, *shown]))


def row(outcome: Outcome) -> dict[str, Any]:
    """A row of results/tables/claims.csv."""
    claim, o = outcome.claim, outcome
    note = "; ".join(n for n in (o.note, "" if claim["note"] == "-" else claim["note"]) if n)
    return {**{k: claim[k] for k in OUT if k in HEADER}, "origin": o.origin, "machine": o.machine, "value": o.value,
            "low": o.interval[0] if o.interval else None, "high": o.interval[1] if o.interval else None,
            "q20": o.spread[0] if o.spread else None, "q80": o.spread[1] if o.spread else None, "samples": o.samples,
            "n": o.n, "of": o.of, "kind": o.kind, "seconds_apart": o.apart, "verdict": o.verdict, "setting": o.setting,
            "cases": " ".join(o.cases), "note": note}


def aim(claim: Claim) -> str:
    """What our number is held against, and whose it is: the paper's value, our own target."""
    parts = [] if claim["paper_value"] == "-" else [f"paper: {claim['paper_value']}"]
    parts += [] if claim["target"] == "-" else [f"target: {claim['direction']} {claim['target']}"]
    return "; ".join(parts) or "-"


def ours(outcome: Outcome) -> str:
    """Our number as text: value, interval, spread, n of N."""
    if outcome.value is None:
        return "-"
    interval = f" [{number(outcome.interval[0])}, {number(outcome.interval[1])}]" if outcome.interval else ""
    spread = f"q20-q80 {number(outcome.spread[0])} to {number(outcome.spread[1])}" if outcome.spread else "no q20-q80"
    samples = f"{outcome.samples} pairs" if outcome.claim["metric"] in overhead.NAMES else f"medians of {outcome.samples}"
    samples = f", {samples}" if outcome.samples else ""
    return f"{number(outcome.value)}{interval} {outcome.claim['unit']}, {spread} (n={outcome.n} of {outcome.of}{samples})"


def rerun(outcome: Outcome) -> str:
    """The command that measures the number again, as code."""
    if outcome.claim["metric"] in overhead.NAMES:
        return "`triaxis overhead CASE`"
    return f"`triaxis run {outcome.cases[0]}`"


def table(rows: Sequence[Outcome]) -> str:
    """Claims as a Markdown table."""
    return markdown(("claim", "statement", "aim", "ours", "kind", "where", "records apart", "verdict", "setting"), (
        (o.claim["id"], o.claim["statement"], f"{aim(o.claim)} ({o.claim['where']})", ours(o), o.kind or "-",
         o.machine if o.origin in (RUN, "-") else f"{o.machine}, {o.origin}", "-" if o.apart is None else f"{o.apart:.0f} s",
         f"{o.verdict}{f' ({o.note})' if o.note else ''}", f"setting: {o.setting}") for o in rows))


def write(results: Path, file: Path, entries: Sequence[Entry], workloads: Mapping[str, Workload]) -> list[Path]:
    rows = outcomes(read(file), entries, workloads, overhead.overheads(results, entries))
    page = results / "tables" / "claims.md"
    text = ("# Claims\n\nBrackets: 95 % t-interval of the mean over pairs of records. q20-q80: spread of the number, from that of "
            "the medians it is made of. `n` of how many pairs had a number.\n\n")
    paths = [write_csv(results / "tables" / "claims.csv", OUT, map(row, rows))]
    publish(page, text + table(rows))
    return [*paths, page]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--claims", type=Path, default=FOLDER / "claims.csv")


def common(parser: argparse.ArgumentParser) -> None:
    """Options of a command that reads records, workloads and claims."""
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--workloads", type=Path, default=FOLDER)
    options(parser)


if __name__ == "__main__":
    main(__doc__, lambda arguments, workloads, entries: write(arguments.results, arguments.claims, entries, workloads), options)
