"""Paired A/B timing of two revisions on one machine: interleaved, until the answer is known or LAST pairs are spent.

A pair: RUNS runs of each side in turn, base and head changing who goes first; a sample is the smaller time of each side's runs,
the ratio head / base. The interval of the median ratio is distribution-free (order statistics, exact by the binomial),
of level 1 - 0.01 / kernels. Above 1 + tolerance: measured once more in fresh processes, since where a process
lies in memory is a bias that no number of pairs removes; an alarm needs both. Below: ok. Neither after LAST pairs: no verdict.

On a GPU most of the time goes to the compiler and to the checks that come first: before the timing, spare cores do both once,
each process a part of the kernels, and leave what they compiled in the caches of the two sides.

The base lies in a worktree of its own in a temporary folder, with caches of its own; it goes away however the run ends.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from suite.gate.finding import FAULT, FINE, MISSING, NEW, UNSURE, WORSE, Finding

TOLERANCE = {"cpu": 0.05, "cuda": 0.02}
RUNS, FIRST, LAST, STEP = 5, 7, 63, 4
WHOLE = ("step:", "collective:")  # what the host has a part in, also on a GPU
LARGEST = 4 << 20  # bytes a call moves, up to which a reference is timed on a CPU
HELPERS = 6  # processes a side at most that compile beforehand: each holds one kernel's tensors on the GPU
WORKER = Path(__file__).with_name("worker.py")


def interval(ratios: Sequence[float], level: float) -> tuple[float, float]:
    """Of the median, by order statistics; (-inf, inf) where so few cannot give the level. Raises ValueError for NaN."""
    from scipy.stats import binom

    if not all(math.isfinite(r) and r > 0 for r in ratios):
        raise ValueError("a time is no positive number")
    n = len(ratios)
    k = int(binom.ppf((1 - level) / 2, n, 0.5))
    while k and binom.cdf(k - 1, n, 0.5) > (1 - level) / 2:
        k -= 1
    if k == 0:
        return -math.inf, math.inf
    ordered = sorted(ratios)
    return ordered[k - 1], ordered[n - k]


def decide(pair: Callable[[int], float], tolerance: float, level: float) -> tuple[str, list[float]]:
    """(verdict, ratios): adds pairs from FIRST up to LAST until the interval lies on one side of 1 + tolerance."""
    ratios: list[float] = []
    while len(ratios) < LAST:
        for _ in range(FIRST if not ratios else STEP):
            ratios.append(pair(len(ratios)))
        low, high = interval(ratios, level)
        if low > 1 + tolerance:
            return WORSE, ratios
        if high < 1 + tolerance:
            return FINE, ratios
    return UNSURE, ratios


class Worker:
    """A revision's process. `ask` raises RuntimeError where it died."""

    def __init__(self, tree: Path, device: str, largest: int, cache: Path) -> None:
        environ = {**os.environ, "PYTHONPATH": str(tree), "TRITON_CACHE_DIR": str(cache), "PYTHONHASHSEED": "0",
                   "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor")}
        self.process = subprocess.Popen([sys.executable, str(WORKER), device, str(largest)], cwd=tree, env=environ, text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.tree = tree

    def read(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the harness died in {self.tree.name}, exit status {self.process.wait()}")
        return json.loads(line)

    def ask(self, kernel: str, loops: int) -> dict[str, Any]:
        self.process.stdin.write(json.dumps({"kernel": kernel, "loops": loops}) + "\n")
        self.process.stdin.flush()
        return self.read()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextlib.contextmanager
def pair_of(base: Path, head: Path, device: str, largest: int, caches: Path) -> Iterator[list[Worker]]:
    workers: list[Worker] = []
    try:
        for tree, name in ((base, "base"), (head, "head")):
            workers.append(Worker(tree, device, largest, caches / name))
        yield workers
    finally:
        for worker in workers:
            worker.close()


def compiled(base: Path, head: Path, device: str, only: Sequence[str], largest: int, caches: Path, helpers: int) -> int:
    """Checks every kernel once in processes that end with it, `helpers` a side at the same time, so that the caches hold what
    they compile. Gives how many were checked; what is wrong with a kernel is told when it is timed."""
    def part(task: tuple[Path, str, int]) -> int:
        tree, side, index = task
        worker, done = Worker(tree, device, largest, caches / side), 0
        with contextlib.closing(worker), contextlib.suppress(RuntimeError, OSError):
            for name in chosen(worker.read()["kernels"], only)[index::helpers]:
                worker.ask(name, 0)
                done += 1
        return done

    tasks = [(tree, side, index) for index in range(helpers) for tree, side in ((base, "base"), (head, "head"))]
    with ThreadPoolExecutor(len(tasks) or 1) as pool:
        return sum(pool.map(part, tasks))


def chosen(names: Sequence[str], only: Sequence[str]) -> list[str]:
    return [name for name in names if not only or any(part in name for part in only)]


def one(workers: Sequence[Worker], kernel: str, tolerance: float, level: float) -> tuple[Finding, bool]:
    """(finding, whether it is an alarm to be confirmed)."""
    ready = [worker.ask(kernel, 0) for worker in workers]
    for side, answer in zip(("base", "head"), ready):
        if "fault" in answer:
            return Finding(kernel, FAULT if side == "head" else NEW, f"{side}: {answer['fault']}"), False
    loops = ready[0]["loops"]
    seconds: list[float] = []

    def run(side: int) -> float:
        answer = workers[side].ask(kernel, loops)
        if "fault" in answer:
            raise ValueError(answer["fault"])
        return answer["seconds"]

    def pair(index: int) -> float:
        best = [math.inf, math.inf]
        for turn in range(RUNS):
            for side in (0, 1) if (index + turn) % 2 else (1, 0):
                best[side] = min(best[side], run(side))
        seconds.append(best[0])
        return best[1] / best[0] if best[0] > 0 else math.nan

    try:
        verdict, ratios = decide(pair, tolerance, level)
    except ValueError as error:
        return Finding(kernel, FAULT, str(error)), False
    low, high = interval(ratios, level)
    text = f"{median(ratios):.3f} times the base's {median(seconds) * 1e6:.1f} us [{low:.3f}, {high:.3f}], n={len(ratios)}"
    return Finding(kernel, verdict, text), verdict == WORSE


def timed(base: Path, head: Path, device: str, only: Sequence[str] = (), largest: int = LARGEST,
          tolerances: Mapping[str, float] | None = None) -> list[Finding]:
    """Findings of every kernel of two trees whose name holds one of `only`, of all where that is empty."""
    [found] = rounds(base, head, device, only, largest, tolerances)
    return found


def rounds(base: Path, head: Path, device: str, only: Sequence[str] = (), largest: int = LARGEST,
           tolerances: Mapping[str, float] | None = None, times: int = 1, kept: Path | None = None) -> Iterator[list[Finding]]:
    """The findings of `timed`, so many times in the same two processes; alarms are confirmed in new ones. kept: a folder for what
    is compiled, for several calls over the same kernels; else it goes away at the end."""
    def tolerance(name: str) -> float:
        return (tolerances or {}).get(name, TOLERANCE["cpu" if name.startswith(WHOLE) else device])

    with contextlib.ExitStack() as around, contextlib.ExitStack() as stack:
        caches = kept or Path(around.enter_context(tempfile.TemporaryDirectory(prefix="triaxis-gate-")))
        if device == "cuda" and not (caches / "head").exists():
            compiled(base, head, device, only, largest, caches, min(HELPERS, len(os.sched_getaffinity(0)) // 4))
        workers = stack.enter_context(pair_of(base, head, device, largest, caches))
        old, new = (chosen(worker.read()["kernels"], only) for worker in workers)
        if not old:
            raise ValueError(f"the base has no kernel to time{' named ' * bool(only)}{' or '.join(only)}")
        both = [name for name in old if name in new]
        level = 1 - 0.01 / max(len(both), 1)
        for turn in range(times):
            found, alarms = {}, []
            found |= {name: Finding(name, MISSING, "deleted or renamed") for name in old if name not in new}
            found |= {name: Finding(name, NEW, "the base does not have it") for name in new if name not in old}
            for name in both:
                found[name], alarm = one(workers, name, tolerance(name), level)
                alarms += [name] if alarm else []
            if turn == times - 1:
                stack.close()
            if alarms:
                with pair_of(base, head, device, largest, caches) as others:
                    for worker in others:
                        worker.read()
                    for name in alarms:
                        again, _ = one(others, name, tolerance(name), level)
                        verdict = UNSURE if again.verdict == FINE else again.verdict
                        found[name] = Finding(name, verdict, f"{found[name].text}; again {again.text}")
            yield list(found.values())


def git(*arguments: str, cwd: Path) -> str:
    done = subprocess.run(["git", *arguments], cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"git {arguments[0]}: {' '.join(done.stderr.split())}")
    return done.stdout.strip()


@contextlib.contextmanager
def worktree(repository: Path, revision: str) -> Iterator[Path]:
    """A checkout of the revision elsewhere; gone afterwards, after SIGTERM and Ctrl-C too."""
    commit = git("rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}", cwd=repository)
    folder = Path(tempfile.mkdtemp(prefix="triaxis-gate-"))
    before = signal.getsignal(signal.SIGTERM)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    try:
        git("worktree", "add", "--quiet", "--detach", str(folder / "tree"), commit, cwd=repository)
        yield folder / "tree"
    finally:
        signal.signal(signal.SIGTERM, before)
        shutil.rmtree(folder, ignore_errors=True)
        git("worktree", "prune", cwd=repository)


def tree_of(stack: contextlib.ExitStack, repository: Path, name: str) -> Path:
    """A folder, where the name is a path to one (./NAME, /NAME), else a worktree of the revision."""
    if os.sep in name and Path(name, "kernels").is_dir():
        return Path(name).resolve()
    return stack.enter_context(worktree(repository, name))


def gate(repository: Path, base: str, head: str | None, device: str, only: Sequence[str] = (), largest: int = LARGEST,
         tolerances: Mapping[str, float] | None = None) -> list[Finding]:
    """base, head: revisions, or folders with a slash in their names. head None: the working tree as it is, which is only read."""
    with contextlib.ExitStack() as stack:
        old = tree_of(stack, repository, base)
        new = repository if head is None else tree_of(stack, repository, head)
        return timed(old, new, device, only, largest, tolerances)
