"""suite/measure/nvml.py and samples.py with a fake NVML: values, reasons, counters, the sampler as a process."""
from __future__ import annotations

import io
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest
from fake_nvml import EVERY_READING, FakeGpu, FakeNvml

from suite.machine import Gpu, Machine
from suite.measure import samples
from suite.measure.nvidia import Gpm, NoReading, Nvml
from suite.measure.nvml import Reader, Sampler, descends, sample, summarise, used
from suite.record import Metric
from suite.workload import ROOT


def by_name(metrics: list[Metric]) -> dict[str, Metric]:
    return {metric.name: metric for metric in metrics}


def run_sampler(gpus: list[FakeGpu], refuse: frozenset[str] = frozenset(), rounds: int = 5) -> str:
    """The sampler's file after that many rows a GPU, run in this process."""
    out = io.StringIO()

    def going() -> bool:
        return sum(line[:1].isdigit() for line in out.getvalue().splitlines()) < (rounds - 1) * len(gpus)

    nvml = Nvml(FakeNvml(pynvml, gpus, refuse))
    sample(nvml, [gpu.uuid for gpu in gpus], out, 0.001, os.getpid(), going, lambda: None)
    return out.getvalue()


def summary(tmp_path: Path, text: str, t0: float = -math.inf, t1: float = math.inf) -> dict[str, Metric]:
    path = tmp_path / "case.gpu.csv"
    path.write_text(text)
    times: dict[str, list[float]] = {}
    for line in text.splitlines()[1:]:
        if not line.startswith("#"):
            times.setdefault(line.split(",")[1], []).append(float(line.split(",")[0]))
    first, last = max(t[0] for t in times.values()), min(t[-1] for t in times.values())
    return by_name(summarise(path, max(t0, first), min(t1, last)))


def test_every_reading_is_a_value(tmp_path: Path):
    found = summary(tmp_path, run_sampler([FakeGpu("GPU-a", pids=[os.getpid()]), FakeGpu("GPU-b", pids=[os.getpid()])]))
    assert set(found) == set(samples.RULES)
    assert found["gpu_utilization"].value == 99
    assert [found[name].value for name in ("sm_active", "sm_occupancy", "tensor_active")] == [60, 25, 40]
    assert found["gpu_power"].value == 1000 and found["gpu_power"].unit == "W"
    assert found["sm_clock"].value == 1980 and found["sm_clock"].n > found["gpu_power"].n >= 2
    assert found["gpu_memory_used"].value == 3 * 1024 and found["gpu_temperature"].value == 51
    assert found["nvlink_rx"].value > 0 and found["shared"].value == 0
    assert "too short" in found["gpu_energy"].reason
    assert found["dram_active"].reason == "Not Supported"


READS = {
    "nvmlDeviceGetUtilizationRates": {"gpu_utilization"}, "nvmlDeviceGetPowerUsage": {"gpu_power"},
    "nvmlDeviceGetTotalEnergyConsumption": {"gpu_energy"}, "nvmlDeviceGetClockInfo": {"sm_clock"},
    "nvmlDeviceGetTemperature": {"gpu_temperature"}, "nvmlDeviceGetMemoryInfo": {"gpu_memory_used"},
    "nvmlDeviceGetFieldValues": {"nvlink_rx", "nvlink_tx"}, "nvmlDeviceGetComputeRunningProcesses": {"shared"},
    "nvmlGpmQueryDeviceSupport": {"sm_active", "sm_occupancy", "tensor_active", "dram_active"},
    "nvmlGpmSampleGet": {"sm_active", "sm_occupancy", "tensor_active", "dram_active"},
    "nvmlGpmMetricsGet": {"sm_active", "sm_occupancy", "tensor_active", "dram_active"},
}


@pytest.mark.parametrize("refused", sorted(READS))
def test_a_refused_reading_is_a_reason_and_the_rest_stay_values(tmp_path: Path, refused: str):
    found = summary(tmp_path, run_sampler([FakeGpu("GPU-a", pids=[os.getpid()])], frozenset({refused})))
    without = {name for name, metric in found.items() if metric.reason and "Not Supported" in metric.reason}
    assert without | {"gpu_energy", "dram_active"} == READS[refused] | {"gpu_energy", "dram_active"}
    assert {name for name, metric in found.items() if metric.value is None} == READS[refused] | {"gpu_energy", "dram_active"}


def test_a_driver_that_refuses_everything_gives_only_reasons(tmp_path: Path):
    found = summary(tmp_path, run_sampler([FakeGpu("GPU-a")], EVERY_READING))
    assert all(metric.value is None and metric.reason for metric in found.values())


def test_a_dead_nvlink_counter_is_no_zero(tmp_path: Path):
    found = summary(tmp_path, run_sampler([FakeGpu("GPU-a", nvlink=0)]))
    for name in ("nvlink_rx", "nvlink_tx"):
        assert found[name].value is None and "stands at 0" in found[name].reason


def test_one_gpu_that_does_not_answer_makes_a_sum_a_reason(tmp_path: Path):
    found = summary(tmp_path, run_sampler([FakeGpu("GPU-a"), FakeGpu("GPU-b", gpm=0)]))
    assert found["sm_active"].reason == "this GPU has no GPM" and found["gpu_power"].value == 1000


def rows_of(points: list[tuple[float, int]], uuid: str = "GPU-a", column: str = "energy") -> str:
    return f"time,gpu,{column}\n" + "".join(f"{moment},{uuid},{value}\n" for moment, value in points)


def test_counters_are_differenced_at_the_window_and_energy_needs_two_seconds(tmp_path: Path):
    text = rows_of([(10.0, 1000), (11.0, 2000), (12.0, 6000), (13.0, 7000), (14.0, 9000)])
    found = summary(tmp_path, text, 10.5, 13.5)
    assert found["gpu_energy"].value == pytest.approx((8000 - 1500) / 1000) and found["gpu_energy"].unit == "J"
    assert "1.50 s is too short" in summary(tmp_path, text, 11.0, 12.5)["gpu_energy"].reason
    (tmp_path / "x.csv").write_text(text)
    assert "do not cover" in by_name(summarise(tmp_path / "x.csv", 9.0, 13.0))["gpu_energy"].reason
    assert "ran backwards" in summary(tmp_path, rows_of([(1, 5), (2, 3), (4, 9)]))["gpu_energy"].reason


def test_sampling_that_stopped_early_is_a_reason(tmp_path: Path):
    (tmp_path / "x.csv").write_text(rows_of([(1, 300), (2, 310), (3, 305)], column="power"))
    assert by_name(summarise(tmp_path / "x.csv", 1, 3))["gpu_power"].value == 305
    assert "ended before" in by_name(summarise(tmp_path / "x.csv", 1, 9))["gpu_power"].reason


def test_a_broken_file_names_its_line_and_a_cut_line_is_left_out(tmp_path: Path):
    path = tmp_path / "x.csv"
    path.write_text(rows_of([(1, 300), (2, 310)]) + "3,GPU-a,4")
    assert samples.read(path).gpus["GPU-a"]["energy"] == [(1, 300), (2, 310)]
    path.write_text(rows_of([(1, 300)]) + "oops,GPU-a,5\n")
    with pytest.raises(ValueError, match=r"x\.csv: line 3"):
        samples.read(path)


def test_without_a_gpu_everything_is_a_reason(tmp_path: Path):
    with Sampler(tmp_path / "x.csv", SimpleNamespace(rank=0, backend="none", device=SimpleNamespace(type="cpu"))) as sampler:
        pass
    assert not sampler and sampler.path is None and not (tmp_path / "x.csv").exists()
    found = summarise(sampler.path, 0, 1, sampler.reason)
    assert {metric.name for metric in found} == set(samples.RULES)
    assert {metric.reason for metric in found} == {"no GPU"}


@pytest.mark.parametrize(("rank", "backend", "ranks", "uuids"), [
    (0, "none", None, ["GPU-0"]), (0, "nccl", "2", ["GPU-0", "GPU-1"]), (0, "gloo", "4", ["GPU-0"]), (1, "nccl", "2", []),
])
def test_rank_0_samples_the_gpus_that_the_ranks_use(monkeypatch: pytest.MonkeyPatch, rank: int, backend: str, ranks: str | None,
                                                    uuids: list[str]):
    gpus = tuple(Gpu(i, f"GPU-{i}", "NVIDIA H200", "h200", 141.0, False, "default") for i in range(3))
    monkeypatch.setattr(Machine, "here", staticmethod(lambda: Machine("h200x3", 1, 1.0, gpus)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    mesh = SimpleNamespace(rank=rank, backend=backend, device=SimpleNamespace(type="cuda"))
    assert used(mesh)[0] == uuids
    monkeypatch.setattr(Machine, "here", staticmethod(lambda: Machine("cpu1", 1, 1.0, reason="Driver Not Loaded")))
    assert used(mesh)[0] == [] and used(mesh)[1]


def test_foreign_processes_are_counted(tmp_path: Path):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert descends(child.pid, os.getpid()) is True and descends(os.getppid(), os.getpid()) is False
        assert descends(2**22 + 1, os.getpid()) is None
        ours = FakeGpu("GPU-a", pids=[os.getpid(), child.pid])
        assert summary(tmp_path, run_sampler([ours]))["shared"].value == 0
        other = FakeGpu("GPU-a", pids=[os.getpid(), os.getppid()])
        assert summary(tmp_path, run_sampler([other]))["shared"].value == 1
        hidden = FakeGpu("GPU-a", pids=[2**22 + 1])
        assert "namespace" in summary(tmp_path, run_sampler([hidden]))["shared"].reason
        for blind in (FakeGpu("GPU-a"), FakeGpu("GPU-a", pids=[os.getppid()])):
            assert "our own processes" in summary(tmp_path, run_sampler([blind]))["shared"].reason
    finally:
        child.kill()
        child.wait()


def test_gpm_of_a_slice_asks_its_gpu():
    nvml = Nvml(FakeNvml(pynvml, [FakeGpu("GPU-a", slices=[("MIG-s", 4)])]))
    gpm = Gpm(nvml, nvml.find("MIG-s"))
    with pytest.raises(NoReading, match="no interval"):
        gpm.read()
    assert gpm.read()["sm_active"] == 60
    told = []
    Reader(nvml, nvml.find("MIG-s"), os.getpid(), lambda *what: told.append(what)).row()
    assert [name for name, _ in told] == ["foreign"]


@pytest.fixture
def faked(tmp_path: Path) -> dict[str, str]:
    """An environment in which `import pynvml` gives two fake GPUs."""
    (tmp_path / "pynvml.py").write_text(f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("real_pynvml", {pynvml.__file__!r})
sys.modules["real_pynvml"] = real = importlib.util.module_from_spec(spec)
spec.loader.exec_module(real)
sys.path.append({str(Path(__file__).parent)!r})
from fake_nvml import FakeGpu, FakeNvml
sys.modules[__name__] = FakeNvml(real, [FakeGpu("GPU-a"), FakeGpu("GPU-b")])
""")
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def test_the_sampler_is_a_process_of_its_own(tmp_path: Path, faked: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", faked["PYTHONPATH"])
    with Sampler(tmp_path / "sub" / "x.csv", gpus=["GPU-a", "GPU-b"], interval=0.05) as sampler:
        assert sampler.path is not None, sampler.reason
        t0 = time.monotonic()
        time.sleep(2.1)
        t1 = time.monotonic()
    found = by_name(summarise(sampler.path, t0, t1))
    assert found["gpu_energy"].value == pytest.approx(1000 * (t1 - t0), rel=0.02)
    assert found["nvlink_tx"].value == pytest.approx(2 * 1000 * 1024 * (t1 - t0), rel=0.02)
    assert found["gpu_power"].n >= 20 and found["sm_active"].value == pytest.approx(60)
    with Sampler(tmp_path / "y.csv", gpus=["GPU-zz"]) as missing:
        pass
    assert missing.path is None and "NVML shows no GPU GPU-zz" in missing.reason


def test_the_sampler_dies_with_its_parent(tmp_path: Path, faked: dict[str, str]):
    code = f"""
import sys, time
from pathlib import Path
from suite.measure.nvml import Sampler
with Sampler(Path({str(tmp_path / "x.csv")!r}), gpus=["GPU-a"]) as sampler:
    print(sampler._process.pid, flush=True)
    time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=faked, stdout=subprocess.PIPE, text=True)
    child = None
    try:
        child = int(parent.stdout.readline())
        assert descends(child, parent.pid)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        end = time.monotonic() + 5
        while alive(child) and time.monotonic() < end:
            time.sleep(0.02)
        assert not alive(child)
    finally:
        parent.kill()
        parent.stdout.close()
        if child is not None and alive(child):
            os.kill(child, signal.SIGKILL)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
