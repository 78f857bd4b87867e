"""suite/machine.py: fingerprints, visible GPUs under every form of CUDA_VISIBLE_DEVICES, cgroup limits."""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pynvml
import pytest
from fake_nvml import EVERY_READING, FakeGpu, FakeNvml

from suite.machine import Machine, short_name, usable_cpus, usable_memory
from suite.measure.nvidia import NoReading, Nvml

TWO = [FakeGpu("GPU-aa11"), FakeGpu("GPU-bb22")]


def ask(gpus: list[FakeGpu], refuse: frozenset[str] = frozenset(), **environment: str) -> Machine:
    return Machine.ask(environment, Nvml(FakeNvml(pynvml, gpus, refuse)))


@pytest.mark.parametrize(("name", "short"), [
    ("NVIDIA H200", "h200"),
    ("NVIDIA H200 NVL", "h200-nvl"),
    ("NVIDIA H20", "h20"),
    ("NVIDIA H20-3e", "h20-3e"),
    ("NVIDIA H100 80GB HBM3", "h100"),
    ("NVIDIA H100 PCIe", "h100-pcie"),
    ("NVIDIA H100 NVL", "h100-nvl"),
    ("NVIDIA A100-SXM4-80GB", "a100-80g"),
    ("NVIDIA A100-SXM4-40GB", "a100-40g"),
    ("NVIDIA A100 80GB PCIe", "a100-80g-pcie"),
    ("NVIDIA A100-PCIE-40GB", "a100-40g-pcie"),
    ("NVIDIA A10G", "a10g"),
    ("NVIDIA B200", "b200"),
    ("NVIDIA GB200", "gb200"),
    ("NVIDIA L40S", "l40s"),
    ("NVIDIA GeForce RTX 5090", "rtx-5090"),
    ("Tesla T4", "t4"),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "h100-1g.10gb"),
    ("Some / odd (GPU)", "some-odd-gpu"),
])
def test_short_names_keep_products_apart(name: str, short: str):
    assert short_name(name) == short
    assert short_name(short) == short


def test_fingerprint_counts_the_visible_gpus():
    assert ask(TWO).name == "h200x2"
    assert ask(TWO, CUDA_VISIBLE_DEVICES="1").name == "h200x1"
    assert ask([FakeGpu(f"GPU-{i}", "NVIDIA A100-SXM4-80GB") for i in range(4)]).name == "a100-80gx4"
    assert ask([FakeGpu("GPU-1", "NVIDIA L4"), FakeGpu("GPU-2", "NVIDIA H200")]).name == "h200x1-l4x1"


@pytest.mark.parametrize(("listed", "uuids"), [
    ("0,1", ["GPU-aa11", "GPU-bb22"]),
    ("1,0", ["GPU-bb22", "GPU-aa11"]),
    (" 1 , 0 ", ["GPU-bb22", "GPU-aa11"]),
    ("1", ["GPU-bb22"]),
    ("GPU-bb22", ["GPU-bb22"]),
    ("GPU-b,GPU-aa11", ["GPU-bb22", "GPU-aa11"]),
    ("0,7,1", ["GPU-aa11"]),
    ("0,-1,1", ["GPU-aa11"]),
])
def test_visible_devices_as_cuda_reads_them(listed: str, uuids: list[str]):
    machine = ask(TWO, CUDA_VISIBLE_DEVICES=listed)
    assert [gpu.uuid for gpu in machine.gpus] == uuids
    assert machine.reason is None


@pytest.mark.parametrize(("listed", "why"), [
    ("", "hides every GPU"),
    ("-1", "names no GPU"),
    ("NoDevFiles", "names no GPU"),
    ("GPU-", "names several GPUs"),
    ("GPU-zz", "names no GPU"),
    ("MIG-99", "names no GPU"),
    ("0,0", "stands twice"),
])
def test_no_visible_gpu_gives_a_cpu_machine_and_a_reason(listed: str, why: str):
    machine = ask(TWO, CUDA_VISIBLE_DEVICES=listed)
    assert machine.gpus == ()
    assert machine.name == f"cpu{machine.cpus}"
    assert why in machine.reason


@pytest.mark.parametrize("listed", ["MIG-s2", "MIG-GPU-aa11/5/0"])
def test_a_mig_slice_is_found_by_its_uuid(listed: str):
    gpus = [FakeGpu("GPU-aa11", slices=[("MIG-s1", 3), ("MIG-s2", 5)]), FakeGpu("GPU-bb22")]
    machine = ask(gpus, CUDA_VISIBLE_DEVICES=listed)
    (gpu,) = machine.gpus
    assert (gpu.uuid, gpu.mig, gpu.index) == ("MIG-s2", True, 0)
    assert gpu.memory_gib < 20
    assert machine.name == "h200-1g.18gbx1"


def test_a_gpu_in_mig_mode_shows_one_slice_or_a_reason():
    assert [g.uuid for g in ask([FakeGpu("GPU-a", slices=[("MIG-s1", 1), ("MIG-s2", 2)])]).gpus] == ["MIG-s1"]
    empty = ask([FakeGpu("GPU-a", slices=[])])
    assert empty.gpus == () and "MIG mode and has no slice" in empty.reason


def test_numbers_among_different_gpus_need_the_bus_order():
    gpus = [FakeGpu("GPU-1", "NVIDIA L4"), FakeGpu("GPU-2", "NVIDIA H200")]
    unsure = ask(gpus, CUDA_VISIBLE_DEVICES="0")
    assert unsure.gpus == () and "PCI_BUS_ID" in unsure.reason
    assert ask(gpus, CUDA_VISIBLE_DEVICES="0", CUDA_DEVICE_ORDER="PCI_BUS_ID").name == "l4x1"
    assert ask(gpus, CUDA_VISIBLE_DEVICES="GPU-2").name == "h200x1"


@pytest.mark.parametrize("refused", sorted(EVERY_READING | {"nvmlSystemGetDriverVersion", "nvmlDeviceGetCount",
                                                            "nvmlDeviceGetName", "nvmlDeviceGetUUID", "nvmlDeviceGetMigMode",
                                                            "nvmlDeviceGetHandleByIndex"}))
def test_a_refusing_driver_gives_gpus_or_a_reason(refused: str):
    machine = ask(TWO, frozenset({refused}))
    assert bool(machine.gpus) != bool(machine.reason)


def test_no_driver_is_a_reason():
    class Broken:
        NVMLError = pynvml.NVMLError

        def nvmlInit(self):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

    with pytest.raises(NoReading, match="Driver Not Loaded"):
        Nvml(Broken())


def test_here_is_asked_once_and_follows_the_variable(monkeypatch: pytest.MonkeyPatch):
    first = Machine.here()
    assert first is Machine.here()
    assert first.cpus >= 1 and first.memory_gib > 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-GPU-nonsense/1/1")
    assert Machine.here().gpus == ()
    assert Machine.here().reason


def test_limits_of_both_cgroup_versions(tmp_path: Path):
    def put(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    free = len(os.sched_getaffinity(0))
    put("proc/meminfo", "MemTotal:       8388608 kB\nMemFree: 1 kB\n")
    assert (usable_cpus(tmp_path), usable_memory(tmp_path)) == (free, 8 * 2**30)
    put("proc/self/cgroup", "0::/job/step\n")
    put("sys/fs/cgroup/job/step/cpu.max", "max 100000\n")
    put("sys/fs/cgroup/job/cpu.max", "150000 100000\n")
    put("sys/fs/cgroup/job/memory.max", f"{2**30}\n")
    assert (usable_cpus(tmp_path), usable_memory(tmp_path)) == (1, 2**30)
    put("proc/self/cgroup", "4:memory:/m\n1:cpu,cpuacct:/c\n")
    put("sys/fs/cgroup/cpu,cpuacct/c/cpu.cfs_quota_us", "50000\n")
    put("sys/fs/cgroup/cpu,cpuacct/c/cpu.cfs_period_us", "100000\n")
    put("sys/fs/cgroup/memory/m/memory.limit_in_bytes", f"{3 * 2**30}\n")
    assert (usable_cpus(tmp_path), usable_memory(tmp_path)) == (1, 3 * 2**30)


def test_machine_flops_and_readings_import_no_torch():
    code = "import sys, suite.machine, suite.measure.nvml, suite.measure.flops; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent, check=False).returncode == 0
