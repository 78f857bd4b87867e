"""What this machine has, asked once: cores and memory that are ours to use, visible GPUs, driver. Imports no torch.

    Machine.here()  ->  Machine(name="h200x2", cpus=32, memory_gib=256.0, gpus=(Gpu(...), Gpu(...)), driver="580.95", reason=None)

`name` is the fingerprint that records are filed under: `cpu<cores>` without a GPU, else `<product>x<visible GPUs>`
(different products joined by a dash). GPUs come from NVML, cut down and ordered by CUDA_VISIBLE_DEVICES as CUDA reads it:
a list of indices, `GPU-` or `MIG-` UUIDs (or unique beginnings of them), ended by the first entry that names nothing.
Wherever that leaves no GPU, `reason` says why.
"""
from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from suite.measure.nvidia import Device, NoReading, Nvml

GIB = 2**30

# NVML's product name without "NVIDIA", "Tesla" and "GeForce" -> short name. Whole names only: H20 is no H200, A10G no A10,
# and the PCIe, NVL and SXM forms of one chip have different peaks.
PRODUCTS = {
    r"A(100|800)-PCIE-(40|80)GB": r"a{1}-{2}g-pcie",
    r"A(100|800) 80GB PCIe": r"a{1}-80g-pcie",
    r"A(100|800)-SXM4-(40|80)GB": r"a{1}-{2}g",
    r"H(100|800) PCIe": r"h{1}-pcie",
    r"H(100|800) NVL": r"h{1}-nvl",
    r"H(100|800) 80GB HBM2e": r"h{1}-pcie",
    r"H(100|800) (80|96)GB HBM3e?": r"h{1}",
    r"H(100|800) SXM5.*": r"h{1}",
    r"H800": r"h800",
    r"GH200 (96|120|144G|480)(GB)?( HBM3e?)?": r"gh200",
    r"H200 NVL": r"h200-nvl",
    r"H200( SXM.*)?": r"h200",
    r"H20": r"h20",
    r"H20-3e": r"h20-3e",
    r"B(200|300)( SXM.*)?": r"b{1}",
    r"GB(200|300)": r"gb{1}",
    r"RTX PRO 6000 Blackwell (Workstation|Server) Edition": r"rtxpro6000-{1}",
    r"RTX 6000 Ada Generation": r"rtx6000ada",
}


@dataclass(frozen=True)
class Gpu:
    """A visible GPU or MIG slice; its place in `Machine.gpus` is CUDA's number, `index` is NVML's."""

    index: int
    uuid: str
    name: str
    short: str
    memory_gib: float
    mig: bool
    compute_mode: str


@dataclass(frozen=True)
class Machine:
    """`cpus`: usable cores (affinity and cgroup quota); `memory_gib`: the smaller of RAM and the cgroup's limit."""

    name: str
    cpus: int
    memory_gib: float
    gpus: tuple[Gpu, ...] = ()
    driver: str | None = None
    reason: str | None = None

    @staticmethod
    def here() -> Machine:
        """This machine as the environment shows it; asked once for each value of the CUDA variables. Never raises."""
        return _here(os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER"))

    @staticmethod
    def ask(environment: Mapping[str, str], nvml: Nvml | None = None, root: Path = Path("/")) -> Machine:
        """Asks anew. `root` is where /proc and /sys lie. Never raises."""
        driver, gpus, reason = None, (), None
        try:
            ours = nvml or Nvml()
            try:
                driver = ours.driver()
                gpus, reason = _visible(ours, environment)
            finally:
                if nvml is None:
                    ours.close()
        except NoReading as error:
            reason = str(error)
        machine = Machine("", usable_cpus(root), usable_memory(root) / GIB, gpus, driver, reason)
        return replace(machine, name=fingerprint(machine))


@lru_cache
def _here(visible: str | None, order: str | None) -> Machine:
    given = {"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": order}
    return Machine.ask({name: value for name, value in given.items() if value is not None})


def fingerprint(machine: Machine) -> str:
    if not machine.gpus:
        return f"cpu{machine.cpus}"
    kinds = sorted({gpu.short for gpu in machine.gpus})
    return "-".join(f"{kind}x{sum(gpu.short == kind for gpu in machine.gpus)}" for kind in kinds)


def short_name(name: str) -> str:
    """`NVIDIA H100 80GB HBM3` -> `h100`, `NVIDIA A100-SXM4-80GB MIG 1g.10gb` -> `a100-80g-1g.10gb`; unknown: a slug."""
    product, _, part = name.partition(" MIG ")
    bare = re.sub(r"^(NVIDIA )?((Tesla|GeForce) )?", "", product.strip())
    short = ""
    for pattern, form in PRODUCTS.items():
        if found := re.fullmatch(pattern, bare, re.IGNORECASE):
            short = form.format(found.group(0), *(group or "" for group in found.groups())).lower()
            break
    words = [short or bare, part] if part else [short or bare]
    return re.sub(r"[^a-z0-9.+=-]+", "-", "-".join(words).lower()).strip("-") or "gpu"


def _visible(nvml: Nvml, environment: Mapping[str, str]) -> tuple[tuple[Gpu, ...], str | None]:
    """(visible GPUs in CUDA's order, why there is none)."""
    present = nvml.devices()
    if not present:
        return (), "NVML shows no GPU"
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        chosen, reason = present, None
    else:
        by_number = any(re.fullmatch(r"\d+", entry.strip()) for entry in listed.split(","))
        if by_number and environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID" and len({nvml.name(d) for d in present}) > 1:
            # CUDA numbers the fastest GPU first, NVML goes by the bus: with equal GPUs the two agree.
            return (), f"CUDA_VISIBLE_DEVICES={listed} means no certain GPU among different ones: set CUDA_DEVICE_ORDER=PCI_BUS_ID"
        chosen, reason = _choose(nvml, present, listed)
    gpus: list[Gpu] = []
    for device in chosen:
        if device.parent is None and nvml.mig(device):
            parts = nvml.slices(device)
            if not parts:
                reason = reason or f"GPU {device.index} is in MIG mode and has no slice"
                continue
            device = parts[0]  # CUDA shows one slice of a GPU that was named as a whole
        try:
            gpus.append(_gpu(nvml, device))
        except NoReading as error:
            reason = reason or f"GPU {device.index}: {error}"
    return tuple(gpus), None if gpus else reason or "no GPU is visible"


def _choose(nvml: Nvml, present: list[Device], listed: str) -> tuple[list[Device], str | None]:
    """The devices that CUDA_VISIBLE_DEVICES names, and what its first invalid entry was."""
    chosen: list[Device] = []
    if not listed.strip():
        return [], "CUDA_VISIBLE_DEVICES is empty: it hides every GPU"
    for entry in (word.strip() for word in listed.split(",")):
        found = _named(nvml, present, entry)
        if len(found) != 1:
            why = "names no GPU" if not found else "names several GPUs"
            return chosen, f"CUDA_VISIBLE_DEVICES: {entry!r} {why}"
        if found[0] in chosen:  # CUDA shows nothing at all where a device stands twice
            return [], f"CUDA_VISIBLE_DEVICES: {entry!r} stands twice"
        chosen += found
    return chosen, None


def _named(nvml: Nvml, present: list[Device], entry: str) -> list[Device]:
    if re.fullmatch(r"\d+", entry):
        return [device for device in present if device.index == int(entry)]
    if entry.startswith("GPU-"):
        return [device for device in present if device.uuid.startswith(entry)]
    if entry.startswith("MIG-GPU-"):  # the form of drivers before 470: MIG-GPU-<uuid>/<GPU instance>/<compute instance>
        parent, _, numbers = entry.removeprefix("MIG-").partition("/")
        return [part for device in present if device.uuid == parent and nvml.mig(device)
                for part in nvml.slices(device) if str(part.instance) == numbers.partition("/")[0]]
    if entry.startswith("MIG-"):
        return [part for device in present if nvml.mig(device) for part in nvml.slices(device) if part.uuid.startswith(entry)]
    return []


def _gpu(nvml: Nvml, device: Device) -> Gpu:
    name = nvml.name(device)
    try:
        mode = nvml.compute_mode(device)
    except NoReading:
        mode = "unknown"
    memory = nvml.memory_total(device) / GIB
    return Gpu(device.index, device.uuid, name, short_name(name), memory, device.parent is not None, mode)


def usable_cpus(root: Path = Path("/")) -> int:
    """Cores that this process may run on: the affinity mask, cut to the CPU quota of its cgroups; at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _cgroups(root, "cpu"):
        quota, period = [*_words(folder / "cpu.max"), "", ""][:2]
        if not quota:
            quota, period = [*_words(folder / "cpu.cfs_quota_us"), ""][0], [*_words(folder / "cpu.cfs_period_us"), ""][0]
        if quota.isdigit() and period.isdigit() and int(period):
            cores = min(cores, int(quota) // int(period))
    return max(1, cores)


def usable_memory(root: Path = Path("/")) -> int:
    """Bytes of memory that this process may use: RAM, cut to the limits of its cgroups; 0 where unknown."""
    lines = _words(root / "proc/meminfo", "\n")
    total = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:")), 0)
    for folder in _cgroups(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = [*_words(folder / name), ""][0]
            if limit.isdigit():
                total = min(total, int(limit)) if total else int(limit)
    return total


def _cgroups(root: Path, controller: str) -> list[Path]:
    """Folders that may hold the controller's limits: the process's cgroup and its ancestors, in version 2 and 1."""
    folders: list[Path] = []
    for line in _words(root / "proc/self/cgroup", "\n"):
        number, controllers, place = [*line.split(":", 2), "", "", ""][:3]
        if number == "0" and not controllers:
            top = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            top = root / "sys/fs/cgroup" / controllers
            if not top.exists():
                top = root / "sys/fs/cgroup" / controller
        else:
            continue
        inside = top / place.lstrip("/")
        folders += [folder for folder in (inside, *inside.parents) if folder == top or top in folder.parents]
    return folders


def _words(path: Path, separator: str | None = None) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").strip().split(separator)
    except (OSError, UnicodeDecodeError):
        return []
