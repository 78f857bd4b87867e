"""The plan: which cases run on this machine, most valuable first, and which share one launch. Imports no torch.

`small` needs no GPU and always runs on the CPU. `short` and, if asked for, `full` run where the GPUs suffice, in order of
value, as long as the budget holds. Every other case is a row with a reason, never a file.

A case's time is estimated from its row alone, so that the plan is the same before and after anything ran:

    seconds = fixed + 1.3 · steps · batch · seq · 6·N / (rate · ranks that compute)        1.3: validation and profile

N counts the matrices of the model card (head included). On a CPU rate = 40 GFLOP/s a core and fixed = 4 s; a rank has one
thread, so that it computes on one core, or on a share of one where ranks outnumber cores. On a GPU rate = 150 TFLOP/s, at least
30 ms a step, fixed = 60 s (compilation, loading); ranks joined by gloo share one GPU. A pair of `ab` is six steps, a repeat of
`block` ten passes over a layer. A launch adds the start of its ranks (6 s on a CPU, 75 s on GPUs).

Cases that differ in what one process can change share a launch. Those of one process on a CPU that are not timed are cut into
launches of at most MANY, which cores then take side by side.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from suite.case import Case
from suite.rendezvous import Rendezvous
from suite.workload import SIZES, Expanded, Workload, models

if TYPE_CHECKING:
    from suite.machine import Machine

HOURS = 3.0
START = {"cpu": 6.0, "cuda": 75.0}  # seconds until ranks can compute
FIXED = {"cpu": 4.0, "cuda": 60.0}  # seconds a case needs beside its steps
TIMED = {"cpu": 5e6, "cuda": 2e8}  # values a second that all runs of a timed collective take together
MANY = 10  # cases of one process in a launch
RATE = {"cpu": 40e9, "cuda": 150e12}  # model FLOP/s of a core, of a GPU


@dataclass(frozen=True)
class Planned:
    expanded: Expanded
    runs: bool
    reason: str | None  # exactly where it does not run
    seconds: float

    @property
    def id(self) -> str:
        return self.expanded.id

    def row(self) -> dict[str, Any]:
        where = self.expanded
        return {
            "id": where.id,
            "workload": where.workload,
            "size": where.size,
            "runs": self.runs,
            "reason": self.reason,
            "seconds": round(self.seconds, 1),
        }


@dataclass(frozen=True)
class Launch:
    """Cases that one start of the ranks runs in turn: they agree in device, mesh, link and measure."""

    id: str
    workload: str
    cases: tuple[Expanded, ...]  # most valuable first

    @property
    def case(self) -> Case:
        return self.cases[0].case

    @property
    def exclusive(self) -> bool:
        """Timed runs own the machine."""
        return self.case.measure not in ("loss", "codec")

    def threads(self, cores: int, gpus: int) -> int:
        """Of a machine's cores: all where it is timed, one a rank on the CPU, else the share of the GPUs that it uses."""
        if self.exclusive:
            return cores
        if self.case.device == "cpu":
            return min(cores, self.case.mesh.ranks)
        return max(1, cores * self.case.gpus // max(1, gpus))


def seconds(case: Case, cpus: int = 2) -> float:
    """Estimated seconds of a case without the start of its ranks (formula above)."""
    card = models()[case.model]
    if case.measure == "block":  # one layer, a handful of runs each repeat
        layer = 6.0 * 12 * card["hidden"] ** 2 * case.micro * case.data.seq
        return FIXED[case.device] + 10 * (case.steps + 3) * layer / RATE[case.device]
    if case.measure in ("collective", "quantize"):
        values = case.data.batch * case.data.seq * card["hidden" if case.measure == "collective" else "ffn"]
        return START["cpu"] + values * (case.steps + 3) / TIMED["cpu" if case.link == "gloo" else case.device]
    hidden, head = card["hidden"], card["hidden"] // card["heads"]
    attention = hidden * (2 * hidden + 2 * card["kv_heads"] * head)
    vocab = case.data.tokenizer if isinstance(case.data.tokenizer, int) else card["vocab"]
    count = card["layers"] * (attention + (3 if card["gated"] else 2) * hidden * card["ffn"]) + vocab * hidden
    steps = case.steps * (6 if case.measure == "ab" else 1)  # pairs of blocks of three
    flops = 6.0 * count * steps * case.data.batch * case.data.seq
    workers = min(cpus, case.mesh.ranks) if case.device == "cpu" else case.gpus
    working = 1.3 * flops / (RATE[case.device] * workers)
    if case.device == "cuda":
        working = max(working, 0.03 * steps)
    return FIXED[case.device] + working


def deadline(case: Case, cpus: int = 2) -> float:
    """Seconds after which a case counts as hung: far above the estimate, which knows neither kernel nor machine."""
    return max(180.0, 15.0 * seconds(case, cpus)) + (600.0 if case.device == "cuda" else 0.0)


def plan(
    workloads: Mapping[str, Workload],
    machine: Machine,
    hours: float | None = None,
    size: str | None = None,
    rendezvous: Rendezvous | None = None,
) -> list[Planned]:
    """Every case of every workload with whether it runs here; a case of two workloads has a row in each.

    hours: budget (3; with `size: full` none unless given). size: the largest size wanted (`short`). rendezvous: the machines
    that run each case together, as torchrun's variables say unless given. Raises ValueError.
    """
    rendezvous = rendezvous or Rendezvous.of(os.environ)
    if size is not None and size not in SIZES:
        raise ValueError(f"size: expected one of {', '.join(SIZES)}, got {size!r}")
    if hours is None:
        hours = float("inf") if size == "full" else HOURS
    if not hours > 0:
        raise ValueError(f"hours: expected a number above 0, got {hours!r}")
    wanted = SIZES[: SIZES.index(size or "short") + 1]
    rows = sorted(
        (row for workload in workloads.values() for row in workload.rows),
        key=lambda row: (SIZES.index(row.size), -row.value, row.workload, row.id),
    )
    spent, started = 0.0, set()
    decided: dict[str, Planned] = {}
    planned = []
    for row in rows:
        took = seconds(row.case, machine.cpus)
        reason = None if row.size in wanted else f"size {row.size} not asked"
        earlier = decided.get(row.id)
        if reason is None and earlier is not None:
            planned.append(Planned(row, earlier.runs, earlier.reason, took))
            continue
        if reason is None:
            reason = _lacking(row.case, machine, rendezvous)
        if reason is None and not installed(row.case.implementation):
            reason = f"needs {row.case.implementation} (extra test)"
        if reason is None:
            group = _group(row)
            cost = took + (0.0 if group in started else START[row.case.device])
            if row.size != "small" and spent + cost > hours * 3600:
                reason = "budget"
            else:
                spent += cost
                started.add(group)
        planned.append(Planned(row, reason is None, reason, took))
        if row.size in wanted:
            decided[row.id] = planned[-1]
    return planned


def _lacking(case: Case, machine: Machine, rendezvous: Rendezvous) -> str | None:
    """Why machines like this one cannot start the case."""
    nodes, ranks = rendezvous.nodes, case.mesh.ranks
    if ranks % nodes:
        return f"{ranks} {'rank does' if ranks == 1 else 'ranks do'} not divide over {nodes} machines"
    needed = rendezvous.gpus(case)
    if needed <= len(machine.gpus):
        return None
    each = "" if nodes == 1 else f" on each of {nodes} machines"
    return ("needs a GPU" if needed == 1 else f"needs {needed} GPUs") + each


@lru_cache
def installed(implementation: str) -> bool:
    """Whether the package behind an implementation is there; ours is this project."""
    return implementation == "triaxis" or importlib.util.find_spec(implementation) is not None


def launches(planned: Iterable[Planned]) -> dict[str, Launch]:
    """Launches by id, such as `taco-cpu-tp2-gloo-loss`. A case in several workloads belongs to the first in order of name."""
    owner: dict[str, Expanded] = {}
    for row in planned:
        known = owner.get(row.id)
        if row.runs and (known is None or row.expanded.workload < known.workload):
            owner[row.id] = row.expanded
    found: dict[str, list[Expanded]] = {}
    for row in sorted(owner.values(), key=lambda row: (SIZES.index(row.size), -row.value, row.id)):
        found.setdefault(_group(row), []).append(row)
    parts = {}
    for name, cases in found.items():
        case = cases[0].case
        alone = case.device == "cpu" and case.mesh.ranks == 1 and case.measure == "loss"
        count = -(-len(cases) // MANY) if alone else 1
        parts |= {f"{name}-{n + 1}" if n else name: tuple(cases[n::count]) for n in range(count)}
    return {name: Launch(name, cases[0].workload, cases) for name, cases in sorted(parts.items())}


def launches_of(workload: str, planned: Iterable[Planned], known: Mapping[str, Launch]) -> list[str]:
    """Ids of the launches that hold a running case of the workload, in order."""
    mine = {row.id for row in planned if row.runs and row.expanded.workload == workload}
    return sorted(name for name, launch in known.items() if any(case.id in mine for case in launch.cases))


def single(row: Expanded) -> Launch:
    """A launch of one case, called as the launch it would share."""
    return Launch(_group(row), row.workload, (row,))


def hours_by_workload(planned: Iterable[Planned]) -> dict[str, float]:
    """Estimated hours of the running cases, starts included; a case of two workloads counts in each."""
    total: dict[str, float] = {}
    for workload, rows in itertools.groupby(sorted(planned, key=lambda row: row.expanded.workload), lambda r: r.expanded.workload):
        running = [row for row in rows if row.runs]
        groups = {_group(row.expanded): START[row.expanded.case.device] for row in running}
        total[workload] = (sum(row.seconds for row in running) + sum(groups.values())) / 3600
    return total


def _group(row: Expanded) -> str:
    case = row.case
    mesh = "-".join(f"{axis}{n}" for axis, n in case.mesh.model_dump().items() if n > 1) or "tp1"
    link = [] if case.link == "none" else [str(case.link)]
    return "-".join([row.workload, case.device, mesh, *link, case.measure])
