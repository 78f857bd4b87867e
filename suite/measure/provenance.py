"""Where a number comes from: hardware, versions, code and the variables that steer them. Goes into every record.

No host name, user name or path: values that hold one are recorded with `<path>`, `<host>` or `<user>` in its place.
"""
from __future__ import annotations

import contextlib
import getpass
import importlib.metadata
import os
import platform
import re
import socket
import subprocess
import tomllib
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from suite.machine import Machine
from suite.measure.nvidia import NoReading, Nvml
from suite.workload import ROOT

PREFIXES = ("NCCL_", "TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "NVSHMEM_", "CUDA_", "CUBLAS_", "OMP_", "GOMP_", "KMP_", "MKL_",
            "GLOO_", "TRITON_")
SINGLE = ("NVIDIA_TF32_OVERRIDE",)
PATH = re.compile(r"(?<![\w.])(~|\.{0,2})/[^\s:,;\"']*")
CODE = ("suite", "kernels", "workloads")  # folders whose changes make a checkout dirty


def provenance(machine: Machine | None = None) -> dict[str, Any]:
    """Plain data for `Record.provenance`; a value that is not there is None. `started`: UTC, ISO 8601."""
    machine = machine or Machine.here()
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine.name,
        "cpu": cpu_name(),
        "cpus": machine.cpus,
        "memory_gib": round(machine.memory_gib, 1),
        "gpus": [{"name": gpu.name, "memory_gib": round(gpu.memory_gib, 1), "mig": gpu.mig, "compute_mode": gpu.compute_mode}
                 for gpu in machine.gpus],
        "no_gpu": machine.reason,
        "driver": machine.driver,
        "topology": topology(machine),
        "versions": versions(),
        "packages": packages(),
        "git": git(ROOT),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "environment": environment(os.environ),
    }


def versions() -> dict[str, str | None]:
    """python, torch, cuda (that torch was built for), nccl (that torch runs), triton."""
    try:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, RuntimeError, TypeError):
        nccl = None
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = None
    return {"python": platform.python_version(), "torch": str(torch.__version__), "cuda": torch.version.cuda, "nccl": nccl,
            "triton": triton}


@lru_cache
def packages(project: Path = ROOT / "pyproject.toml") -> dict[str, str]:
    """Version of every distribution that the project pins, extras too, as far as it is installed."""
    with project.open("rb") as file:
        table = tomllib.load(file)["project"]
    pins = [*table["dependencies"], *(pin for extra in table.get("optional-dependencies", {}).values() for pin in extra)]
    found = {}
    for name in sorted({re.match(r"[\w.-]+", pin)[0] for pin in pins if "==" in pin}):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def cpu_name() -> str | None:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or None
    found = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", text, re.MULTILINE)
    return " ".join(found.group(1).split()) if found else platform.processor() or platform.machine() or None


def git(folder: Path) -> dict[str, Any] | None:
    """{commit, dirty} of the checkout that `folder` is the top of; dirty: code differs from the commit. Where it is none
    (an exported tree), the commit that TRIAXIS_COMMIT states, dirty unknown, or None."""
    def ask(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "--no-optional-locks", *arguments], cwd=folder, capture_output=True, text=True,
                                  timeout=20, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    top, commit = ask("rev-parse", "--show-toplevel"), ask("rev-parse", "HEAD")
    if not top or not commit or Path(top).resolve() != folder.resolve():
        stated = os.environ.get("TRIAXIS_COMMIT")
        return {"commit": stated, "dirty": None} if stated else None
    changes = ask("status", "--porcelain", "--", *CODE)
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that steer communication, numerics and threads, sorted, with private parts of their values masked."""
    return {name: masked(value) for name, value in sorted(variables.items()) if name.startswith(PREFIXES) or name in SINGLE}


def masked(text: str) -> str:
    text = PATH.sub("<path>", text)
    for word, sign in ((socket.gethostname(), "<host>"), (_user(), "<user>")):
        if word:
            text = re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", sign, text)
    return text


def topology(machine: Machine, nvml: Nvml | None = None) -> dict[str, Any] | None:
    """{link, level}: for each pair of visible GPUs how they reach each other's memory (nvlink, pcie, none) and their nearest
    PCIe ancestor; a cell NVML does not answer is its reason. None with fewer than two GPUs."""
    if len(machine.gpus) < 2:
        return None
    try:
        ours = nvml or Nvml()
        try:
            devices = [ours.find(gpu.uuid) for gpu in machine.gpus]
            return {name: [["self" if one is other else _cell(ask, one, other) for other in devices] for one in devices]
                    for name, ask in (("link", ours.link), ("level", ours.level))}
        finally:
            if nvml is None:
                ours.close()
    except NoReading as error:
        return {"reason": str(error)}


def _cell(ask, one, other) -> str:
    try:
        return ask(one, other)
    except NoReading as error:
        return str(error)


def _user() -> str | None:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return None
