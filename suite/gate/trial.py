"""Does the paired timing do what it says? A revision against itself, and against a copy in which one kernel is slower.

    triaxis gate trial --runs 20                          A/A and +15 % on a CPU, A/A and +5 % on a GPU
    triaxis gate trial --runs 20 --share 0.07 --slow reference:NAME
    triaxis gate trial --runs 20 --resume                 what an earlier one of the same tree, cut short, has not made

Each run is a whole `triaxis gate ab` over two folders, so that no git is needed: copies of this tree's sources, the second with
suite/gate/slower.py in it. On a CPU each starts processes of its own, on a GPU every tenth. One row a run, kept as it ends:

    share, slowed     what was made slower by how much; 0: nothing
    injected          how much slower it was when that was measured alone (GPU)
    kernels, alarms, unsure, faults     how many were timed, which alarmed, how many had no verdict, which could not be timed
    seconds, load     of the run; processes that wanted a core, averaged over the minute before its end
"""

from __future__ import annotations

import csv
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

from suite.gate.ab import LARGEST, rounds
from suite.gate.finding import FAULT, UNSURE, WORSE, Finding

SOURCES = ("kernels", "suite", "workloads")
SHARES = {"cpu": (0.0, 0.15), "cuda": (0.0, 0.05)}
TOGETHER = {"cpu": 1, "cuda": 10}  # runs that the same processes serve: on a GPU they take most of the time to begin
CAUGHT = 0.95  # of the runs with a slower kernel
HEADER = ("machine", "processor", "torch", "triton", "device", "share", "slowed", "run", "kernels", "alarms", "unsure", "faults",
          "injected", "seconds", "load")
INJECTION = "\nfrom kernels.slower import slower\n\nENTRIES = slower(ENTRIES, {name!r}, {share!r})\n"


def copy_of(tree: Path, folder: Path, name: str = "", share: float = 0.0) -> Path:
    """The sources of a tree in a folder, one entry of its registry slower where `name` says so."""
    for part in SOURCES:
        if (tree / part).is_dir():
            shutil.copytree(tree / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    if name:
        shutil.copy(Path(__file__).with_name("slower.py"), folder / "kernels/slower.py")
        with (folder / "kernels/registry.py").open("a", encoding="utf-8") as file:
            file.write(INJECTION.format(name=name, share=share))
    return folder


def usual(device: str) -> str:
    """What is made slower where nothing is named: on a CPU the first reference that is timed, else the first kernel."""
    from kernels.registry import ENTRIES

    names = [entry.name if device == "cuda" else f"reference:{entry.name}" for entry in ENTRIES
             if device == "cuda" or entry.traffic <= LARGEST]
    return names[0]


def trial(tree: Path, device: str, shares: Sequence[float], slow: str, runs: int, only: Sequence[str],
          facts: Mapping[str, Any], told: Callable[[Mapping[str, Any]], object],
          before: Sequence[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
    """Rows in the order of the runs, each told as it ends. Raises ValueError where `slow` is not among what is timed.

    facts: the first four of HEADER. before: rows of runs that need not be made again, of the same facts, else a ValueError."""
    for row in before:
        other = [f"{name} {row[name]}" for name in facts if row[name] != str(facts[name] or "")]
        if other or row["device"] != device or row["slowed"] not in ("", slow):
            raise ValueError(f"the table holds runs of {', '.join(other) or row['device']}, {row['slowed'] or 'nothing'} slower")
    rows, together = [], TOGETHER[device]
    made = {(row["share"], int(row["run"])) for row in before}
    with ExitStack() as outer:
        kept = _folder(outer)
        for share, first in product(shares, range(0, runs, together)):
            left = [run for run in range(first, min(first + together, runs)) if (share, run) not in made]
            if not left:
                continue
            with ExitStack() as stack:
                base, head = copy_of(tree, _folder(stack)), copy_of(tree, _folder(stack), slow if share else "", share)
                begun = time.monotonic()
                for findings, run in zip(rounds(base, head, device, only, times=len(left), kept=kept), left, strict=True):
                    if share and slow not in {one.kernel for one in findings}:
                        raise ValueError(f"{slow}: not among the {len(findings)} that are timed")
                    seconds, begun = time.monotonic() - begun, time.monotonic()
                    if before and len(findings) != before[0]["kernels"]:
                        known = before[0]["kernels"]
                        raise ValueError(f"the table holds runs over {known} kernels, this one is over {len(findings)}")
                    rows.append({**facts, "device": device, "share": share, "slowed": slow if share else "", "run": run,
                                 **_row(findings, head), "seconds": round(seconds, 1)})
                    told(rows[-1])
    return rows


def _folder(stack: ExitStack) -> Path:
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="triaxis-gate-")))


def _row(findings: Sequence[Finding], head: Path) -> dict[str, Any]:
    def named(verdict: str) -> str:
        return " ".join(sorted(one.kernel for one in findings if one.verdict == verdict))

    written = head / "kernels/slowed.txt"
    injected = [float(line) for line in written.read_text().split()] if written.exists() else []
    return {"kernels": len(findings), "alarms": named(WORSE), "unsure": sum(one.verdict == UNSURE for one in findings),
            "faults": named(FAULT), "injected": sum(injected) / len(injected) - 1 if injected else None,
            "load": round(os.getloadavg()[0], 2)}


def load(path: Path) -> list[dict[str, Any]]:
    """Rows of a table that a trial wrote. Raises ValueError for one with other columns."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows or tuple(rows[0]) != HEADER:
        raise ValueError(f"{path.name}: not a table of a trial: it needs {', '.join(HEADER)}")
    return [row | {"share": float(row["share"]), "kernels": int(row["kernels"]), "load": float(row["load"]),
                   "injected": float(row["injected"]) if row["injected"] else None} for row in rows]


def summary(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, bool]]:
    """(a line, whether it is what the gate promises) of each share: no alarm at 0, else the slowed one alone, in CAUGHT of
    the runs."""
    found = []
    for share in sorted({row["share"] for row in rows}):
        mine = [row for row in rows if row["share"] == share]
        hits = sum(row["slowed"] in row["alarms"].split() for row in mine) if share else 0
        false = [name for row in mine for name in row["alarms"].split() if name != row["slowed"]]
        faults = [name for row in mine for name in row["faults"].split()]
        what = f"+{share:.0%} in {mine[0]['slowed']}: alarm in {hits} of {len(mine)}" if share else "A/A"
        text = f"{what}; false alarms: {len(false)} in {sum(row['kernels'] for row in mine)} comparisons of {len(mine)} runs"
        real = [row["injected"] for row in mine if row["injected"] is not None]
        text += f"; injected {min(real):.1%} to {max(real):.1%}" if real else ""
        text += f" ({' '.join(sorted(set(false)))})" if false else ""
        text += f"; faults: {' '.join(sorted(set(faults)))}" if faults else ""
        found.append((text, not false and not faults and (not share or hits >= CAUGHT * len(mine))))
    return found
