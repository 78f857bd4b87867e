"""What the gates say of the working tree: budgets, losses and counts and, against a base, paired timing; kept as findings.

    [{"gate": "budget", "kernel": ..., "verdict": ..., "text": ...}, ...]        results/gate/<machine>.json

Writing them succeeds whatever they say; `triaxis gate check` fails afterwards. suite.report.gate makes a table of them.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from suite.gate.finding import FAULT, Finding
from suite.record import publish

FIELDS = ("gate", "kernel", "verdict", "text")


def findings(runs: Path, base: str | None, device: str) -> list[dict[str, Any]]:
    """runs: this machine's records. A gate that cannot be asked is a finding of its own."""
    from suite.gate import ab, budget, losses
    from suite.workload import ROOT

    asked = {"budget": budget.gate, "losses": lambda: losses.gate(runs)}
    if base is not None:
        asked["ab"] = lambda: ab.gate(ROOT, base, None, device)
    found = []
    for name, gate in asked.items():
        try:
            said = gate()
        except (ValueError, OSError, RuntimeError) as error:
            said = [Finding(name, FAULT, " ".join(str(error).split()))]
        found += [{"gate": name, **asdict(one)} for one in said]
    return found


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    publish(path, json.dumps(rows, indent=1) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """Raises ValueError, in one line, for what is no file of findings."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name}: not findings: {error}") from None
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) and set(row) == set(FIELDS) for row in rows):
        raise ValueError(f"{path.name}: not findings: it needs rows of {', '.join(FIELDS)}")
    return rows
