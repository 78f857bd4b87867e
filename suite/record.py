"""Records: one JSON file a case and machine, and what is beside it. Imports no torch.

    results/runs/<machine>/<case>.json        the record (`Record`)
    results/runs/<machine>/<case>.loss.csv    step, loss, lr, grad_norm, tokens
    results/runs/<machine>/<case>.gpu.csv     samples of the GPU sampler, where there is a GPU

A record is written to a temporary name, flushed to disk and renamed: it is whole or absent. `value` of a metric is null
exactly when there is a `reason`. The same case on another machine is another file.
"""
from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from suite.workload import ROOT

RESULTS = Path(os.environ.get("TRIAXIS_RESULTS") or ROOT / "results")
SCHEMA = 1
Kind = Literal["measured", "counted", "modelled", "emulated", "paper"]  # never mixed in one column
Status = Literal["ok", "failed"]


@dataclass(frozen=True)
class Metric:
    """One number. `q20`, `q80` and `n` where it is a median over samples; `reason` exactly where `value` is None."""

    name: str
    value: float | None
    unit: str
    kind: Kind = "measured"
    n: int | None = None
    q20: float | None = None
    q80: float | None = None
    reason: str | None = None

    def __post_init__(self) -> None:
        if self.value is not None and not math.isfinite(self.value):
            raise ValueError(f"metric {self.name}: {self.value} is no number; give a reason instead")
        if (self.value is None) != (self.reason is not None):
            raise ValueError(f"metric {self.name}: a value or a reason, not both or neither")


@dataclass(frozen=True)
class Traffic:
    """What one kind of message carried in one training step, per rank.

    payload_bytes: the whole tensor in its form on the wire; wire_bytes: what this rank sends (ring-equivalent and
    `modelled` where the library's own all-reduce moves it, `counted` where we ship the bytes ourselves).
    """

    group: str  # tp, dp
    way: str  # forward, backward, step
    op: str
    codec: str
    dtype: str
    purpose: str  # activations, statistic, loss, gradients, norm
    calls: int
    elements: int
    payload_bytes: int
    wire_bytes: float
    kind: Kind


@dataclass
class Record:
    id: str
    case: Mapping[str, Any]
    status: Status
    reason: str | None
    key: str  # digest of the case and of the code that ran it: a record with another key is stale
    machine: str
    provenance: dict[str, Any] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)  # seconds: setup, warmup, timed, profile, validate
    metrics: list[Metric] = field(default_factory=list)
    traffic: list[Traffic] = field(default_factory=list)
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if (self.status == "ok") != (self.reason is None):
            raise ValueError(f"record {self.id}: a reason exactly where the status is not ok")

    def metric(self, name: str) -> Metric | None:
        return next((m for m in self.metrics if m.name == name), None)


def folder(machine: str, results: Path | None = None) -> Path:
    return (results or RESULTS) / "runs" / machine


def path_of(machine: str, case_id: str, results: Path | None = None) -> Path:
    return folder(machine, results) / f"{case_id}.json"


def publish(path: Path, text: str) -> None:
    """Writes atomically: the old file or the new one, never a part. Raises OSError with nothing left behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def write(record: Record, results: Path | None = None) -> Path:
    path = path_of(record.machine, record.id, results)
    publish(path, json.dumps(asdict(record), indent=1, sort_keys=True, allow_nan=False) + "\n")
    return path


class RecordError(ValueError):
    """A record that cannot be read: names the file and what is wrong."""


def read(path: Path) -> Record:
    """Raises RecordError where the file is not a whole record of this schema, FileNotFoundError where there is none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        metrics = [Metric(**m) for m in data.pop("metrics")]
        traffic = [Traffic(**t) for t in data.pop("traffic")]
        record = Record(**data, metrics=metrics, traffic=traffic)
    except FileNotFoundError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise RecordError(f"{path.name}: not a record: {error}") from None
    if record.schema != SCHEMA:
        raise RecordError(f"{path.name}: schema {record.schema}, expected {SCHEMA}")
    return record


def read_all(folder: Path) -> Iterable[Record]:
    """All records below a folder, in order of path; unreadable ones raise RecordError."""
    return [read(path) for path in sorted(folder.glob("**/*.json"))]


def valid(path: Path, key: str) -> bool:
    """Whether the record stands: readable and of this key (a failed one too: failures are kept until `triaxis retry`)."""
    try:
        return read(path).key == key
    except (FileNotFoundError, RecordError):
        return False


class CaseFailed(RuntimeError):
    """The run gave no result: the message is the record's reason, one line."""
