"""The command line: one line an error, what `doctor` finds, what `show` tells."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace

import project
import pytest
from typer.testing import CliRunner

from suite import doctor
from suite.machine import Gpu, Machine
from suite.show import Show


def gpu(i: int, mode: str = "Default", mig: bool = False) -> Gpu:
    return Gpu(i, f"GPU-{i}", "NVIDIA H200", "h200", 140.0, mig, mode)


TWO = Machine("h200x2", 16, 128.0, (gpu(0), gpu(1)), "580.95")
GOOD = doctor.Torch("2.13.0", "13.0", 2)


def errors(machine: Machine, torch: doctor.Torch, **more) -> list[str]:
    return [f"{f.what}: {f.text}" for f in doctor.examine(machine, torch, **more) if f.level == "error"]


def test_gpus_that_torch_does_not_see_are_an_error_naming_both_versions(tmp_path):
    [line] = errors(TWO, doctor.Torch("2.13.0+cpu", None, 0), results=tmp_path)
    assert "driver 580.95" in line and "torch 2.13.0+cpu is built for the CPU only" in line and "NVML sees 2 GPUs" in line
    [line] = errors(TWO, doctor.Torch("2.13.0", "13.0", 0, "The NVIDIA driver is too old"), results=tmp_path)
    assert "CUDA 13.0 (The NVIDIA driver is too old)" in line
    assert errors(TWO, GOOD, results=tmp_path) == []
    assert "NVML none: library not found" in errors(Machine("cpu2", 2, 8.0, reason="library not found"), GOOD, results=tmp_path)[0]


def test_compute_mode_mig_memory_and_topology_are_looked_at(tmp_path):
    odd = Machine("h200x2", 16, 128.0, (gpu(0, "Exclusive_Process"), gpu(1, mig=True)), "580.95")
    assert "compute mode Exclusive_Process" in errors(odd, GOOD, results=tmp_path)[0]
    texts = [f.text for f in doctor.examine(odd, GOOD, {"link": [["self", "nvlink"]]}, shm=tmp_path / "none", results=tmp_path)]
    assert any("MIG" in t for t in texts) and any("nvlink" in t for t in texts) and "not there: link shm will not work" in texts


def test_a_cpu_machine_without_a_gpu_is_no_error(tmp_path):
    found = doctor.examine(
        Machine("cpu2", 2, 8.0, reason="NVML Shared Library Not Found"), doctor.Torch("2.13.0+cpu", None, 0), results=tmp_path
    )
    assert {f.level for f in found} <= {"ok", "note"}
    assert any("NVML Shared Library Not Found" in f.text for f in found)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    toy = [{"name": "ok1"}, {"name": "nan1", "save": 1}]
    return project.build(tmp_path, {"toy": toy, "gpu": [{"name": "okg", "device": "cuda"}]})


def test_cases_show_run_retry(copy):
    status, out = project.call(copy, "suite.cli", "cases", "gpu")
    assert status == 0 and "not run: needs a GPU" in out and "ok1" not in out
    assert project.call(copy, "suite.cli", "show", "ok1") == (2, "error: ok1: no record on cpu2 yet; `triaxis run ok1`\n")
    assert project.call(copy, "suite.cli", "run", "ok1")[0] == 0
    status, out = project.call(copy, "suite.cli", "run", "nan1")
    assert status == 1 and out.endswith("nan1: failed: loss is nan at step 17\n")
    status, out = project.call(copy, "suite.cli", "show", "ok1")
    assert status == 0 and "3 nats (measured)" in out and '"gpt-tiny"' in out and "threads a rank" in out
    assert project.call(copy, "suite.cli", "retry", "gpu")[1] == "0 failed records cleared\n"
    work = copy / "results/.work/cpu2"
    kept = [path.name for path in work.iterdir()]
    assert [name[:-12] for name in kept] == ["nan1-"]  # it saves checkpoints, so that it keeps them when it fails
    (work / "nan1-0123456789ab" / "checkpoints").mkdir(parents=True)  # of older code
    (work / "nan1-b-0123456789ab").mkdir()  # of another case
    assert project.call(copy, "suite.cli", "retry")[1] == (
        "nan1: cleared (loss is nan at step 17), and what it had saved\n1 failed records cleared\n"
    )
    assert [path.name for path in work.iterdir()] == ["nan1-b-0123456789ab"]
    assert [p.name for p in copy.glob("results/runs/*/*.json")] == ["ok1.json"]


def test_check_fails_for_failed_cases_only(copy):
    assert project.launch(copy, "ok1", "nan1", name="both")[0] == project.launch(copy, "ok1", name="good")[0] == 0
    stamp = copy / "results/check.json"
    arguments = ["suite.cli", "check", "--stamp", str(stamp)]
    status, out = project.call(copy, *arguments, "results/launches/both.json", "results/launches/good.json")
    assert status == 1 and out.startswith("nan1: failed: loss is nan at step 17\n1 of 3 cases failed") and not stamp.exists()
    assert project.call(copy, *arguments, "results/launches/good.json")[0] == 0 and stamp.exists()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["cases", "nothing"], "no workload 'nothing'; known: gpu, toy"),
        (["run", "ok11"], "no case 'ok11'; near: ok1"),
        (["run", "okg"], "needs 1 GPUs, has 0"),
        (["cases", "--size", "huge"], "size: expected one of small, short, full, got 'huge'"),
        (["run", "ok1"], "TRIAXIS_DEADLINE: expected seconds, got 'soon'"),
    ],
)
def test_errors_are_one_line_and_status_2(copy, arguments, line):
    status, out = project.call(copy, "suite.cli", *arguments, TRIAXIS_DEADLINE="soon")
    assert status == 2 and out.splitlines()[-1].startswith(f"error: {line}") and "Traceback" not in out, out


def test_overhead_is_published_where_it_is_a_number(tmp_path, monkeypatch):
    from suite import cli, record, train, workload
    from suite.machine import Machine
    from suite.measure import overhead
    from suite.record import Metric

    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(train, "Trainer", lambda case, mesh: SimpleNamespace(step=lambda number: None))
    case = next(row.id for row in workload.load("baseline").rows if row.size == "small")
    path = tmp_path / "overhead" / f"{Machine.here().name}.json"

    monkeypatch.setattr(overhead, "overhead", lambda *_: [Metric("sampler_overhead", None, "ratio", reason="no GPU")])
    done = CliRunner().invoke(cli.app, ["overhead", case])
    assert done.exit_code == 0 and done.output == "sampler_overhead: none: no GPU\n" and not path.exists()

    found = [Metric("sampler_overhead", 1.001, "ratio", n=12), Metric("sampler_overhead_upper_bound", 1.004, "ratio", n=12)]
    monkeypatch.setattr(overhead, "overhead", lambda *_: found)
    done = CliRunner().invoke(cli.app, ["overhead", case])
    assert done.output == "sampler_overhead: 1.00100 (n=12)\nsampler_overhead_upper_bound: 1.00400 (n=12)\n"
    assert [Metric(**row) for row in json.loads(path.read_text())] == found


def test_a_broken_record_is_named(copy):
    path = copy / "results/runs/cpu2/ok1.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"id": "ok1"})[:5])
    status, out = project.call(copy, "suite.cli", "show", "ok1")
    assert status == 2 and out.startswith("error: ok1.json: not a record")
    assert project.call(copy, "suite.cli", "run", "ok1")[0] == 0
    assert project.record(copy, "ok1")["status"] == "ok"


def test_plain_lines_tell_loss_speed_and_time_left():
    out = io.StringIO()
    show = Show(out, every=0.0)
    show.launch("toy", 3, 1)
    show.case("a")
    show.step(5, 10, 3.25, 12345.6)
    show.failed("a", "oom")
    assert out.getvalue().splitlines() == [
        "toy: 1 of 3 cases to run, 2 kept",
        "a: step 5/10, loss 3.2500, 12,346 tokens/s, 0 s left",
        "a: failed: oom",
    ]
