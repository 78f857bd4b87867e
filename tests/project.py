"""A small copy of the project for tests of runner and pipeline: real plumbing, and a trainer that does what a case's name says.

name            what the rank does
ok...           two steps, one metric, a loss curve
slow...         the same with 0.2 s a step, for FAKE_STEPS steps
nan... oom... bug...   raises
kill... exit... hang...   signal 9, exit status 5, sleeps for ever (rank 1 where there is one)
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
REAL = [
    "__init__",
    "case",
    "workload",
    "record",
    "seams",
    "digest",
    "plan",
    "locks",
    "link",
    "processes",
    "events",
    "rendezvous",
    "attempt",
    "show",
    "run",
    "rank",
    "cli",
    "doctor",
    "pipeline",
]

MACHINE = """
import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    uuid: str


@dataclass(frozen=True)
class Machine:
    name: str = "cpu2"
    cpus: int = 2
    memory_gib: float = 8.0
    gpus: tuple = ()
    driver: str = None
    reason: str = "no GPU"

    @staticmethod
    def here():
        n = int(os.environ.get("FAKE_GPUS", 0))
        return Machine(f"h200x{n}", 16, 99.0, tuple(Gpu(f"GPU-{i}") for i in range(n)), "1", None) if n else Machine()
"""
MESH = """
import os
from dataclasses import dataclass


@dataclass
class Mesh:
    rank: int = 0

    @classmethod
    def from_env(cls, dp=1, pp=1, tp=1, device="cpu", link=None):
        if os.environ.get("FAKE_JOIN"):
            raise RuntimeError(os.environ["FAKE_JOIN"])
        if os.environ.get("WORLD_SIZE") != os.environ.get("LOCAL_WORLD_SIZE"):
            import torch.distributed

            torch.distributed.init_process_group("gloo")
        return cls(int(os.environ.get("RANK", 0)))

    def close(self):
        pass
"""
TRAIN = """
import os
import signal
import sys
import time
from dataclasses import dataclass, field

from suite.record import CaseFailed, Metric


@dataclass
class Outcome:
    phases: dict = field(default_factory=dict)
    metrics: list = field(default_factory=list)
    traffic: list = field(default_factory=list)
    losses: list = field(default_factory=list)
    samples: object = None
    facts: dict = field(default_factory=dict)


def execute(case, mesh, *, progress, folder):
    victim = mesh.rank == case.mesh.ranks - 1
    name = case.name
    print(f"rank {mesh.rank} runs {name}", flush=True)
    if name.startswith("nan"):
        raise CaseFailed("loss is nan at step 17")
    if name.startswith("oom"):
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
    if name.startswith("bug"):
        raise KeyError("what")
    if victim and name.startswith("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    if victim and name.startswith("exit"):
        os._exit(5)
    if victim and name.startswith("hang"):
        time.sleep(1000)
    if not victim and name.startswith(("kill", "exit", "hang")):
        time.sleep(1000)
    steps = int(os.environ.get("FAKE_STEPS", 2)) if name.startswith("slow") else 2
    for step in range(steps):
        if name.startswith("slow"):
            time.sleep(0.2)
        progress(step + 1, steps, 3.0 - step / 10, 1000.0)
    keep = {k: v for k, v in os.environ.items() if k.startswith(("NCCL_", "TORCH_", "NVSHMEM_", "OMP_", "CUDA_V"))}
    with open(os.environ.get("FAKE_LOG", os.devnull), "a") as log:
        print(name, file=log)
    return Outcome(phases={"train": 0.1}, metrics=[Metric("loss", 3.0, "nats")], facts={"environment": keep},
                   losses=[{"step": i, "loss": 3.0, "lr": 0.1, "grad_norm": 1.0, "tokens": 8} for i in range(steps)])
"""
DATA = """
from dataclasses import dataclass
from pathlib import Path


class DataError(ValueError):
    pass


@dataclass
class Prepared:
    vocab_size: int = 1024


def cache_folder():
    return Path("cache")


def prepare(data, vocab):
    if data.text == "missing.txt":
        raise DataError("missing.txt: no such file")
    return Prepared()
"""
PAGE = """
import sys
from pathlib import Path

folder = Path("results/tables")
folder.mkdir(parents=True, exist_ok=True)
rows = sorted(path.name for path in Path("results/runs").glob("*/*.json"))
for name in {names!r}:
    (folder / name).write_text("\\n".join(rows) + "\\n")
"""
FIGURE = """
import sys
from pathlib import Path

Path("results/figures").mkdir(parents=True, exist_ok=True)
Path("results/figures", sys.argv[-1] + ".png").write_bytes(b"a picture")
"""
PAGES = {
    "tables": ["measurements.csv", "communication.csv", "losses.csv", "loss_summary.csv", "loss_gaps.csv", "layouts.csv"],
    "claims": ["claims.csv", "claims.md"],
    "coverage": ["coverage.md"],
    "verdict": ["verdict.md"],
}


def build(folder: Path, workloads: dict[str, Sequence[dict[str, Any]]]) -> Path:
    """Writes the copy; `workloads`: name -> rows of its small size (JSON is YAML)."""
    suite = folder / "suite"
    files = {
        "machine": MACHINE,
        "mesh": MESH,
        "train": TRAIN,
        "data": DATA,
        "measure/__init__": "",
        "report/__init__": "",
        "measure/provenance": "def provenance():\n    return {'started': 'now'}\n",
        "report/figures": FIGURE,
        "factor/dense": "",
        "layout/megatron": "",
        "precision/bf16": "",
        "comm/bf16": "",
        "comm/int8": "SCALE = 127\n",
        **{f"report/{page}": PAGE.format(names=names) for page, names in PAGES.items()},
    }
    for name, text in files.items():
        (suite / f"{name}.py").parent.mkdir(parents=True, exist_ok=True)
        (suite / f"{name}.py").write_text(text)
    for name in REAL:
        shutil.copy(ROOT / "suite" / f"{name}.py", suite)
    shutil.copytree(ROOT / "suite" / "report" / "captions", suite / "report" / "captions")
    (folder / "workloads").mkdir()
    shutil.copy(ROOT / "workloads" / "models.yaml", folder / "workloads")
    (folder / "workloads" / "claims.csv").write_text("id\n")
    shutil.copy(ROOT / "Snakefile", folder)
    for name, rows in workloads.items():
        write(folder, name, rows)
    return folder


def write(folder: Path, name: str, rows: Sequence[dict[str, Any]]) -> None:
    filled = [{"model": "gpt-tiny", **row} for row in rows]
    (folder / "workloads" / f"{name}.yaml").write_text(json.dumps({"title": name, "sizes": {"small": filled}}))


def environment(folder: Path, **variables: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TRIAXIS_", "FAKE_", "MASTER_", "SNAKEMAKE_"))}
    return {**kept, "PYTHONPATH": str(folder), "FAKE_LOG": str(folder / "ran"), **variables}


def start(folder: Path, *command: str, **variables: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=environment(folder, **variables),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def call(folder: Path, *command: str, **variables: str) -> tuple[int, str]:
    """(exit status, output) of `python -m command`."""
    process = start(folder, *command, **variables)
    out, _ = process.communicate(timeout=120)
    return process.returncode, out


def launch(folder: Path, *cases: str, name: str = "toy-launch", **variables: str) -> tuple[int, str]:
    return call(folder, "suite.cli", "launch", name, "--stamp", f"results/launches/{name}.json", *cases, **variables)


def record(folder: Path, case: str, machine: str = "cpu2") -> dict[str, Any]:
    return json.loads((folder / "results" / "runs" / machine / f"{case}.json").read_text())


def ran(folder: Path) -> list[str]:
    """Cases that reached the end on some rank, in order, since the last call."""
    path = folder / "ran"
    rows = path.read_text().split() if path.exists() else []
    path.unlink(missing_ok=True)
    return rows


def processes(folder: Path) -> list[str]:
    """Command lines of living processes that work in the copy (their environment names it)."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if path.joinpath("stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                continue
            if f"FAKE_LOG={folder}/ran".encode() in path.joinpath("environ").read_bytes():
                found.append(path.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode())
        except (OSError, IndexError):
            continue
    return found


def until(condition: Any, seconds: float = 30.0) -> None:
    """Waits for a condition. Raises AssertionError."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)
