"""References: committed records of named hardware, and the scoreboard of the README that is made from them.

    results/reference/<name>/environment.txt    hardware and exact versions, from the records' provenance
    results/reference/<name>/overhead.json      what `triaxis overhead` measured there, where it did (suite.report.overhead)
    results/reference/<name>/runs/*.json        the records, as they were written
    results/reference/<name>/runs/*.loss.csv    their loss curves; *.messages.csv: their messages' errors

    python -m suite.report.reference import RUN NAME     RUN: a folder results/runs/<machine>, or its .tar.gz
    python -m suite.report.reference readme [--check]    writes (or only compares) the block between the markers

The README's block is `<!-- scoreboard -->` ... `<!-- /scoreboard -->`; `check_readme` raises where it is not what the
references give.
"""
from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from suite.record import Record, RecordError, publish, read
from suite.report import brief, claims, overhead
from suite.report.source import ReportError, entries
from suite.report.verdict import machines
from suite.report.write import markdown
from suite.workload import ROOT, Workload, WorkloadError, load_all

START, END = "<!-- scoreboard -->", "<!-- /scoreboard -->"
NAME = re.compile(r"[a-z0-9][a-z0-9.-]*")
TABLES = ("loss", "messages")  # beside a record
SKIPPED = ("machine", "started", "ended", "launch")  # of the provenance: not facts about the environment


def bring(run: Path, name: str, results: Path, replace: bool = False) -> Path:
    """Copies the records of a run to results/reference/<name> and returns that folder.

    All records must be of one machine and readable. Raises ReportError or RecordError, and then leaves nothing behind.
    """
    if not NAME.fullmatch(name):
        raise ReportError(f"reference name {name!r}: expected lower-case letters, digits, dots and dashes")
    target = results / "reference" / name
    if target.exists() and not replace:
        raise ReportError(f"reference {name} exists already: name another, or replace it")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{name}.") as temporary:
        new = Path(temporary) / "new"
        source = _folder(run, Path(temporary) / "archive")
        _copy(source, new / "runs", run)
        records = [read(p) for p in sorted((new / "runs").glob("*.json"))]
        publish(new / "environment.txt", environment(records))
        measured = _overhead(source, records[0].machine, results)
        if measured:
            overhead.read(measured)
            shutil.copyfile(measured, new / overhead.FILE)
        if target.exists():
            shutil.rmtree(target)
        new.rename(target)
    return target


def _overhead(source: Path, machine: str, results: Path) -> Path | None:
    """The machine's measurement: of the archive, of the results that the run is in, or of ours."""
    around = [overhead.path_of(machine, place) for place in (source.parent.parent, results)]
    places = [*sorted(source.rglob(f"overhead/{machine}.json")), *around]
    return next((p for p in places if p.is_file() and not p.is_symlink()), None)


def _folder(run: Path, room: Path) -> Path:
    if run.is_dir():
        return run
    try:
        with tarfile.open(run, "r:*") as archive:
            archive.extractall(room, filter="data")
    except (OSError, tarfile.TarError) as error:
        raise ReportError(f"{run.name}: neither a folder nor an archive of one: {error}") from None
    return room


def _copy(source: Path, target: Path, run: Path) -> None:
    paths = sorted(p for p in source.rglob("*.json") if not p.is_symlink() and p.parent.name != "overhead")
    machines = sorted({read(p).machine for p in paths})
    if len(machines) != 1:
        raise ReportError(f"{run.name}: records of {', '.join(machines) or 'no machine'}: a reference holds those of one")
    target.mkdir(parents=True)
    for path in paths:
        if (target / path.name).exists():
            raise ReportError(f"{run.name}: two records are called {path.name}")
        for beside in (path, *(path.with_name(f"{path.stem}.{table}.csv") for table in TABLES)):
            if beside.exists():
                shutil.copyfile(beside, target / beside.name)


def environment(records: Sequence[Record]) -> str:
    """Every fact of the provenance but times, as `key: value` lines; where records differ, each value with its count."""
    facts: dict[str, Counter[str]] = {}
    for record in records:
        flat = {"machine": record.machine, **_flat({k: v for k, v in record.provenance.items() if k not in SKIPPED})}
        for key, value in flat.items():
            facts.setdefault(key, Counter())[value] += 1
    lines = []
    for key, values in sorted(facts.items()):
        for value, n in sorted(values.items()):
            lines.append(f"{key}: {value}" + (f"  ({n} of {len(records)} records)" if n < len(records) else ""))
    return "\n".join([f"records: {len(records)}", *lines]) + "\n"


def _flat(value: Any, prefix: str = "") -> dict[str, str]:
    if isinstance(value, Mapping):
        return {k: v for key in sorted(value) for k, v in _flat(value[key], f"{prefix}.{key}" if prefix else str(key)).items()}
    return {prefix: value if isinstance(value, str) else json.dumps(value, sort_keys=True)}


def scoreboard(results: Path, name: str, file: Path, workloads: Mapping[str, Workload]) -> str:
    """The claims that a reference answers, as Markdown: number, verdict, and the case to rerun."""
    mine = [e for e in entries(results, workloads) if e.origin == f"reference:{name}"]
    if not mine:
        raise ReportError(f"no reference {name!r} in {results.name}/reference")
    rows = [o for o in claims.outcomes(claims.read(file), mine, workloads, overhead.overheads(results, mine)) if o.run]
    where = machines([e.record for e in mine if e.record]) or "hardware not recorded"
    failures = sum(e.status == "failed" for e in mine)
    head = f"**{name}**: {where}. {len(mine)} records, {failures} failed.\n\n"
    short = brief.table(mine, claims.defined(workloads)), brief.loss_table(mine)
    head += "".join(f"{table}\n" for table in short if table)
    if not rows:
        return head + "It answers no claim yet.\n"
    return head + markdown(("claim", "statement", "aim", "ours", "kind", "verdict", "rerun"), (
        (o.claim["id"], o.claim["statement"], claims.aim(o.claim), claims.ours(o), o.kind,
         f"{o.verdict}{f' ({o.note})' if o.note else ''}, setting: {o.setting}", claims.rerun(o)) for o in rows))


def block(results: Path, file: Path, workloads: Mapping[str, Workload]) -> str:
    """What belongs between the README's markers: the scoreboard of each reference."""
    names = sorted((p.parent.name for p in (results / "reference").glob("*/runs")), reverse=True)  # most GPUs first
    parts = [scoreboard(results, name, file, workloads) for name in names]
    return "\n" + "\n".join(parts or ["No reference numbers yet.\n"])


def _split(text: str, name: str) -> tuple[str, str, str]:
    if text.count(START) != 1 or text.count(END) != 1 or text.index(START) > text.index(END):
        raise ReportError(f"{name}: expected one {START} and one {END} after it")
    head, _, rest = text.partition(START)
    inside, _, tail = rest.partition(END)
    return head, inside, tail


def check_readme(readme: Path, results: Path, file: Path, workloads: Mapping[str, Workload]) -> None:
    """Raises ReportError naming the first line that differs from what the references give."""
    inside = _split(readme.read_text(encoding="utf-8"), readme.name)[1].strip().splitlines()
    wanted = block(results, file, workloads).strip().splitlines()
    for number, (is_, should) in enumerate(zip([*inside, *[""] * len(wanted)], [*wanted, *[""] * len(inside)]), 1):
        if is_ != should:
            raise ReportError(f"{readme.name}: scoreboard line {number} is {is_!r}, the references give {should!r}")


def write_readme(readme: Path, results: Path, file: Path, workloads: Mapping[str, Workload]) -> Path:
    """Replaces the block between the markers."""
    head, _, tail = _split(readme.read_text(encoding="utf-8"), readme.name)
    publish(readme, head + START + "\n" + block(results, file, workloads).strip() + "\n" + END + tail)
    return readme


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    claims.common(parser)
    actions = parser.add_subparsers(dest="action", required=True)
    importing = actions.add_parser("import", help="copy a run to results/reference/NAME")
    importing.add_argument("run", type=Path)
    importing.add_argument("name")
    importing.add_argument("--replace", action="store_true")
    readme = actions.add_parser("readme", help="write the README's scoreboard")
    readme.add_argument("--file", type=Path, default=ROOT / "README.md")
    readme.add_argument("--check", action="store_true", help="only compare")
    a = parser.parse_args(argv)
    try:
        if a.action == "import":
            print(bring(a.run, a.name, a.results, a.replace))
        else:
            act = check_readme if a.check else write_readme
            act(a.file, a.results, a.claims, load_all(a.workloads))
    except (ReportError, RecordError, WorkloadError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
