"""The page to read first: results/tables/verdict.md. What ran, on what, what failed and why, and how the claims fared.

It is written and exits 0 whatever it says; an unreadable record is a line on the page. `failed` is what `check` asks.
"""
from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from suite.record import Record, RecordError, publish
from suite.report import claims, overhead
from suite.report.source import NOT_RUN, RUN, Entry, ReportError, entries, started
from suite.report.write import markdown
from suite.workload import Workload, WorkloadError, load_all

ORDER = ("replicated", "partly", "not replicated", NOT_RUN)


def failed(found: Sequence[Entry], machine: str | None = None) -> list[Entry]:
    """Cases of a workload whose run failed (died, deadline, NaN, red parity), of one machine where named.

    Never those not run, nor references.
    """
    return [e for e in found if e.origin == RUN and e.status == "failed" and e.workload and machine in (None, e.machine)]


def hardware(record: Record) -> str:
    """Processor, GPUs and versions behind a record, as one line."""
    known: dict[str, Any] = record.provenance
    gpus = Counter(g.get("name", "GPU") if isinstance(g, Mapping) else str(g) for g in known.get("gpus") or ())
    parts = [f"{n} x {name}" for name, n in sorted(gpus.items())]
    parts += [str(known["cpu"])] if known.get("cpu") else []
    parts += [f"{known['cpus']} cores"] if known.get("cpus") else []
    parts += [f"driver {known['driver']}"] if known.get("driver") else []
    parts += [f"{k} {v}" for k, v in sorted((known.get("versions") or {}).items()) if v]
    return ", ".join(parts)


def machines(records: Sequence[Record]) -> str:
    """`hardware` of all records; those that say nothing of it (a failure before the start) are left out."""
    return "; ".join(sorted({hardware(r) for r in records} - {""}))


def _sources(found: Sequence[Entry]) -> str:
    rows = []
    for source in dict.fromkeys(e.source for e in found):
        mine = [e for e in found if e.source == source]
        records = [e.record for e in mine if e.record]
        count = Counter(e.status for e in mine)
        times = sorted(t for r in records if (t := started(r)))
        shared = sum((m := e.metric("shared")) is not None and bool(m.value) for e in mine)
        rows.append((source[1], source[0], machines(records) or "no record", count["ok"],
                     count["failed"], count[NOT_RUN], shared, f"{times[0]} to {times[-1]}" if times else "-"))
    if not rows:
        return "No record and no plan yet.\n"
    return markdown(("machine", "origin", "hardware and versions", "ok", "failed", "not run", "shared with other processes",
                     "started (UTC)"), rows)


def _workloads(found: Sequence[Entry], workloads: Mapping[str, Workload]) -> str:
    rows = []
    for name, workload in sorted(workloads.items()):
        for source in dict.fromkeys(e.source for e in found):
            mine = [e for e in found if e.source == source and name in e.workload.split("+")]
            count = Counter(e.status for e in mine)
            why = Counter(str(e.reason) for e in mine if e.status == NOT_RUN)
            if mine:
                rows.append((name, workload.question, mine[0].label, count["ok"], count["failed"],
                             "; ".join(f"{n}: {reason}" for reason, n in sorted(why.items())) or "0"))
    return markdown(("workload", "question", "where", "ok", "failed", "not run"), rows) if rows else "No case yet.\n"


def _failures(found: Sequence[Entry]) -> str:
    rows = [(e.id, e.label, e.reason) for e in found if e.status == "failed"]
    return markdown(("case", "where", "reason"), rows) if rows else "Nothing failed.\n"


def scoreboard(rows: Sequence[claims.Outcome]) -> str:
    """Claims by paper and verdict, one count a claim and source."""
    count = Counter((o.claim["paper"], NOT_RUN if not o.run else o.verdict) for o in rows)
    papers = sorted({paper for paper, _ in count})
    return markdown(("paper", *ORDER), ((paper, *(count[paper, verdict] for verdict in ORDER)) for paper in papers))


def page(found: Sequence[Entry], rows: Sequence[claims.Outcome], workloads: Mapping[str, Workload]) -> str:
    run, waiting = [o for o in rows if o.run], [o for o in rows if not o.run]
    why: dict[str, list[str]] = {}
    for o in waiting:
        why.setdefault(o.verdict.removeprefix(f"{NOT_RUN}: "), []).append(o.claim["id"])
    parts = [
        "# Verdict", "## What ran, and on what", _sources(found), "## Workloads", _workloads(found, workloads),
        "## What failed", _failures(found), "## Claims",
        "One count a claim and source. `setting: same` only where every record has the paper's setting.", scoreboard(rows),
        claims.table(run) if run else "No claim has a number yet.\n", "## Claims without a number",
        markdown(("reason", "claims"), ((reason, ", ".join(dict.fromkeys(ids))) for reason, ids in sorted(why.items())))
        if why else "None.\n",
    ]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def write(results: Path, folder: Path, file: Path) -> Path:
    """Writes the page; what cannot be read is a line on it."""
    try:
        workloads = load_all(folder)
        found = entries(results, workloads)
        rows = claims.outcomes(claims.read(file), found, workloads, overhead.overheads(results, found))
        text = page(found, rows, workloads)
    except (ReportError, RecordError, WorkloadError, OSError) as error:
        text = f"# Verdict\n\nNo verdict: {error}\n"
    path = results / "tables" / "verdict.md"
    publish(path, text)
    return path


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    claims.common(parser)
    arguments = parser.parse_args(argv)
    print(write(arguments.results, arguments.workloads, arguments.claims))


if __name__ == "__main__":
    main()
