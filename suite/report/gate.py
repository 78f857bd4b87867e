"""The gate over revisions: results/tables/gate.csv and results/figures/gate.png.

    revision, date    a commit that changed kernels/budget.json, oldest first, or `working tree`
    gate, kernel      `budget`: a kernel's function and architecture, over its entries: most registers, most spills, mean of
                      instructions and of traffic; and for the working tree each gate's findings: a row where something is not ok,
                      and how many of each verdict
    quantity, value   value empty where the verdict is all there is

History comes from git alone, so that any clone has it; outside one there is the working tree. Same commits, same bytes.
"""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from suite.gate.ab import git
from suite.gate.finding import FINE, UNSURE
from suite.gate.tree import read
from suite.report.figures import _library
from suite.report.source import ReportError, main
from suite.report.write import write_csv
from suite.workload import ROOT

HEADER = ("revision", "date", "gate", "kernel", "quantity", "value", "verdict", "text")
HERE, BUDGET = "working tree", "kernels/budget.json"
OVER = {"registers": max, "spills": max, "instructions": fmean, "traffic": fmean}
SHOWN = "sm_90"


def revisions(root: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(short commit, its date, budget) of every commit of this history that changed the budget, then the working tree."""
    try:
        lines = git("log", "--reverse", "--abbrev=10", "--format=%h %cs", "--", BUDGET, cwd=root).splitlines()
    except (ValueError, OSError):
        lines = []
    for line in lines:
        commit, date = line.split()
        try:
            yield commit, date, json.loads(git("show", f"{commit}:{BUDGET}", cwd=root))
        except ValueError:  # deleted there, or not readable: no point of a history
            continue
    yield HERE, "", json.loads((root / BUDGET).read_text(encoding="utf-8"))


def summed(budget: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    """(function and architecture, quantity, value) over the entries of each function."""
    for place in sorted(key for key in budget if key.startswith("sm_")):
        rows: dict[str, list[Mapping[str, Any]]] = {}
        for name, row in budget[place].items():
            if "refused" not in row:
                rows.setdefault(name.partition("/")[0], []).append(row)
        for function, mine in sorted(rows.items()):
            for quantity, over in OVER.items():
                yield f"{function} {place}", quantity, round(float(over([row[quantity] for row in mine])), 4)


def table(history: Sequence[tuple[str, str, Mapping[str, Any]]], found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    rows = [dict(zip(HEADER, (revision, date, "budget", kernel, quantity, value, "", "")))
            for revision, date, budget in history for kernel, quantity, value in summed(budget)]
    for gate in dict.fromkeys(row["gate"] for row in found):
        mine = [row for row in found if row["gate"] == gate]
        counted = Counter(row["verdict"] for row in mine)
        rows += [dict(zip(HEADER, (HERE, "", gate, "all", "findings", float(n), verdict, ""))) for verdict, n in counted.items()]
        for row in mine:
            ratio = re.match(r"(\d+\.\d+) times the base's", row["text"])
            if row["verdict"] != FINE or ratio:
                value = float(ratio[1]) if ratio else None
                rows.append(dict(zip(HEADER, (HERE, "", gate, row["kernel"], "time over the base's" if ratio else "", value,
                                              row["verdict"], row["text"]))))
    return rows


def draw(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Instructions over revisions, and times over the base's where they were measured."""
    figure_class, seaborn = _library()
    figure = figure_class(figsize=(13, 5.5))
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    names = list(dict.fromkeys(row["revision"] for row in rows if row["quantity"] in OVER))
    curves: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["quantity"] == "instructions" and row["kernel"].endswith(f" {SHOWN}"):
            curves.setdefault(row["kernel"].partition(" ")[0], {})[names.index(row["revision"])] = row["value"]
    for (kernel, points), colour in zip(curves.items(), seaborn.color_palette("husl", max(len(curves), 1))):
        first = next(iter(points.values()))
        left.plot(list(points), [value / first for value in points.values()], marker="o", label=kernel, color=colour)
    left.set_xticks(range(len(names)), names, rotation=30, ha="right")
    left.set_ylabel(f"mean instructions on {SHOWN}, over the first revision's (counted)", fontsize=8)
    left.set_title("What the compiler makes of each kernel, over the revisions that changed the budget")
    left.legend(fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.2), frameon=False)
    times = [row for row in rows if row["quantity"] == "time over the base's"]
    if times:
        right.axvline(1.0, color="0.25", linewidth=1)
        for place, row in enumerate(times):  # hollow: no verdict
            right.plot(row["value"], place, "o", color="0.25", fillstyle="full" if row["verdict"] != UNSURE else "none")
        right.set_yticks(range(len(times)), [row["kernel"] for row in times], fontsize=7)
        right.invert_yaxis()
    else:
        right.set_axis_off()
        right.text(0.5, 0.5, "no base: --config base=REVISION", ha="center", va="center", transform=right.transAxes)
    right.set_xlabel("time over the base's, median of pairs (measured)")
    counted = [row for row in rows if row["quantity"] == "findings"]
    said = [f"{gate}: " + ", ".join(f"{row['value']:.0f} {row['verdict']}" for row in counted if row["gate"] == gate)
            for gate in dict.fromkeys(row["gate"] for row in counted)]
    right.set_title("\n".join(said) or "nothing asked")
    figure.tight_layout()
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=130, metadata={"Software": None})
    return out.getvalue()


def write(results: Path, findings: Path, root: Path = ROOT) -> list[Path]:
    """Raises ReportError where the findings or the budget cannot be read."""
    try:
        rows = table(list(revisions(root)), read(findings))
    except ValueError as error:
        raise ReportError(str(error)) from None
    paths = [write_csv(results / "tables" / "gate.csv", HEADER, rows), results / "figures" / "gate.png"]
    paths[1].parent.mkdir(parents=True, exist_ok=True)
    paths[1].write_bytes(draw(rows))
    return paths


if __name__ == "__main__":
    main(__doc__, lambda arguments, *_: write(arguments.results, arguments.findings),
         lambda parser: parser.add_argument("--findings", type=Path, required=True))
