"""Paired timing of two revisions of a small repository: silent without a change, naming the slowed kernel alone, faults caught.

    python tests/test_gate_ab.py SHARE TIMES     how often a slow-down by SHARE of one kernel alarms in TIMES runs
"""
from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from suite.gate import ab
from suite.gate.finding import FAULT, FINE, MISSING, NEW, UNSURE, WORSE
from suite.workload import ROOT

REGISTRY = """
import time
from collections import namedtuple
import torch

Entry = namedtuple("Entry", "name reference make traffic launch", defaults=(0, None))
kept = {}

def make(device, seed):
    return {"x": torch.randn(1 << 15, generator=torch.Generator().manual_seed(seed))}

def exp(x):
    return x.exp()

def sin(x):
    begun = time.perf_counter()
    y = x.sin()
    EXTRA
    return y

ENTRIES = [Entry("exp", exp, make), Entry("sin", sin, make)]
"""
SLOWER = "end = begun + (time.perf_counter() - begun) * (1 + {}); [None for _ in iter(lambda: time.perf_counter() < end, False)]"


def git(folder: Path, *words: str) -> str:
    names = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}
    return subprocess.run(["git", *words], cwd=folder, env=os.environ | names, capture_output=True, text=True, check=True).stdout


def repository(folder: Path) -> Path:
    """One commit with two kernels."""
    (folder / "kernels").mkdir()
    (folder / "kernels/__init__.py").touch()
    change(folder)
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "base")
    return folder


def change(folder: Path, extra: str = "pass", old: str = "", new: str = "") -> None:
    (folder / "kernels/registry.py").write_text(REGISTRY.replace("EXTRA", extra).replace(old or "\0", new), encoding="utf-8")


def verdicts(folder: Path) -> dict[str, str]:
    return {one.kernel.partition(":")[2]: one.verdict for one in ab.gate(folder, "HEAD", None, "cpu")}


def test_same_revision_does_not_alarm_and_a_slow_kernel_alone_does(tmp_path):
    folder = repository(tmp_path)
    before = git(folder, "status", "--porcelain")
    assert set(verdicts(folder).values()) <= {FINE, UNSURE}
    change(folder, SLOWER.format(0.5))
    found = verdicts(folder)
    assert found["sin"] == WORSE and found["exp"] != WORSE
    assert before == "" and git(folder, "worktree", "list").count("\n") == 1
    assert git(folder, "status", "--porcelain").split() == ["M", "kernels/registry.py"]


@pytest.mark.parametrize("extra, word", [
    ("y = torch.zeros_like(y)", "nothing but zeros"), ("y = kept.setdefault(0, y)", "same result for other inputs"),
    ("raise OSError('broken')", "OSError: broken"), ("y = y * float('nan')", "NaN"),
], ids=["zeros", "reused", "throws", "nan"])
def test_faults(tmp_path, extra, word):
    folder = repository(tmp_path)
    change(folder, extra)
    [found] = ab.gate(folder, "HEAD", None, "cpu", only=["sin"])
    assert found.verdict == FAULT and word in found.text


def test_sleeping_and_renamed_kernels(tmp_path):
    folder = repository(tmp_path)
    change(folder, "time.sleep(0.001)", '"exp"', '"exp2"')
    assert verdicts(folder) == {"sin": WORSE, "exp": MISSING, "exp2": NEW}


def test_unknown_revision_is_one_line(tmp_path):
    with pytest.raises(ValueError, match="git rev-parse"):
        ab.gate(repository(tmp_path), "nosuch", None, "cpu")


def test_the_worktree_goes_after_ctrl_c(tmp_path):
    folder = repository(tmp_path)
    code = (f"import time; from pathlib import Path; from suite.gate import ab\n"
            f"with ab.worktree(Path({str(folder)!r}), 'HEAD') as tree:\n"
            "    print(tree, flush=True); time.sleep(60)")
    for how in (signal.SIGINT, signal.SIGTERM):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, text=True, **pipes) as one:
            tree = Path(one.stdout.readline().strip())
            assert tree.is_dir()
            one.send_signal(how)
            one.wait(20)
        assert not tree.parent.exists() and git(folder, "worktree", "list").count("\n") == 1


def test_interval_covers_the_median_as_often_as_it_says():
    dice = random.Random(0)
    hits = sum(low <= 1.0 <= high for low, high in (
        ab.interval([dice.lognormvariate(0.0, 0.2) for _ in range(15)], 0.9) for _ in range(2000)))
    assert 0.88 <= hits / 2000 <= 0.98
    assert ab.interval([1.0] * 7, 0.999)[0] == float("-inf") and ab.interval([1.0] * 7, 0.98) == (1.0, 1.0)
    with pytest.raises(ValueError, match="no positive number"):
        ab.interval([1.0, float("nan")], 0.9)


def alarms(shift: float, times: int = 2000) -> float:
    """How often one of pure noise (a tenth, heavy-tailed: one in ten pairs doubled) alarms in one round, at ten kernels."""
    dice = random.Random(1)

    def pair(_: int) -> float:
        return (1 + shift) * dice.lognormvariate(0.0, 0.1) * dice.choice([1] * 8 + [2, 0.5])

    return sum(ab.decide(pair, 0.05, 0.999)[0] == WORSE for _ in range(times)) / times


def test_noise_alone_alarms_rarely():
    assert alarms(0.0, 300) <= 0.01
    assert alarms(0.3, 100) >= 0.95


def test_no_verdict_where_noise_hides_the_answer():
    flips = iter(range(1000))
    assert ab.decide(lambda _: 2.0 if next(flips) % 2 else 0.5, 0.05, 0.99)[0] == UNSURE


if __name__ == "__main__":
    share, total, counted = float(sys.argv[1]), int(sys.argv[2]), []
    with tempfile.TemporaryDirectory() as name:
        place = repository(Path(name))
        if share:
            change(place, SLOWER.format(share))
        for _ in range(total):
            start = time.monotonic()
            counted.append(verdicts(place))
            sys.stdout.write(f"{counted[-1]} {time.monotonic() - start:.0f} s\n")
            sys.stdout.flush()
    for kernel in counted[0]:
        sys.stdout.write(f"{kernel}: {sum(row[kernel] == WORSE for row in counted)} alarms in {total}\n")
