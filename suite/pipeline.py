"""What the Snakefile asks for: plan, launches, inputs and digests. Touches Snakemake's internals (tried with 9.27.1) here only.

Imports no torch: the pipeline must be parsed in a second.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

os.environ.setdefault("TRIAXIS_RESULTS", str(Path("results").absolute()))  # before suite.record reads it

from snakemake.exceptions import WorkflowError

from suite import plan, workload
from suite.digest import DigestError, Tree, digest
from suite.machine import Machine
from suite.rendezvous import Rendezvous

RESERVED = ("all", "launch", "tables", "claims", "coverage", "figure", "verdict", "check", "plan", "gate", "gate_findings",
            "gate_table")


class Pipeline:
    """Everything is decided at parse time from workloads, machine and `--config hours=N size=full`. Raises WorkflowError."""

    def __init__(self, config: dict[str, Any]) -> None:
        # The shell's `python` is then the one that runs Snakemake, also where its environment is not activated.
        os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        try:
            self.hours, self.size, self.base = settings(config)
            self.machine = Machine.here()
            self.workloads = workload.load_all()
            self.planned = plan.plan(self.workloads, self.machine, self.hours, self.size)
            self.launches = plan.launches(self.planned)
            self.digests = {name: [f"{row.id} {digest(row.case)}" for row in one.cases] for name, one in self.launches.items()}
        except (workload.WorkloadError, DigestError, ValueError) as error:
            raise WorkflowError(str(error)) from None
        for name in self.workloads:
            if name in RESERVED or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
                raise WorkflowError(f"workloads/{name}.yaml: the name is taken by a rule or has characters outside a-z, 0-9 and _")

    @property
    def here(self) -> str:
        return Rendezvous.of(os.environ).filed(self.machine.name)

    def pattern(self, names: Any) -> str:
        """A wildcard constraint: only these names, so that a wrong target is an error at once."""
        return "|".join(re.escape(name) for name in sorted(names)) or "(?!)"

    def stamps(self, workload: str | None = None) -> list[str]:
        """Outputs of the launches of a workload, or of all."""
        names = self.launches if workload is None else plan.launches_of(workload, self.planned, self.launches)
        return [f"results/launches/{self.here}/{name}.json" for name in sorted(names)]

    @cached_property
    def kept(self) -> list[str]:
        """Outputs of the launches that hold a case whose losses and counts are committed."""
        path = Path("suite/gate/reference/counts.json")
        known = set(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else set()
        return [f"results/launches/{self.here}/{name}.json" for name, one in sorted(self.launches.items())
                if known & {row.id for row in one.cases}]

    def cases(self, launch: str) -> list[str]:
        return [row.id for row in self.launches[launch].cases]

    def threads(self, launch: str, cores: int) -> int:
        return self.launches[launch].threads(cores, len(self.machine.gpus))

    @cached_property
    def plan_digest(self) -> str:
        return _sha([row.row() for row in self.planned])

    @cached_property
    def options(self) -> str:
        hours = f" --hours {self.hours:g}" if self.hours is not None else ""
        return hours + (f" --size {self.size}" if self.size else "")

    def rows(self, workload: str) -> str:
        """Digest of a workload as read: comments and the order of keys do not count."""
        one = self.workloads[workload]
        return _sha([one.title, one.question, [[row.size, row.value, row.case.row()] for row in one.rows]])

    @cached_property
    def all_rows(self) -> str:
        return _sha({name: self.rows(name) for name in self.workloads})

    @lru_cache  # noqa: B019 (one object for the life of the process)
    def code(self, module: str) -> str:
        """Digest of a report module and what it imports; an edit of it remakes tables or figures, never measurements."""
        try:
            return Tree().digest([module])
        except DigestError as error:
            raise WorkflowError(str(error)) from None

    @cached_property
    def reference(self) -> list[str]:
        """Committed records, to be shown beside the measured ones."""
        return sorted(path.as_posix() for path in Path("results/reference").glob("*/**/*") if path.is_file())


def settings(config: dict[str, Any]) -> tuple[float | None, str | None, str | None]:
    """(hours, size, base of the gate's paired timing) of `--config`. Raises ValueError naming the key."""
    unknown = sorted(set(config) - {"base", "hours", "size"})
    if unknown:
        raise ValueError(f"--config {unknown[0]}: unknown key; known: base, hours, size")
    hours = config.get("hours")
    try:
        hours = None if hours is None else float(hours)
    except (TypeError, ValueError):
        raise ValueError(f"--config hours: expected a number, got {hours!r}") from None
    base = config.get("base")
    if base is not None and not re.fullmatch(r"[\w./~^@-]+", str(base)):
        raise ValueError(f"--config base: {base!r} is no revision")
    return hours, config.get("size"), None if base is None else str(base)


def before(workflow: Any) -> None:
    """`--forceall` also measures again. Not a parameter: the next run without it would see a change.

    Called when execution starts; Snakemake parses the Snakefile before it settles what is forced.
    """
    if workflow.dag_settings.forceall:
        os.environ["TRIAXIS_FORCE"] = "1"


def _sha(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
