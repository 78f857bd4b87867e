"""Loss and count regressions of the small workloads, from the records that a run left.

    suite/gate/reference/counts.json             case -> traffic rows: equal on every machine
    suite/gate/reference/<platform>/<case>.txt   losses, one number a line: equal to the bit on one platform

A platform is what moves the last digit of a loss: processor, its vector instructions, torch. Where no losses are kept for it,
counts alone are compared, and that is said. A record that failed or is not there is `missing`.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from suite.gate.finding import FAULT, FINE, MISSING, NEW, SKIPPED, WORSE, Finding
from suite.record import Record, RecordError, publish, read

REFERENCE = Path(__file__).with_name("reference")
KEYS = ("group", "way", "op", "codec", "dtype", "purpose")
SUMS = ("calls", "elements", "payload_bytes", "wire_bytes")


def platform_of(torch_version: str) -> str:
    """Such as linux-x86_64-avx512-torch2.13.0."""
    import platform

    import torch

    words = (platform.system(), platform.machine(), torch.backends.cpu.get_cpu_capability(), f"torch{torch_version.split('+')[0]}")
    return "-".join(word.lower().replace(" ", "") for word in words)


def counts(record: Record) -> dict[str, list[float]]:
    """"tp forward all_reduce bf16 ..." -> calls, elements, payload and wire bytes a step."""
    return {" ".join(str(getattr(row, key)) for key in KEYS): [getattr(row, key) for key in SUMS] for row in record.traffic}


def curve(path: Path) -> list[str]:
    """Losses as they stand in a record's loss table. Raises ValueError for one without that column."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows or "loss" not in rows[0]:
        raise ValueError(f"{path.name}: no losses in it")
    return [row["loss"] for row in rows]


def first_difference(case: str, old: list[str], new: list[str]) -> Finding:
    """Names the first step at which two curves differ."""
    for step, (a, b) in enumerate(zip(old, new)):
        if not math.isfinite(float(b)):
            return Finding(case, FAULT, f"step {step}: the loss is {b}")
        if float(a) != float(b):
            return Finding(case, WORSE, f"loss differs from step {step} on: {a} -> {b}")
    if len(old) != len(new):
        return Finding(case, WORSE, f"{len(old)} steps -> {len(new)}")
    return Finding(case, FINE)


def changed_counts(case: str, old: Mapping[str, list[float]], new: Mapping[str, list[float]]) -> Finding:
    """Names the first collective whose count differs."""
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name):
            sides = [" ".join(f"{word} {value:.0f}" for word, value in zip(SUMS, side[name])) if name in side else "none"
                     for side in (old, new)]
            return Finding(case, WORSE, f"{name}: {sides[0]} -> {sides[1]}")
    return Finding(case, FINE)


def gate(runs: Path, reference: Path = REFERENCE, update: bool = False) -> list[Finding]:
    """runs: the folder of a machine's records. update: keeps the losses and counts of every record of a loss run there."""
    if update:
        return _keep(runs, reference)
    try:
        known = json.loads((reference / "counts.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return [Finding("losses", NEW, "no reference yet: accepted as the first run; `triaxis gate losses --update` keeps it")]
    except ValueError as error:
        raise ValueError(f"counts.json: {error}") from None
    if not isinstance(known, dict) or not known:
        raise ValueError("counts.json: no cases in it")
    found = []
    for case, rows in known.items():
        try:
            record = read(runs / f"{case}.json")
        except FileNotFoundError:
            found.append(Finding(case, MISSING, "no record of this case"))
            continue
        except RecordError as error:
            found.append(Finding(case, FAULT, str(error)))
            continue
        found += [Finding(case, FAULT, record.reason)] if record.reason else _case(record, rows, runs, reference)
    return found


def _case(record: Record, rows: Mapping[str, Any], runs: Path, reference: Path) -> list[Finding]:
    place = platform_of(record.provenance["versions"]["torch"])
    path = reference / place / f"{record.id}.txt"
    found = [changed_counts(record.id, rows, counts(record))]
    if path.exists():
        old = path.read_text(encoding="utf-8").split()
        found.append(first_difference(record.id, old, curve(runs / f"{record.id}.loss.csv")))
    elif record.case["measure"] == "loss":
        found.append(Finding(record.id, SKIPPED, f"no reference losses for {place}; counts alone are compared"))
    return found


def _keep(runs: Path, reference: Path) -> list[Finding]:
    known = {}
    for path in sorted(runs.glob("*.json")):
        record = read(path)
        if record.reason is None and record.case["measure"] == "loss" and record.case["device"] == "cpu":
            known[record.id] = counts(record)
            place = reference / platform_of(record.provenance["versions"]["torch"])
            publish(place / f"{record.id}.txt", "\n".join(curve(runs / f"{record.id}.loss.csv")) + "\n")
    if not known:
        raise ValueError(f"{runs.name}: no loss runs to keep")
    body = ",\n".join(f" {json.dumps(case)}: {json.dumps(rows)}" for case, rows in sorted(known.items()))
    publish(reference / "counts.json", "{\n" + body + "\n}\n")
    return [Finding(case, NEW, "kept") for case in sorted(known)]
