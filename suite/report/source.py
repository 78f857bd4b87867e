"""What a report is made from: records of runs and references, the workloads' cases, and each machine's plan.

    results/runs/<machine>/*.json              origin `run`
    results/reference/<name>/runs/*.json       origin `reference:<name>`
    results/plan/<machine>.json                [{id, workload, size, runs, reason, seconds}], why a case has no record

`entries` gives one Entry a case and source. A case of a workload without a record is an entry too (`not run`, with the
plan's reason), so that nothing which was asked for disappears.

Metric names that the reports read (everything else is carried through): tokens_per_second, step_time, model_tflops, mfu,
hfu, train_loss, validation_loss, gpu_utilization; `wire_bytes`, `wire_bytes_counted` and `wire_bytes_modelled` are sums over
a record's traffic rows.
"""
from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from suite.case import Case, Choice
from suite.record import RESULTS, Metric, Record, RecordError, read
from suite.workload import FOLDER, SIZES, Workload, WorkloadError, load_all

RUN = "run"
NOT_RUN = "not run"
TOOLS = ("torch", "triton", "cuda")  # two numbers are compared only where these versions agree
WIRE = {"wire_bytes": None, "wire_bytes_counted": "counted", "wire_bytes_modelled": "modelled"}


class ReportError(ValueError):
    """One line: which file, row or case, and what is wrong with it."""


@dataclass(frozen=True)
class Entry:
    """A case at one source. `record` is None exactly where `status` is `not run`."""

    origin: str
    machine: str
    id: str
    case: Mapping[str, Any]  # Case.row()
    status: str  # ok, failed, not run
    reason: str | None
    workload: str  # names joined by +, empty where no workload has the case now
    size: str
    record: Record | None = None
    path: Path | None = None

    @property
    def source(self) -> tuple[str, str]:
        return self.origin, self.machine

    @property
    def label(self) -> str:
        return self.machine if self.origin == RUN else f"{self.machine}, {self.origin}"

    @cached_property
    def flat(self) -> dict[str, str]:
        """The case's fields as text, see `leaves`."""
        return leaves(self.case)

    @cached_property
    def method(self) -> str:
        """What the case does off the baseline, see `method`."""
        return method(self.case)

    def metric(self, name: str) -> Metric | None:
        """The metric of that name; `wire_bytes` from the traffic. None where the record has none or failed."""
        if self.record is None or self.status != "ok":
            return None
        return wire_bytes(self.record, name) if name in WIRE else self.record.metric(name)


def wire_bytes(record: Record, name: str = "wire_bytes") -> Metric | None:
    """Bytes one rank sends in a step: all of them, or the part of one kind (WIRE); None where there is no such traffic.

    A sum is as firm as its weakest part: the total is `counted` only where all of it is.
    """
    kind = WIRE[name]
    rows = [t for t in record.traffic if kind in (None, t.kind)]
    if not rows:
        return None
    modelled = any(t.kind == "modelled" for t in rows)
    return Metric(name, float(sum(t.wire_bytes for t in rows)), "B/step", "modelled" if modelled else "counted")


def words(choice: Mapping[str, Any] | str, axis: str) -> str:
    """A value of an axis as text: its name, then the options that are off their defaults."""
    if isinstance(choice, str):
        return choice
    off = Choice(**choice).off_default(axis)
    return str(choice["name"]) + "".join(f"-{k}={text(v)}" for k, v in off.items())


def text(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def leaves(case: Mapping[str, Any]) -> dict[str, str]:
    """Every field of the case as dotted key -> text: what two records must agree in to be compared. The name is left out."""
    flat: dict[str, str] = {}
    for key, value in case.items():
        if key == "comm":
            flat |= {f"comm.{g}.{way}": words(c, "comm") for g, ways in value.items() for way, c in ways.items()}
        elif key in ("factor", "layout", "precision"):
            flat[key] = words(value, key)
        elif isinstance(value, Mapping):
            flat |= {f"{key}.{k}": text(v) for k, v in value.items()}
        elif key != "name":
            flat[key] = text(value)
    return flat


BASELINE = leaves(Case(model="any", mesh={"tp": 2}).row())  # the value of each axis at its baseline


def columns(entry: Entry) -> dict[str, Any]:
    """The columns that say which case a row is about; the same in every table."""
    case, flat = entry.case, entry.flat
    return {
        "origin": entry.origin, "machine": entry.machine, "case": entry.id, "workload": entry.workload, "size": entry.size,
        "model": case["model"], **{key: flat[key] for key in ("factor", "layout")},
        "comm_forward": flat["comm.tp.forward"], "comm_backward": flat["comm.tp.backward"], "precision": flat["precision"],
        **{way: case["mesh"][way] for way in ("dp", "pp", "tp")},
        "link": case["link"], "device": case["device"],
        **{key: case["data"][key] for key in ("text", "seq", "batch")},
        **{key: case[key] for key in ("steps", "seed", "implementation", "measure")},
    }


def variant(value: str, base: str) -> str | None:
    """The options by which an axis's value is the baseline itself (empty without any); None where it is another value."""
    options = value.removeprefix(base).removeprefix("-")
    return options if value == base or (value.startswith(f"{base}-") and "=" in options.split("-")[0]) else None


def method(case: Mapping[str, Any]) -> str:
    """What the case does differently from the baseline, as text: `baseline`, `comm=int8`, `factor=cola layout=btp` ...

    An option of the baseline's own value, such as the weights' dtype, makes no other method.
    """
    flat, parts = leaves(case), []
    for axis in ("factor", "layout", "precision"):
        if variant(flat[axis], BASELINE[axis]) is None:
            parts.append(f"{axis}={flat[axis]}")
    for group in ("tp", "dp", "pp"):
        ways = [flat[f"comm.{group}.{way}"] for way in ("forward", "backward")]
        if any(way != BASELINE["comm.tp.forward"] for way in ways):
            value = ways[0] if ways[0] == ways[1] else "+".join(ways)
            parts.append(f"comm={value}" if group == "tp" else f"comm.{group}={value}")
    if flat["implementation"] != BASELINE["implementation"]:
        parts.append(flat["implementation"])
    return " ".join(sorted(parts)) or "baseline"


SINCE = {"graph": False}  # fields of the case that records of before lack, and what they meant


def started(record: Record) -> str | None:
    """When the record's run started (UTC, ISO 8601), where its provenance says so."""
    return record.provenance.get("started")


def commit(record: Record) -> str:
    """The commit it was run from, `+` behind it where the checkout differed; `unknown` without one."""
    git = record.provenance.get("git") or {}
    return f"{git.get('commit') or 'unknown'}{'+' if git.get('dirty') else ''}"


def apart(one: Entry, other: Entry) -> str | None:
    """Why two records cannot be compared: the first version that differs, named on both sides. None where all agree."""
    known = [(e.record.provenance.get("versions") or {}) if e.record else {} for e in (one, other)]
    for tool in TOOLS:
        mine, theirs = (versions.get(tool) for versions in known)
        if mine != theirs:
            return f"{one.id} ran with {tool} {mine or 'unknown'}, {other.id} with {theirs or 'unknown'}"
    return None


def _where(workloads: Mapping[str, Workload]) -> dict[str, tuple[str, str]]:
    """case id -> (workloads, smallest size)."""
    found: dict[str, list] = {}
    for workload in workloads.values():
        for row in workload.rows:
            found.setdefault(row.id, []).append(row)
    return {case: ("+".join(sorted({r.workload for r in rows})), min((r.size for r in rows), key=SIZES.index))
            for case, rows in found.items()}


def _finite(holder: object, keys: Iterable[str], optional: bool, where: str) -> None:
    """Raises ReportError naming the first field that is no finite number (or not None where it may be)."""
    for key in keys:
        value = getattr(holder, key)
        if value is None and optional:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ReportError(f"{where}: {key}: {value!r} is no number")


def _record(path: Path, origin: str, where: Mapping[str, tuple[str, str]]) -> Entry:
    record = read(path)
    if record.id != path.stem:
        raise ReportError(f"{path.name}: holds the record of another case: {record.id}")
    for traffic in record.traffic:
        _finite(traffic, ("calls", "elements", "payload_bytes", "wire_bytes"), False, f"{path.name}: traffic {traffic.op}")
    for metric in record.metrics:
        _finite(metric, ("value", "q20", "q80", "n"), True, f"{path.name}: metric {metric.name}")
    for name in ("mfu", "hfu"):
        share = record.metric(name)
        if share is not None and share.value is not None and share.value * (1 if share.unit == "%" else 100) > 100:
            raise ReportError(f"{path.name}: {name} {share.value!r} {share.unit} is over 100 %: a wrong peak or wrong FLOPs")
    workload, size = where.get(record.id, ("", ""))
    try:
        case = SINCE | dict(record.case)
        entry = Entry(origin, record.machine, record.id, case, record.status, record.reason, workload, size, record, path)
        columns(entry)
    except (KeyError, TypeError, ValueError) as error:
        raise ReportError(f"{path.name}: case: missing or malformed column {error}") from None
    return entry


def plan(path: Path) -> list[dict[str, Any]]:
    """Rows of a machine's plan. Raises ReportError naming file and row."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        for number, row in enumerate(rows, 1):
            if not {"id", "runs", "reason"} <= set(row):
                raise ValueError(f"row {number}: expected id, runs and reason")
    except (ValueError, TypeError) as error:
        raise ReportError(f"plan {path.name}: {error}") from None
    return rows


def entries(results: Path, workloads: Mapping[str, Workload]) -> list[Entry]:
    """All entries, runs before references, then by machine and case. Raises ReportError or RecordError (one line)."""
    where = _where(workloads)
    found = [_record(p, RUN, where) for p in sorted((results / "runs").glob("*/*.json"))]
    for folder in sorted((results / "reference").glob("*/runs")):
        found += [_record(p, f"reference:{folder.parent.name}", where) for p in sorted(folder.glob("*.json"))]
    known = {(e.machine, e.id) for e in found if e.origin == RUN}
    plans = {p.stem: {r["id"]: r for r in sorted(plan(p), key=lambda r: bool(r["runs"]))}  # a case that runs for any workload runs
             for p in sorted((results / "plan").glob("*.json"))}
    cases = {row.id: row.case for w in workloads.values() for row in w.rows}
    for machine in sorted(plans.keys() | {machine for machine, _ in known}):
        for case_id, case in cases.items():
            if (machine, case_id) not in known:
                row = plans.get(machine, {}).get(case_id)
                reason = "no record yet" if row is None or row["runs"] else str(row["reason"] or "no reason given")
                found.append(Entry(RUN, machine, case_id, case.row(), NOT_RUN, reason, *where[case_id]))
    return sorted(found, key=lambda e: (e.origin != RUN, e.origin, e.machine, e.id))


def main(what: str, work: Callable[[argparse.Namespace, dict[str, Workload], list[Entry]], Iterable[Path]],
         options: Callable[[argparse.ArgumentParser], None] | None = None, argv: list[str] | None = None) -> None:
    """Command line of a report module: reads everything, calls `work`, prints what was written.

    An error is one line and exit code 1.
    """
    parser = argparse.ArgumentParser(description=what.partition("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--workloads", type=Path, default=FOLDER)
    if options:
        options(parser)
    arguments = parser.parse_args(argv)
    try:
        workloads = load_all(arguments.workloads)
        for path in work(arguments, workloads, entries(arguments.results, workloads)):
            print(path)
    except (ReportError, RecordError, WorkloadError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
