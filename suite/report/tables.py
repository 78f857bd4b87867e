"""Tidy tables of everything measured.

    measurements.csv    one row a source, case and metric. A case without numbers has one row with status and reason.
    communication.csv   one row a traffic row of an ok record: bytes in a training step and rank. What we ship ourselves is
                        `counted` and what the library's collective moves `modelled` (ring-equivalent): two columns.
    losses.csv          one row a case and loss, with the difference to the same-seed baseline
    loss_summary.csv    one row a case over its seeds (see suite.report.losses)
    layouts.csv         one row a model: what low rank and its layouts cost on paper (see suite.report.layouts)
    loss_gaps.csv       one row for two methods with a common baseline: the share of a gap that is closed (see suite.report.gaps)

`value` is empty exactly where `status` is not ok or `metric_reason` says why. Rows with a null, NaN, infinite or missing
column, and an MFU over 100 %, are refused with one line.
"""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from suite.record import Traffic
from suite.report import gaps, layouts, losses
from suite.report.source import Entry, ReportError, columns, main
from suite.report.write import write_csv

CASE = ("origin", "machine", "case", "workload", "size", "model", "factor", "layout", "comm_forward", "comm_backward", "precision",
        "dp", "pp", "tp", "link", "device", "text", "seq", "batch", "steps", "seed", "implementation", "measure")
MEASUREMENTS = (*CASE, "status", "reason", "metric", "value", "unit", "kind", "n", "q20", "q80", "metric_reason")
COMMUNICATION = (*CASE, "group", "way", "op", "codec", "dtype", "purpose", "calls", "elements", "payload_bytes", "kind",
                 "wire_bytes_counted", "wire_bytes_modelled")
NONE = dict.fromkeys(("metric", "value", "unit", "kind", "n", "q20", "q80", "metric_reason"))


def measurements(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Rows of measurements.csv, in the entries' order."""
    rows = []
    for entry in entries:
        head = {**columns(entry), "status": entry.status, "reason": entry.reason}
        metrics = sorted(entry.record.metrics, key=lambda m: m.name) if entry.record and entry.status == "ok" else []
        if len({(m.name, m.kind) for m in metrics}) < len(metrics):
            raise ReportError(f"case {entry.id}: a metric is there twice: {', '.join(m.name for m in metrics)}")
        rows += [{**head, "metric": m.name, "value": m.value, "unit": m.unit, "kind": m.kind, "n": m.n, "q20": m.q20,
                  "q80": m.q80, "metric_reason": m.reason} for m in metrics] or [{**head, **NONE}]
    return rows


def communication(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """Rows of communication.csv, in the entries' order."""
    def order(t: Traffic) -> tuple[str, ...]:
        return t.group, t.way, t.op, t.codec, t.dtype, t.purpose, t.kind

    rows = []
    for entry in entries:
        for t in sorted(entry.record.traffic, key=order) if entry.record and entry.status == "ok" else ():
            if t.kind not in ("counted", "modelled"):
                raise ReportError(f"case {entry.id}: traffic {t.op}: kind {t.kind!r}, expected counted or modelled")
            bytes_ = {f"wire_bytes_{kind}": float(t.wire_bytes) if kind == t.kind else None for kind in ("counted", "modelled")}
            rows.append({**columns(entry), **{k: getattr(t, k) for k in (
                "group", "way", "op", "codec", "dtype", "purpose", "calls", "elements", "payload_bytes", "kind")}, **bytes_})
    return rows


def write(results: Path, entries: Sequence[Entry]) -> list[Path]:
    """Writes the tables and returns their paths."""
    folder = results / "tables"
    compared = losses.compare(entries)
    family = tuple(c for c in CASE if c != "seed")
    return [
        write_csv(folder / "measurements.csv", MEASUREMENTS, measurements(entries)),
        write_csv(folder / "communication.csv", COMMUNICATION, communication(entries)),
        write_csv(folder / "losses.csv", (*CASE, *losses.CASE_HEADER), losses.case_rows(compared)),
        write_csv(folder / "loss_summary.csv", (*family, *losses.SUMMARY_HEADER), losses.summary_rows(compared)),
        write_csv(folder / "layouts.csv", layouts.HEADER, layouts.rows()),
        write_csv(folder / "loss_gaps.csv", (*family, *gaps.HEADER), gaps.rows(entries)),
    ]


if __name__ == "__main__":
    main(__doc__, lambda arguments, _, entries: write(arguments.results, entries))
