"""What `triaxis overhead` measured, for the claim about it: the cost of the GPU sampler is of no case, so it is in no record.

    results/overhead/<machine>.json            origin `run`
    results/reference/<name>/overhead.json     origin `reference:<name>`, of the machine of its records

A file holds a list of metrics as in a record: `sampler_overhead`, the ratio of step times with the sampler on and off, and
`sampler_overhead_upper_bound`, its one-sided 95 % bound (suite.measure.overhead).
"""
from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from suite.record import Metric
from suite.report.source import RUN, Entry, ReportError

FILE = "overhead.json"  # beside environment.txt
NAMES = ("sampler_overhead", "sampler_overhead_upper_bound")
MISSING = "not run: triaxis overhead was not run"


@dataclass(frozen=True)
class Overhead:
    """One file. `metrics` have values or reasons."""

    origin: str
    machine: str
    metrics: tuple[Metric, ...]

    def metric(self, name: str) -> Metric | None:
        return next((m for m in self.metrics if m.name == name), None)


def path_of(machine: str, results: Path) -> Path:
    return results / "overhead" / f"{machine}.json"


def read(path: Path) -> tuple[Metric, ...]:
    """The metrics of a file. Raises ReportError naming it where it is no list of them."""
    try:
        metrics = tuple(Metric(**row) for row in json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ReportError(f"overhead {path.name}: {error}") from None
    missing = set(NAMES[:1]) - {m.name for m in metrics}
    if missing:
        raise ReportError(f"overhead {path.name}: no {missing.pop()} in it")
    return metrics


def overheads(results: Path, entries: Sequence[Entry]) -> list[Overhead]:
    """All files, runs before references. Entries say which machine a reference is of. Raises ReportError."""
    found = [Overhead(RUN, path.stem, read(path)) for path in sorted((results / "overhead").glob("*.json"))]
    machines = {e.origin: e.machine for e in entries}
    for path in sorted((results / "reference").glob(f"*/{FILE}")):
        origin = f"reference:{path.parent.name}"
        if origin in machines:
            found.append(Overhead(origin, machines[origin], read(path)))
    return found
