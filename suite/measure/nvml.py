"""GPU readings during a run, taken by a process of their own so that the timed process does nothing for them.

    with Sampler(path, mesh) as sampler:                    starts  python -m suite.measure.nvml --out FILE --gpus UUID,..
        ...                                                 one row a GPU and interval (0.1 s) in FILE
    summarise(sampler.path, t0, t1, sampler.reason)         metrics over a window of time.monotonic()

Columns: time (s, monotonic), gpu (UUID), then what `suite.measure.nvidia` reads: utilization (%), memory_used (B), power (W),
energy (mJ, counter), clock (MHz), temperature (C), nvlink_rx, nvlink_tx (B, counters), GPM's sm_active, sm_occupancy,
tensor_active, dram_active (%), and foreign (processes on the GPU that are not ours). An empty cell was not read; a row
`#,UUID,reading,reason` says why. Imports no torch.
"""
from __future__ import annotations

import argparse
import contextlib
import csv
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from suite.machine import Machine
from suite.measure.nvidia import GPM, Device, Gpm, NoReading, Nvml
from suite.measure.samples import summarise
from suite.workload import ROOT

__all__ = ["Reader", "Sampler", "sample", "summarise"]

READINGS = ("utilization", "memory_used", "power", "energy", "clock", "temperature", "nvlink_rx", "nvlink_tx")
COLUMNS = ("time", "gpu", *READINGS, *GPM, "foreign")
NO_GPU = "no GPU"
PR_SET_PDEATHSIG = 1
FOREIGN_EVERY = 10  # rows between two looks at the process list


class Mesh(Protocol):
    rank: int
    device: Any
    backend: str


class Sampler:
    """Starts and stops the sampling process of rank 0, for the GPUs of this host that the mesh's ranks use (`gpus`: UUIDs of
    others). Without GPUs, or where it cannot start, it is false, `path` is None and `reason` says why.

    family: the process whose descendants are ours; default: torchrun's agent where there is one, else this process.
    Use it from the main thread: the parent-death signal is sent when the thread that started the process ends.
    """

    def __init__(self, path: Path, mesh: Mesh | None = None, *, gpus: Sequence[str] | None = None, interval: float = 0.1,
                 family: int | None = None) -> None:
        self._file, self._interval = path.absolute(), interval
        self._family = family or (os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid())
        self._process: subprocess.Popen | None = None
        self.path: Path | None = None
        self.reason: str | None = None
        if gpus is None:
            gpus, self.reason = used(mesh) if mesh is not None else ([], NO_GPU)
        self._gpus = list(gpus)
        if not self._gpus:
            self.reason = self.reason or NO_GPU

    def __bool__(self) -> bool:
        return self.path is not None

    def __enter__(self) -> Sampler:
        if not self._gpus:
            return self
        self._file.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "suite.measure.nvml", "--out", str(self._file), "--gpus", ",".join(self._gpus),
                   "--interval", str(self._interval), "--parent", str(os.getpid()), "--family", str(self._family)]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                         stderr=subprocess.PIPE, text=True)
        # The first line comes after the first rows: a window that starts now has a sample before it.
        if self._process.stdout.readline().strip() == "sampling":
            self.path = self._file
        else:
            lines = self._process.communicate()[1].strip().splitlines()
            self.reason = lines[-1] if lines else f"the GPU sampler ended with code {self._process.returncode}"
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        for stream in (self._process.stdout, self._process.stderr):
            stream.close()


def used(mesh: Mesh) -> tuple[list[str], str | None]:
    """(UUIDs of the GPUs that the ranks on this host use, why there is none)."""
    if mesh.device.type != "cuda":
        return [], NO_GPU
    if mesh.rank != 0:
        return [], "rank 0 samples"
    machine = Machine.here()
    # Ranks joined by gloo share the first GPU; under NCCL each has one, in order of its local rank.
    count = 1 if mesh.backend == "gloo" else int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return [gpu.uuid for gpu in machine.gpus[:count]], machine.reason


class Reader:
    """Reads one GPU. Each reason is told once to `tell(reading, reason)`."""

    def __init__(self, nvml: Nvml, device: Device, family: int, tell: Callable[[str, str], None]) -> None:
        self._nvml, self._device, self._family, self._tell = nvml, device, family, tell
        self._told: set[str] = set()
        self._ours: dict[int, bool | None] = {}
        self._rows = 0
        try:
            self._gpm: Gpm | None = Gpm(nvml, device)
        except NoReading as error:
            self._gpm = None
            for name in GPM:
                self._missing(name, str(error))

    def row(self) -> dict[str, object]:
        values: dict[str, object] = {}
        for name in READINGS:
            try:
                values[name] = getattr(self._nvml, name)(self._device)
            except NoReading as error:
                self._missing(name, str(error))
        if self._gpm is not None:
            try:
                for name, value in self._gpm.read().items():
                    if isinstance(value, str):
                        self._missing(name, value)
                    else:
                        values[name] = value
            except NoReading as error:
                if self._rows:
                    for name in GPM:
                        self._missing(name, str(error))
        if self._rows % FOREIGN_EVERY == 0:
            try:
                values["foreign"] = self.foreign()
            except NoReading as error:
                self._missing("foreign", str(error))
        self._rows += 1
        return {"time": time.monotonic(), "gpu": self._device.uuid, **values}

    def foreign(self) -> int:
        """Processes on the GPU that do not descend from the family. Raises NoReading where NVML's list cannot be read here:
        it has ids of another namespace, or not even our own processes."""
        pids = self._nvml.processes(self._device)
        for pid in pids - self._ours.keys():
            self._ours[pid] = descends(pid, self._family)
        if any(self._ours[pid] is None for pid in pids):
            raise NoReading("NVML's process ids are not visible here (another process namespace)")
        foreign = sum(not self._ours[pid] for pid in pids)
        if foreign == len(pids):
            raise NoReading("NVML does not list our own processes on this GPU")
        return foreign

    def _missing(self, name: str, reason: str) -> None:
        if name not in self._told:
            self._told.add(name)
            self._tell(name, reason)


def descends(pid: int, ancestor: int) -> bool | None:
    """Whether a process is `ancestor` or descends from it; None where there is no such process here."""
    known = False
    while pid > 0:
        if pid == ancestor:
            return True
        try:
            text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return False if known else None
        known, pid = True, int(text.rpartition(")")[2].split()[1])
    return False


def sample(nvml: Nvml, gpus: Sequence[str], file: TextIO, interval: float, family: int, going: Callable[[], bool],
           ready: Callable[[], None]) -> None:
    """Writes rows until `going()` is false, one last time after that. Raises NoReading where a GPU is not there."""
    writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
    writer.writeheader()
    plain = csv.writer(file, lineterminator="\n")
    readers = []
    for uuid in gpus:
        device = nvml.find(uuid)
        readers.append(Reader(nvml, device, family, lambda name, reason, uuid=uuid: plain.writerow(["#", uuid, name, reason])))
    due, first, last = time.monotonic(), True, False
    while True:
        for reader in readers:
            writer.writerow(reader.row())
        file.flush()
        if first:
            ready()
            first = False
        if last:
            return
        due = max(due + interval, time.monotonic())
        while going() and (left := due - time.monotonic()) > 0:
            time.sleep(min(left, 0.05))
        last = not going()


def die_with_parent(parent: int) -> None:
    """Asks the kernel for SIGKILL when the parent dies; leaves at once where it is dead already."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit(1)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="suite.measure.nvml", description="Samples GPU readings into a CSV file.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpus", required=True, help="UUIDs, joined by commas")
    parser.add_argument("--interval", type=float, default=0.1, help="seconds between two rows of a GPU")
    parser.add_argument("--parent", type=int, default=None, help="the process to die with")
    parser.add_argument("--family", type=int, default=0, help="the process whose descendants are not foreign")
    options = parser.parse_args(arguments)
    if options.parent is not None:
        die_with_parent(options.parent)
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    # Ctrl-C reaches the whole group; the parent decides when sampling ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with options.out.open("w", encoding="utf-8", newline="") as file:
            sample(Nvml(), options.gpus.split(","), file, options.interval, options.family, lambda: not stopped,
                   lambda: print("sampling", flush=True))
    except (NoReading, OSError) as error:
        print(f"the GPU sampler gave up: {error.strerror if isinstance(error, OSError) else error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
