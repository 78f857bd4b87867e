"""Tidy files: CSV with `repr` floats and Markdown tables. Sorted rows in, the same bytes out; no timestamps."""
from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from suite.record import publish
from suite.report.source import ReportError


def cell(value: Any) -> str:
    """A float as `repr`, None as nothing; a NaN or infinity never gets here (ValueError)."""
    if value is None:
        return ""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value!r} is no number")
        return repr(float(value))
    return str(value)


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> Path:
    """Rows must have exactly the header's columns and no null or infinite number in them. Raises ReportError (one line)."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(header)
    for number, row in enumerate(rows, 1):
        odd = set(header) ^ set(row)
        if odd:
            raise ReportError(f"{path.name}: row {number} ({row.get('case', '?')}): column {sorted(odd)[0]} is missing or unknown")
        try:
            writer.writerow([cell(row[key]) for key in header])
        except ValueError as error:
            raise ReportError(f"{path.name}: row {number} ({row.get('case', '?')}): {error}") from None
    publish(path, out.getvalue())
    return path


def markdown(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; pipes and line breaks inside a cell are escaped."""
    def line(cells: Sequence[Any]) -> str:
        return "| " + " | ".join(str(c).replace("|", "\\|").replace("\n", " ") for c in cells) + " |"

    return "\n".join([line(header), "|" + "---|" * len(header), *(line(row) for row in rows)]) + "\n"


def number(value: float | None) -> str:
    """Four significant digits, thousands apart, for a page that a person reads."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) < 1e-3:
        return f"{value:.3g}"
    return f"{value:.{max(0, 3 - math.floor(math.log10(abs(value))))}f}"
