"""suite/measure: FLOPs and peaks against published values, clock, profile, provenance, calibration."""
from __future__ import annotations

import json
import math
import re
import socket
import subprocess
import time
from importlib import metadata
from pathlib import Path

import pynvml
import pytest
import torch
import torch.distributed as dist
from fake_nvml import EVERY_READING, FakeGpu, FakeNvml

from suite.machine import Gpu, Machine
from suite.measure import calibrate, flops, profile, provenance
from suite.measure.clock import ClockError, StepClock, metric_from, quantiles
from suite.measure.nvidia import Nvml
from suite.record import Metric
from suite.workload import ROOT, models

CARDS = models()


def by_name(metrics: list[Metric]) -> dict[str, Metric]:
    return {metric.name: metric for metric in metrics}


# Published counts; GPT's are OPT's (same shapes) less its 15 more vocabulary rows and 2 more positions.
@pytest.mark.parametrize(("model", "count"), [
    ("qwen2.5-0.5b", 494_032_768),
    ("qwen2.5-1.5b", 1_543_714_304),
    ("qwen2.5-3b", 3_085_938_688),
    ("qwen2.5-7b", 7_615_616_512),
    ("qwen2.5-14b", 14_770_033_664),
    ("gpt-125m", 125_239_296 - 17 * 768),
    ("gpt-350m", 354_823_168 + 1024 * 1024),  # GPT-2 medium with 2048 positions
    ("gpt-1.3b", 1_315_758_080 - 17 * 2048),
    ("gpt-2.7b", 2_651_596_800 - 17 * 2560),
    ("gpt-6.7b", 6_658_473_984 - 17 * 4096),
    ("gpt-13b", 12_853_473_280 - 17 * 5120),
])
def test_parameters_equal_the_published_count(model: str, count: int):
    assert flops.parameters(CARDS[model]) == count


@pytest.mark.parametrize(("model", "billions"), [("llama-1b", 1.28), ("llama-3b", 3.27), ("llama-7b", 6.61), ("llama-13b", 12.85),
                                                 ("llama-30b", 29.4)])
def test_llama_parameters_equal_boosts_table(model: str, billions: float):
    digits = len(str(billions).partition(".")[2])
    assert round(flops.parameters(CARDS[model]) / 1e9, digits) == billions


@pytest.mark.parametrize(("model", "millions"), [("olmo2-70m", 21.0), ("olmo2-150m", 70.8), ("olmo2-370m", 268)])
def test_olmo_block_parameters_equal_tetrajets_table(model: str, millions: float):
    assert round(flops.block_parameters(CARDS[model]) / 1e6, 0 if millions == 268 else 1) == millions


def test_padding_and_vocabulary_count_once_or_twice():
    tied, untied = CARDS["gpt-125m"], CARDS["qwen2.5-7b"]
    assert flops.parameters(tied, padded=True) - flops.parameters(tied) == (50304 - 50257) * 768
    assert flops.parameters(untied, 1000) - flops.parameters(untied, 999) == 2 * 3584


class LowRank:
    def flops(self, site: tuple[int, str], d_in: int, d_out: int, tokens: int) -> int:
        width = 4 * CARDS["llama-7b"]["hidden"] // 16
        return 2 * tokens * width * (d_in + d_out)


def test_flops_follow_the_formula_and_count_factors():
    card = CARDS["gpt-6.7b"]
    matmul = 12 * 32 * 4096**2 + 50257 * 4096
    assert flops.model_flops_per_token(card, 2048) == 6 * matmul + 6 * 32 * 2048 * 4096
    assert flops.forward_flops(card, 30, 2048) * 3 == 30 * flops.model_flops_per_token(card, 2048)
    llama = CARDS["llama-7b"]
    # 2.21: BOOST's training FLOP ratio of 7B at width d/4, sequence 4096, head included.
    ratio = flops.model_flops_per_token(llama, 4096) / flops.model_flops_per_token(llama, 4096, factor=LowRank())
    assert round(ratio, 2) == 2.21


def test_peaks_are_dense():
    assert flops.peak("NVIDIA H200", "bf16") == (989.5, None)
    assert flops.peak("NVIDIA H200", "fp8") == (1979.0, None)
    assert flops.peak("NVIDIA H20", "bf16") == (148.0, None)
    assert [flops.peak(f"NVIDIA H100 {form}", "bf16")[0] for form in ("PCIe", "NVL", "80GB HBM3")] == [756.5, 835.5, 989.5]
    for name, row in flops.PEAKS.items():
        assert row["bf16"] / row["tf32"] == pytest.approx(2, rel=0.03), name
        if "fp8" in row:
            assert row["fp8"] / row["bf16"] == pytest.approx(2, rel=0.03), name
        if "fp4" in row:
            assert row["fp4"] / row["fp8"] > 1.9, name


@pytest.mark.parametrize(("gpu", "dtype", "why"), [
    ("NVIDIA Q9000", "bf16", "no dense peak known"),
    ("NVIDIA B300 SXM6 AC", "float32", "no published fp32"),
    ("NVIDIA H200", "fp8", "model TFLOP/s only"),
    ("NVIDIA H200", "float64", "model TFLOP/s only"),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", "MIG slice"),
    (torch.device("cpu"), "bf16", "no GPU"),
])
def test_no_peak_is_a_reason(gpu: str, dtype: str, why: str):
    found = flops.utilization(100.0, 1.0, gpu, dtype)
    assert [metric.name for metric in found] == ["mfu", "hfu", "dense_peak"]
    assert all(metric.value is None and why in metric.reason for metric in found)


def test_utilization_of_a_torch_device_takes_the_visible_gpu(monkeypatch: pytest.MonkeyPatch):
    gpus = tuple(Gpu(i, f"GPU-{i}", name, "", 80.0, False, "default") for i, name in enumerate(("NVIDIA H200", "NVIDIA H20")))
    monkeypatch.setattr(Machine, "here", staticmethod(lambda: Machine("x", 1, 1.0, gpus)))
    assert flops.utilization(74.0, 1.0, torch.device("cuda", 1), "bf16")[0].value == 50
    assert flops.utilization(989.5, 1.0, torch.device("cuda"), "bf16")[0].value == 100
    assert "does not show" in flops.utilization(1.0, 1.0, torch.device("cuda", 2), "bf16")[0].reason


def test_utilization_over_one_hundred_percent_is_an_error():
    mfu, hfu, top = flops.utilization(494.75, 4 / 3, "NVIDIA H200", "bf16")
    assert (mfu.value, round(hfu.value, 2), mfu.unit, top.value, top.unit) == (50.0, 66.67, "%", 989.5, "TFLOP/s")
    with pytest.raises(ValueError, match=r"mfu: 100\.1 % of the dense bf16 peak of NVIDIA H200"):
        flops.utilization(990.0, 1.0, "NVIDIA H200", "bf16")
    with pytest.raises(ValueError, match="hfu: 120"):
        flops.utilization(890.55, 4 / 3, "NVIDIA H200", "bf16")
    with pytest.raises(ValueError, match="mfu"):
        flops.utilization(math.nan, 1.0, "NVIDIA H200", "bf16")


def test_quantiles():
    assert quantiles([5, 1, 4, 2, 3, 6]) == (3.5, 2.0, 5.0, 6)
    assert quantiles([7.0]) == (7.0, 7.0, 7.0, 1)
    assert metric_from([3, 1, 2], "t", "s") == Metric("t", 2.0, "s", n=3, q20=1.4, q80=pytest.approx(2.6))
    assert metric_from([], "t", "s").reason == "no samples"
    for bad in ([], [1.0, math.nan]):
        with pytest.raises(ValueError):
            quantiles(bad)


def test_step_clock_times_each_step_and_the_window():
    met = []
    clock = StepClock("cpu", barrier=lambda: met.append(time.monotonic()))
    clock.start()
    for pause in (0.01, 0.03):
        time.sleep(pause)
        clock.mark()
    seconds = clock.stop()
    assert len(seconds) == 2 and seconds[0] >= 0.01 and seconds[1] >= 0.03
    assert sum(seconds) <= clock.window == clock.ended - clock.began
    assert met[0] <= clock.began and met[1] >= clock.ended


def test_steps_longer_than_their_window_are_refused():
    clock = StepClock("cpu")
    clock.start()
    clock.mark()
    clock._marks[-1] += 5
    with pytest.raises(ClockError, match="1 steps took 5"):
        clock.stop()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_step_clock_on_a_gpu_does_not_wait_within_the_window():
    x = torch.randn(8192, 8192, device="cuda")
    torch.mm(x, x)
    clock = StepClock("cuda")
    clock.start()
    start = time.monotonic()
    for _ in range(20):
        torch.mm(x, x)
        clock.mark()
    queued = time.monotonic() - start
    seconds = clock.stop()
    assert len(seconds) == 20 and min(seconds) > 0
    assert sum(seconds) == pytest.approx(clock.window, rel=0.2) and queued < clock.window / 2


@pytest.mark.parametrize(("name", "gpu", "answer"), [
    ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)", True, True),
    ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", True, True),
    ("ncclSymkDevKernel_AllReduce_LDMC_sum_bf16(ncclSymkDevWorkArgs4K)", True, True),
    ("void ncclDevKernel_Generic(ncclDevKernelArgs)", True, True),
    ("Memcpy PtoP (Device -> Device)", True, True),
    ("Memcpy DtoD (Device -> Device)", True, False),
    ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", True, False),
    ("triton_poi_fused_nccl_add_0", True, False),
    ("gloo:all_reduce", False, True),
    ("c10d::allreduce_", False, True),
    ("aten::mm", False, False),
    ("nccl:all_reduce", False, False),
])
def test_communication_is_told_by_name(name: str, gpu: bool, answer: bool):
    assert profile.is_communication(profile.Event(name, 0, 1, gpu), gpu) is answer


def test_c10d_only_launches_on_a_gpu():
    assert not profile.is_communication(profile.Event("c10d::allreduce_", 0, 1, False), True)
    assert profile.is_communication(profile.Event("gloo:all_reduce", 0, 1, False), True)


def test_union_counts_overlap_once():
    assert profile.union([(5, 6), (0, 2), (1, 3), (3, 4), (8, 8)]) == [(0, 4), (5, 6)]
    assert profile.length([(0, 10), (2, 3), (9, 12)]) == 12
    assert profile.clip([(0, 10), (11, 12)], (4, 8)) == [(4, 8)]


def test_shares_clip_to_the_step_and_see_exposed_messages():
    events = [
        profile.Event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 90, 120, True),
        profile.Event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 110, 140, True),
        profile.Event("gemm", 100, 130, True),
        profile.Event("gemm", 150, 210, True),
    ]
    assert profile.shares(events, (100, 200), True) == (pytest.approx(0.4), pytest.approx(0.1))
    assert profile.shares([profile.Event("gloo:all_reduce", 0, 50, False)], (0, 200), False) == (0.25, None)


def test_no_communication_between_ranks_is_an_error():
    assert by_name(profile.metrics([(0.0, 0.0)], False))["comm_share"].value == 0
    assert by_name(profile.metrics([(0.25, 0.1), (0.75, 0.3)], True))["comm_share"].value == 50
    for found in ([(0.0, 0.0)], [(0.5, 0.1), (0.0, 0.0)]):
        with pytest.raises(profile.ProfileError, match="no communication in a profiled step"):
            profile.metrics(found, True)


def test_profiled_steps_of_gloo(tmp_path: Path):
    """A group of one rank, but real c10d and gloo calls."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        x, calls = torch.ones(1 << 16), []

        def step(number: int) -> None:
            calls.append(number)
            dist.all_reduce(x)
            time.sleep(0.05)

        share, exposed = profile.communication_share(step, 2, "cpu")
        assert calls == [0, 1, 2] and (share.name, share.n, share.unit) == ("comm_share", 2, "%")
        assert 0 < share.value < 90 and "not visible" in exposed.reason
        with pytest.raises(profile.ProfileError):
            profile.communication_share(lambda number: x + x, 2, "cpu")
    finally:
        dist.destroy_process_group()


def test_provenance_is_plain_data_without_private_words(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NCCL_TOPO_FILE", "/home/somebody/topo.xml")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=eth0")
    monkeypatch.setenv("TORCH_NCCL_AVOID_RECORD_STREAMS", "1")
    monkeypatch.setenv("NVSHMEM_DISABLE_NVLS", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setenv("NCCL_HOSTID", f"{socket.gethostname()}-0")
    monkeypatch.setenv("SECRET_TOKEN", "xyz")
    found = provenance.provenance()
    text = json.dumps(found, allow_nan=False)
    expected = {"NCCL_TOPO_FILE": "<path>", "NCCL_SOCKET_IFNAME": "=eth0", "TORCH_NCCL_AVOID_RECORD_STREAMS": "1",
                "NVSHMEM_DISABLE_NVLS": "1", "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_HOSTID": "<host>-0"}
    assert found["environment"] | expected == found["environment"]
    assert "xyz" not in text and "somebody" not in text and str(ROOT) not in text and str(Path.home()) + "/" not in text
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", found["started"])
    assert {"torch", "numpy", "transformers", "tokenizers", "safetensors", "snakemake", "scipy"} <= set(found["packages"])
    assert found["packages"]["pydantic"] == metadata.version("pydantic")
    assert found["versions"]["torch"] == str(torch.__version__) and found["machine"] == Machine.here().name


def test_packages_are_what_the_project_pins_and_has_installed(tmp_path: Path):
    (tmp_path / "pyproject.toml").write_text(
        '[project]\ndependencies = ["numpy==0", "rich>=1", "no-such-thing==1"]\n'
        '[project.optional-dependencies]\ntest = ["pytest-timeout==0; sys_platform == \'linux\'", "triaxis[data]"]\n')
    assert provenance.packages(tmp_path / "pyproject.toml") == {
        name: metadata.version(name) for name in ("numpy", "pytest-timeout")}


@pytest.mark.parametrize(("value", "kept"), [
    ("~/a/x:/b/y", "<path>:<path>"), ("file=../a b", "file=<path> b"), ("max_split_size_mb:128,garbage:True", None),
    ("0,1", None), ("1/2", None), ("^docker0,lo", None),
])
def test_paths_are_masked_and_the_rest_is_kept(value: str, kept: str | None):
    assert provenance.masked(value) == (kept or value)


def test_git_knows_commit_and_dirt(tmp_path: Path):
    def run(*arguments: str) -> None:
        command = ["git", "-c", "user.name=a", "-c", "user.email=b", *arguments]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)

    assert provenance.git(tmp_path) is None
    (tmp_path / "suite").mkdir()
    (tmp_path / "suite/a.py").write_text("x = 1\n")
    run("init")
    assert provenance.git(tmp_path) is None
    run("add", ".")
    run("commit", "-m", "first")
    clean = provenance.git(tmp_path)
    assert re.fullmatch(r"[0-9a-f]{40}", clean["commit"]) and clean["dirty"] is False
    (tmp_path / "results.txt").write_text("generated\n")
    assert provenance.git(tmp_path) == clean
    (tmp_path / "suite/b.py").write_text("y = 2\n")
    assert provenance.git(tmp_path)["dirty"] is True
    assert provenance.git(tmp_path / "suite") is None


def test_topology_has_a_value_or_a_reason_in_each_cell():
    gpus = tuple(Gpu(i, uuid, "NVIDIA H200", "h200", 141.0, False, "default") for i, uuid in enumerate(("GPU-a", "GPU-b")))
    machine = Machine("h200x2", 2, 1.0, gpus)
    fakes = [FakeGpu("GPU-a"), FakeGpu("GPU-b")]
    found = provenance.topology(machine, Nvml(FakeNvml(pynvml, fakes)))
    assert found == {"link": [["self", "nvlink"], ["nvlink", "self"]], "level": [["self", "node"], ["node", "self"]]}
    refused = provenance.topology(machine, Nvml(FakeNvml(pynvml, fakes, EVERY_READING)))
    assert refused["link"][0] == ["self", "Not Supported"]
    assert provenance.topology(Machine("cpu2", 2, 1.0)) is None
    assert "NVML shows no GPU GPU-b" in provenance.topology(machine, Nvml(FakeNvml(pynvml, fakes[:1])))["reason"]


def test_calibration_gives_positive_numbers():
    copy, product = calibrate.calibrate("cpu")
    assert (copy.name, copy.unit, product.name, product.unit) == ("copy_bandwidth", "GB/s", "gemm_bf16", "TFLOP/s")
    assert 0.1 < copy.value < 2000 and product.value > 0 and copy.q20 <= copy.value <= copy.q80 and copy.n == 10


def test_all_reduce_bandwidth_is_payload_over_time():
    seen = []

    def reduce(x: torch.Tensor) -> None:
        seen.append(x.numel() * x.itemsize)
        time.sleep(0.01)

    small, large = calibrate.all_reduce(reduce, "cpu", (1, 4), repeats=3)
    assert seen == [2**20] * 6 + [4 * 2**20] * 6
    assert (small.name, large.name, large.n) == ("all_reduce_1MiB", "all_reduce_4MiB", 3)
    assert large.value == pytest.approx(4 * 2**20 / 0.01 / 1e9, rel=0.3) and large.value < 4 * 2**20 / 0.01 / 1e9
