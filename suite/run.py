"""Runs launches: lock, data, ranks, deadline, records. A failure becomes a record with a one-line reason, never a number.

    run_launch(launch) -> one record a case
      1. records that still stand (same digest) are kept, unless forced
      2. locks: a timed launch takes the machine, a loss launch shares it and takes free GPUs; ranks see only the GPUs of their case
      3. data are prepared once; ranks start (torchrun; a single rank without it) and run the cases in turn
      4. a case that ends its ranks (out of memory, NaN, a signal, the deadline) gets a failed record; new ranks run the rest

What a case keeps until it is done (checkpoints) lies in results/.work/<machine>/<case>-<digest>. A failed case keeps it only if
it saves checkpoints, until `triaxis retry` or --force.

The runner owns the deadline. Ranks die with it, however it dies; it kills theirs and itself publishes only failures. Where the
ranks cannot even start twice, every remaining case of the launch fails with that reason.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from suite import locks, record
from suite.attempt import Attempt, Ended
from suite.case import Case
from suite.digest import digest
from suite.link import LinkError, environment
from suite.plan import Launch, deadline
from suite.rendezvous import Rendezvous, RendezvousError
from suite.show import Show
from suite.workload import models

if TYPE_CHECKING:
    from suite.machine import Machine

STARTS = 2  # times that ranks may fail to start before the launch is given up


class RunError(RuntimeError):
    """Nothing could be run or recorded: one line."""


def run_launch(
    launch: Launch,
    force: bool = False,
    *,
    machine: Machine | None = None,
    results: Path | None = None,
    show: Show | None = None,
    log: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> list[record.Record]:
    """Runs what is missing or stale of a launch and returns all its records, failed ones too, in the launch's order.

    force: also what still stands. log: file for the ranks' output. environ: stands for the process's own environment.
    Raises RunError where a record cannot be written (full disk), KeyboardInterrupt when told to stop; ranks are gone then,
    locks are free, and published records are whole.
    """
    return _Run(launch, force, machine, results, show, log, environ).run()


def stamp(launch: Launch, records: Sequence[record.Record], machine: str, results: Path | None = None) -> str:
    """What the pipeline remembers of a launch: each case's status and a digest of its record."""
    import hashlib

    rows = []
    for one in records:
        content = record.path_of(machine, one.id, results).read_bytes()
        rows.append({"id": one.id, "status": one.status, "reason": one.reason, "record": hashlib.sha256(content).hexdigest()})
    return json.dumps({"launch": launch.id, "machine": machine, "cases": rows}, indent=1, sort_keys=True) + "\n"


def work_folders(machine: str, case_id: str, results: Path | None = None) -> list[Path]:
    """What the case has kept so far, under any digest. `machine`: the name that its records are filed under."""
    mine = re.compile(re.escape(case_id) + r"-[0-9a-f]{12}")  # another case's id may begin with this one's
    return sorted(path for path in _work(machine, results).glob(f"{case_id}-*") if mine.fullmatch(path.name))


def _work(machine: str, results: Path | None) -> Path:
    return Path(results or record.RESULTS).absolute() / ".work" / machine


class _Run:
    def __init__(
        self,
        launch: Launch,
        force: bool,
        machine: Machine | None,
        results: Path | None,
        show: Show | None,
        log: Path | None,
        environ: Mapping[str, str] | None,
    ) -> None:
        if machine is None:
            from suite.machine import Machine

            machine = Machine.here()
        self.launch, self.force, self.machine = launch, force, machine
        self.results = Path(results or record.RESULTS).absolute()
        self.show = show or Show()
        self.environ = dict(os.environ if environ is None else environ)
        self.keys = {row.id: digest(row.case) for row in launch.cases}
        self.rendezvous = Rendezvous.of(self.environ)
        self.name = self.rendezvous.filed(machine.name)
        self.log = Path(log) if log else self.results / "logs" / self.name / f"{launch.id}.log"
        self.work = _work(self.name, self.results)

    def run(self) -> list[record.Record]:
        pending = [row for row in self.launch.cases if self.force or not record.valid(self._path(row.id), self.keys[row.id])]
        self.show.launch(self.launch.id, len(self.launch.cases), len(pending))
        if pending:
            gpus, count = [gpu.uuid for gpu in self.machine.gpus], self.rendezvous.gpus(self.launch.case)
            try:
                with locks.hold(self.results / ".locks", self.launch.exclusive, gpus, count, self.show.waiting) as mine:
                    self._measure([row.id for row in pending], mine)
            except OSError as error:
                raise RunError(f"{self.launch.id}: {error.filename or self.results}: {error.strerror or error}") from error
        return [
            record.read(self._path(row.id)) for row in self.launch.cases if self.rendezvous.first or self._path(row.id).exists()
        ]

    def _path(self, case_id: str) -> Path:
        return record.path_of(self.name, case_id, self.results)

    def _measure(self, pending: list[str], gpus: Sequence[str]) -> None:
        cases = {row.id: row.case for row in self.launch.cases}
        if self.force:
            for one in pending:
                self._forget(one)
        pending = self._prepared(pending, cases)
        starts = 0
        while pending:
            try:
                ended = self._attempt([(one, cases[one]) for one in pending], gpus)
            except (LinkError, RendezvousError) as error:
                ended = Ended(reason=str(error), started=False)
                starts = STARTS
            pending = [one for one in pending if one not in ended.done]
            for one in ended.done:
                self._forget(one)
            if ended.disk:
                raise RunError(f"{self.launch.id}: {ended.reason}")
            if ended.reason is None:
                if pending and self.rendezvous.first:
                    self._fail(pending.pop(0), "the ranks ended without a record")
                    continue
                for one in pending:  # the machine of rank 0 has published them
                    self._forget(one)
                break
            if ended.case in pending:
                self._fail(ended.case, ended.reason)
                pending.remove(ended.case)
            elif not ended.done:
                starts += 1
                if starts >= STARTS:
                    for one in pending:
                        self._fail(one, ended.reason)
                    return

    def _prepared(self, pending: list[str], cases: Mapping[str, Case]) -> list[str]:
        """The cases whose data are there; the others fail with the reason. Each text is prepared once."""
        from suite.data import DataError, prepare

        told: dict[str, str | None] = {}
        ready = []
        for one in pending:
            if not cases[one].reads_text:
                ready.append(one)
                continue
            data, vocab = cases[one].data, models()[cases[one].model]["vocab"]
            what = json.dumps([data.model_dump(mode="json"), vocab])
            if what not in told:
                try:
                    prepare(data, vocab)
                    told[what] = None
                except DataError as error:
                    told[what] = f"data: {error}"
            if told[what] is None:
                ready.append(one)
            else:
                self._fail(one, told[what])
        return ready

    def _attempt(self, cases: Sequence[tuple[str, Case]], gpus: Sequence[str]) -> Ended:
        first = cases[0][1]
        local = self.rendezvous.local(first.mesh.ranks)
        # On the CPU models are tiny: one thread is fastest, keeps losses the same on any machine (their eighth digit moves with
        # the count) and does not spin against its neighbours.
        threads = 1 if first.device == "cpu" else max(1, self.machine.cpus // local)
        narrowed = gpus if first.device == "cuda" else None
        repeatable = first.device == "cuda" and first.measure in ("loss", "codec")
        variables = environment(str(first.link), self.environ, threads, narrowed, deterministic=repeatable)
        variables["TRIAXIS_RESULTS"] = str(self.results)
        spec = {
            "launch": self.launch.id,
            "machine": self.name,
            "results": str(self.results),
            "work": str(self.work),
            "threads": threads,
            "runner": os.getpid(),
            "cases": [{"id": one, "key": self.keys[one], "row": case.row()} for one, case in cases],
        }
        self.work.mkdir(parents=True, exist_ok=True)
        path = self.work / f"{self.launch.id}.{self.rendezvous.node}.{os.getpid()}.launch"
        path.write_text(json.dumps(spec), encoding="utf-8")
        limits = {one: _limit(variables, deadline(case, self.machine.cpus)) for one, case in cases}
        try:
            command = self.rendezvous.command(first.mesh.ranks, [sys.executable, "-m", "suite.rank", str(path)])
            attempt = Attempt(command, variables, self.log, limits, _limit(variables, 600.0), self.show)
            return attempt.run()
        finally:
            path.unlink(missing_ok=True)

    def _forget(self, case_id: str) -> None:
        for folder in work_folders(self.name, case_id, self.results):
            shutil.rmtree(folder, ignore_errors=True)

    def _fail(self, case_id: str, reason: str) -> None:
        row = next(row for row in self.launch.cases if row.id == case_id)
        self.show.failed(case_id, reason)
        if not row.case.save:
            self._forget(case_id)
        if not self.rendezvous.first:
            return
        path = self._path(case_id)
        for ending in (".loss.csv", ".gpu.csv", ".messages.csv"):
            path.with_suffix(ending).unlink(missing_ok=True)
        facts: dict[str, Any] = {
            "launch": self.launch.id,
            "ended": datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="milliseconds"),
        }
        record.write(
            record.Record(case_id, row.case.row(), "failed", reason, self.keys[case_id], self.name, facts), self.results
        )


def _limit(variables: Mapping[str, str], usual: float) -> float:
    """Seconds; TRIAXIS_DEADLINE overrides them for slow machines."""
    text = variables.get("TRIAXIS_DEADLINE", "")
    try:
        return float(text) if text else usual
    except ValueError:
        raise RunError(f"TRIAXIS_DEADLINE: expected seconds, got {text!r}") from None
