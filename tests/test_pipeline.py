"""The pipeline on a small copy of the project: what a run measures, what a second one repeats, and what a kill leaves.

Snakemake starts in seconds, so each test is a story of several runs; `ran` is what was measured since the last look.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import project
import pytest

NOTHING = "Nothing to be done"


def snakemake(copy: Path, *arguments: str, **variables: str) -> tuple[int, str]:
    return project.call(copy, "snakemake", "--cores", "all", *arguments, **variables)


def test_measure_once_then_only_what_changed(tmp_path):
    loss, fast = {"name": "oka"}, {"name": "oks", "measure": "speed"}
    copy = project.build(
        tmp_path, {"toy": [loss, fast, {"name": "nanb"}], "other": [{"name": "oka"}, {"name": "okc", "mesh": {"dp": 1}}]}
    )
    status, out = snakemake(copy)
    assert status == 1 and "nanb: failed: loss is nan at step 17" in (copy / "results/logs/cpu2/check.log").read_text(), out
    assert sorted(project.ran(copy)) == ["oka", "okc", "oks"]  # shared by two workloads, run once
    assert (copy / "results/figures/toy.png").exists() and (copy / "results/tables/verdict.md").exists()
    assert {row["id"] for row in json.loads((copy / "results/plan/cpu2.json").read_text())} == {"oka", "oks", "nanb", "okc"}

    # The failure stays until it is cleared; clearing touches nothing else.
    assert "1 failed records cleared" in project.call(copy, "suite.cli", "retry", "toy")[1]
    kept = (copy / "results/runs/cpu2/oka.json").read_bytes()
    project.write(copy, "toy", [fast, loss])
    status, out = snakemake(copy)
    assert status == 0 and project.ran(copy) == [], out
    assert (copy / "results/runs/cpu2/oka.json").read_bytes() == kept

    # A commit, another hash seed, comments and the order of keys and rows: nothing.
    (copy / "suite/train.py").write_text("# a comment\n" + (copy / "suite/train.py").read_text())
    project.write(copy, "toy", [loss, dict(reversed(fast.items()))])
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@x", "-C", str(copy)]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "empty"], check=True)
    for seed in ("1", "2"):
        assert NOTHING in snakemake(copy, PYTHONHASHSEED=seed)[1]

    # A figure's code remakes figures, one record's rerun remakes tables, --forceall one workload's measurements.
    (copy / "suite/report/figures.py").open("a").write("\nx = 1\n")
    out = snakemake(copy)[1]
    assert project.ran(copy) == [] and re.search(r"figure +2", out) and not re.search(r"(tables|launch) +\d", out), out
    assert project.call(copy, "suite.cli", "run", "oka", "--force")[0] == 0
    assert project.ran(copy) == ["oka"]
    out = snakemake(copy, "--forceall", "toy")[1]
    assert sorted(project.ran(copy)) == ["oka", "okc", "oks"] and "tables" not in out
    assert re.search(r"tables +1", snakemake(copy)[1]) and project.ran(copy) == []

    # The trainer's code reruns everything.
    (copy / "suite/train.py").open("a").write("\nx = 1\n")
    assert snakemake(copy)[0] == 0 and sorted(project.ran(copy)) == ["oka", "okc", "oks"]
    assert NOTHING in snakemake(copy)[1]


def test_timed_launches_of_three_workloads_do_not_overlap_and_sigkill_is_recovered_from(tmp_path):
    timed = {f"w{i}": [{"name": f"slow{i}", "measure": "speed"}] for i in range(3)}
    copy = project.build(tmp_path, timed)
    process = project.start(copy, "snakemake", "--cores", "all", FAKE_STEPS="500")
    logs = copy / "results/logs/cpu2"
    project.until(lambda: any("runs slow" in path.read_text() for path in logs.glob("w*.log")), 60)
    os.kill(process.pid, signal.SIGKILL)
    project.until(lambda: not project.processes(copy), 10)
    process.communicate()
    assert not list(copy.glob("results/runs/*/*")) and not list(copy.glob("results/launches/*/*"))

    status, out = snakemake(copy)
    assert status == 1 and "--unlock" in out
    assert project.call(copy, "snakemake", "--unlock")[0] == 0
    status, out = snakemake(copy, "--rerun-incomplete", FAKE_STEPS="4")
    assert status == 0, out
    facts = [project.record(copy, f"slow{i}")["provenance"] for i in range(3)]
    windows = sorted((one["started"], one["ended"]) for one in facts)
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(windows)), windows
    assert not list(copy.glob("results/runs/*/.*"))


def test_ctrl_c_in_a_run_of_two_ranks(tmp_path):
    copy = project.build(tmp_path, {"toy": [{"name": "oka"}, {"name": "slowb", "mesh": {"tp": 2}}]})
    process = project.start(copy, "snakemake", "--cores", "all", "toy", FAKE_STEPS="500")
    log = copy / "results/logs/cpu2/toy-cpu-tp2-gloo-loss.log"
    project.until(lambda: log.exists() and "rank 1 runs slowb" in log.read_text(), 60)
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 1 and "interrupted: ranks are gone, finished records are kept" in out
    project.until(lambda: not project.processes(copy), 10)
    assert not list(copy.glob("results/runs/*/*slowb*"))
    status, out = snakemake(copy, "toy")
    assert status == 0 and "locked" not in out and project.record(copy, "slowb")["status"] == "ok", out


@pytest.mark.parametrize(
    "target", ["results/runs/taco-gpt-tp2-tp2-s0.json", "results/launches/cpu2/toy-cpu-tp2-tp2-loss.json", "tacoo"]
)
def test_an_unknown_target_is_an_error_at_once(tmp_path, target):
    status, out = snakemake(project.build(tmp_path, {"toy": [{"name": "oka"}]}), target)
    assert status == 1 and f"No rule to produce {target}" in out and "Traceback" not in out


@pytest.mark.parametrize(
    ("row", "config", "line"),
    [
        ({"mesh": {"tp": None}}, [], r"toy\.yaml: small row 1: mesh\.tp: Input should be a valid integer.*got None"),
        ({}, ["--config", "hour=1"], r"--config hour: unknown key; known: base, hours, size"),
        ({}, ["--config", "hours=soon"], r"--config hours: expected a number, got 'soon'"),
        ({}, ["--config", "base='a; b'"], r"--config base: 'a; b' is no revision"),
        ({}, ["--config", "size=huge"], r"size: expected one of small, short, full, got 'huge'"),
    ],
)
def test_bad_settings_stop_the_parse_with_one_line(tmp_path, row, config, line):
    status, out = snakemake(project.build(tmp_path, {"toy": [{"name": "oka", **row}]}), "-n", *config)
    assert status == 1 and re.search(line, out) and "Traceback" not in out, out


def test_lint_format_and_parse_without_torch(tmp_path):
    copy = project.build(tmp_path, {"toy": [{"name": "oka"}]})
    status, out = project.call(copy, "snakemake", "--lint")
    assert status == 0, out
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "snakefmt",
            "--check",
            "--config",
            str(project.ROOT / "pyproject.toml"),
            str(project.ROOT / "Snakefile"),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    program = (
        "import sys; from suite import pipeline; pipeline.Pipeline({}); sys.exit('torch' in sys.modules or 'pandas' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=copy, env=project.environment(copy)).returncode == 0


@pytest.mark.parametrize("visible", ["MIG-1b2c", "GPU-0a1b2c3d", "", "-1"])
def test_any_cuda_visible_devices_gives_a_plan(visible):
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": visible}
    done = subprocess.run([sys.executable, "-m", "suite.cli", "plan"], cwd=project.ROOT, env=env, capture_output=True, text=True)
    rows = json.loads(done.stdout)
    assert done.returncode == 0 and all(row["runs"] for row in rows if row["size"] == "small")
