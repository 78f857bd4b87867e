"""Compares two files of pytest-benchmark: `pytest --benchmark-only --benchmark-json=NEW.json`, see tests/test_benchmarks.py.

The median of the samples counts, device time where a GPU gave it. Tolerance: the row's own (`extra_info.tolerance`), or the one
given, or DEFAULT. Other hardware is not comparable; a row that is not there any more fails; without an old file the new
one is the first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from suite.gate.finding import APART, BETTER, FAULT, FINE, MISSING, NEW, WORSE, Finding

DEFAULT = 0.05
HARDWARE = ("processor", "gpu", "gpu_clocks", "driver")  # of machine_info, as the benchmarks write it


def load(path: Path) -> dict[str, Any]:
    """Raises ValueError, in one line, for an empty or corrupt file and for one without benchmarks."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.name}: not a file of pytest-benchmark: {error}") from None
    rows = found.get("benchmarks") if isinstance(found, dict) else None
    if not isinstance(rows, list) or not rows or not isinstance(found.get("machine_info"), dict):
        raise ValueError(f"{path.name}: not a file of pytest-benchmark: it needs benchmarks and machine_info")
    names = [row.get("fullname") if isinstance(row, dict) else None for row in rows]
    if None in names or len(set(names)) != len(names):
        raise ValueError(f"{path.name}: a benchmark without a name, or a name twice")
    return found


def apart(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Which hardware differs, or None."""
    for key in HARDWARE:
        if old.get(key) != new.get(key):
            return f"{key}: {old.get(key)} -> {new.get(key)}"
    return None


def seconds(row: Mapping[str, Any]) -> float:
    """The median of a row's samples: device time where it has one. NaN where it is no positive number."""
    samples = (row.get("extra_info") or {}).get("device_seconds")
    try:
        value = float(median(samples)) if samples else float(row["stats"]["median"])
    except (KeyError, TypeError, ValueError):
        return math.nan
    return value if math.isfinite(value) and value > 0 else math.nan


def compare(old: Mapping[str, Any], new: Mapping[str, Any], tolerances: Mapping[str, float] | None = None) -> list[Finding]:
    """Two loaded files -> a finding a row."""
    if (text := apart(old["machine_info"], new["machine_info"])) is not None:
        return [Finding("machine", APART, text)]
    before, after = ({row["fullname"]: row for row in side["benchmarks"]} for side in (old, new))
    found = [Finding(name, MISSING, "deleted or renamed") for name in before if name not in after]
    for name, row in after.items():
        if name not in before:
            broken = math.isnan(seconds(row))
            found.append(Finding(name, FAULT if broken else NEW, "no time" if broken else "not in the old file"))
            continue
        a, b = seconds(before[name]), seconds(row)
        if math.isnan(a) or math.isnan(b):
            found.append(Finding(name, FAULT, f"the {'new' if math.isnan(b) else 'old'} file has no time for it"))
            continue
        own = (row.get("extra_info") or {}).get("tolerance", DEFAULT)
        tolerance = (tolerances or {}).get((row.get("extra_info") or {}).get("kernel", name), own)
        text = f"{b / a:.3f} times the old {a * 1e6:.1f} us, tolerance {tolerance:g}"
        found.append(Finding(name, WORSE if b / a > 1 + tolerance else BETTER if b / a < 1 / (1 + tolerance) else FINE, text))
    return found


def gate(old: Path, new: Path, tolerances: Mapping[str, float] | None = None) -> list[Finding]:
    """Without the old file: one finding that the new one is accepted as the first."""
    fresh = load(new)
    if not old.exists():
        broken = [Finding(row["fullname"], FAULT, "no time") for row in fresh["benchmarks"] if math.isnan(seconds(row))]
        return broken or [Finding("baseline", NEW, f"no {old.name} yet: {new.name} is accepted as the first")]
    return compare(load(old), fresh, tolerances)
