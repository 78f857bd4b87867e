"""`triaxis doctor`: what this machine has, what would run on it and for how long, and what would go wrong.

A finding is `ok`, `note` (something runs slower or not at all) or `error` (a case would fail or measure the wrong thing).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from suite import record
from suite.plan import Planned, hours_by_workload
from suite.workload import SIZES

if TYPE_CHECKING:
    from suite.machine import Machine

SHM = 1 << 30  # bytes of /dev/shm that NCCL's shared-memory link and data loading want
DISK = 5 << 30


@dataclass(frozen=True)
class Finding:
    level: Literal["ok", "note", "error"]
    what: str
    text: str


@dataclass(frozen=True)
class Torch:
    """What torch says: its version, the CUDA it was built for, GPUs it sees, and why none."""

    version: str
    cuda: str | None
    gpus: int
    reason: str | None = None


def ask_torch() -> Torch:
    import warnings

    import torch

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    reason = str(said[0].message).splitlines()[0] if said else None
    return Torch(torch.__version__, torch.version.cuda, count, reason)


def examine(
    machine: Machine, torch: Torch, topology: Any = None, shm: Path = Path("/dev/shm"), results: Path | None = None
) -> list[Finding]:
    """Findings about hardware, driver, torch, memory shared between processes, disk and prepared data."""
    found = [Finding("ok", "machine", f"{machine.name}: {machine.cpus} cores, {machine.memory_gib:.0f} GiB")]
    found += _gpus(machine, torch)
    found += _connections(machine, topology)
    found += _space(machine, shm, Path(results or record.RESULTS))
    found.append(_data())
    return found


def _gpus(machine: Machine, torch: Torch) -> list[Finding]:
    built = f"torch {torch.version} is built for " + (f"CUDA {torch.cuda}" if torch.cuda else "the CPU only")
    if not machine.gpus:
        if torch.gpus:
            return [Finding("error", "GPUs", f"torch {torch.version} sees {torch.gpus}, NVML none: {machine.reason}")]
        return [Finding("note", "GPUs", f"none: {machine.reason or 'no reason given'}; {built}")]
    found = [
        Finding("ok", f"GPU {number}", f"{gpu.name}, {gpu.memory_gib:.0f} GiB, {gpu.uuid}")
        for number, gpu in enumerate(machine.gpus)
    ]
    if torch.gpus < len(machine.gpus):
        why = f" ({torch.reason})" if torch.reason else ""
        found.append(
            Finding(
                "error",
                "torch",
                f"NVML sees {len(machine.gpus)} GPUs (driver {machine.driver}), torch {torch.gpus}: {built}{why}; "
                "install the torch whose CUDA the driver supports",
            )
        )
    else:
        found.append(Finding("ok", "torch", f"{built}, driver {machine.driver}"))
    for number, gpu in enumerate(machine.gpus):
        mode = gpu.compute_mode.lower()
        if "exclusive" in mode or "prohibited" in mode:
            found.append(
                Finding(
                    "error",
                    f"GPU {number}",
                    f"compute mode {gpu.compute_mode}: link gloo lets ranks share a GPU, which needs `nvidia-smi -c DEFAULT`",
                )
            )
        if gpu.mig:
            found.append(
                Finding("note", f"GPU {number}", "a MIG slice: one slice a process, no peer-to-peer, NVML gives fewer readings")
            )
    return found


def _connections(machine: Machine, topology: Any) -> list[Finding]:
    if len(machine.gpus) < 2:
        return []
    if not topology:
        return [Finding("note", "P2P", "NVML gives no topology")]
    rows = topology.items() if isinstance(topology, dict) else enumerate(topology)
    return [Finding("ok", "P2P", f"{name}: {value}") for name, value in rows]


def _space(machine: Machine, shm: Path, results: Path) -> list[Finding]:
    found = []
    try:
        size = shutil.disk_usage(shm).total
        few = size < SHM and len(machine.gpus) > 1
        found.append(
            Finding(
                "note" if few else "ok",
                str(shm),
                f"{size / 2**30:.2f} GiB" + ("; link shm wants 1 GiB (containers: --shm-size)" if few else ""),
            )
        )
    except OSError:
        found.append(Finding("note", str(shm), "not there: link shm will not work"))
    place = results
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    level: Literal["ok", "error"] = "ok" if free >= DISK and os.access(place, os.W_OK) else "error"
    trouble = "" if level == "ok" else "; 5 GiB and the right to write are wanted"
    found.append(Finding(level, "disk", f"{free / 2**30:.0f} GiB free for results{trouble}"))
    return found


def _data() -> Finding:
    from suite.data import cache_folder

    made = sorted(path.parent.name for path in cache_folder().glob("tokens/*/meta.json"))
    if made:
        return Finding("ok", "data", f"prepared: {', '.join(made)}")
    return Finding("note", "data", "nothing prepared yet: the first run downloads text (`triaxis prepare` does it now)")


def forecast(planned: Sequence[Planned]) -> list[tuple[str, ...]]:
    """(workload, cases that run of each size, hours, what keeps the others) for each workload."""
    hours = hours_by_workload(planned)
    rows = []
    for name, estimate in sorted(hours.items()):
        mine = [row for row in planned if row.expanded.workload == name]
        counts = []
        for size in SIZES:
            here = [row for row in mine if row.expanded.size == size]
            counts.append(f"{sum(row.runs for row in here)} of {len(here)}" if here else "none defined")
        reasons = sorted({row.reason for row in mine if row.reason})
        rows.append((name, *counts, f"{estimate:.2f}", ", ".join(reasons) or "-"))
    return rows
