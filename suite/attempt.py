"""One start of the ranks, watched to its end: events, deadlines, and who is to blame when it ends badly.

Blame, first that applies: the deadline; a signal that killed a rank; a rank's own reason; the signal with which ranks give up
together (SIGABRT); a rank that only lost its peers; the exit status.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from suite import events
from suite.processes import die_with_parent, kill_tree
from suite.show import Show

GRACE = 5.0  # seconds that torchrun has to end the other ranks and to report, once one has failed
LEAVE = 60.0  # seconds for the ranks to end after the last record
GOING = (signal.SIGTERM, signal.SIGINT)  # how torchrun ends the others: no cause
# torchrun's report on a failed rank (torch 2.11, 2.13)
REPORT = re.compile(r"rank\s*:\s*(\d+) \(local_rank: \d+\)\s+exitcode\s*:\s*(-?\d+) \(pid: (\d+)\)")


@dataclass
class Ended:
    """case: which one is to blame, None before any began. started: ranks have joined. disk: a record could not be written."""

    reason: str | None = None
    case: str | None = None
    done: list[str] = field(default_factory=list)
    started: bool = False
    disk: bool = False


class Attempt:
    """limits: seconds a case may take; start: seconds until ranks have joined."""

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], log: Path, limits: Mapping[str, float], start: float, show: Show
    ) -> None:
        self.command, self.environ, self.log, self.limits, self.start, self.show = command, environ, log, limits, start, show
        self.ended = Ended()
        self.current: dict[int, str] = {}  # rank -> the case it is at
        self.failures: list[dict[str, Any]] = []
        self.tail = ""  # the end of the ranks' plain output
        self.until = 0.0

    def run(self) -> Ended:
        """Runs to the end, or kills. Never leaves a process behind, also when interrupted."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab", buffering=0) as log:
            process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=dict(self.environ),
                process_group=0,
                preexec_fn=die_with_parent,
            )
            overdue = False
            try:
                self.until = time.monotonic() + self.start
                for line in _lines(process, lambda: self.until):
                    self._take(line, log)
                overdue = process.poll() is None
                if overdue and self.failures:
                    overdue = False  # the others were given time to end and did not: the failure is the cause
            finally:
                if survivors := kill_tree(process.pid):
                    self.show.say(f"processes that cannot be killed: {survivors}")
                process.wait()
                process.stdout.close()
        self._judge(process.returncode, overdue)
        return self.ended

    def _take(self, line: str, log: BinaryIO) -> None:
        event = events.parse(line)
        if event is None:
            if not line.strip():
                return
            self.tail = (self.tail + line)[-20000:]
            with contextlib.suppress(OSError):  # a full disk must not end the run before it is reported
                log.write(line.encode())
            return
        kind = event["event"]
        if kind == "ready":
            self.ended.started = True
        elif kind == "case":
            if event["id"] not in self.current.values():
                self._allow(self.limits.get(event["id"], self.start))
                self.show.case(event["id"])
            self.current[event["rank"]] = event["id"]
        elif kind == "step":
            self.show.step(event["step"], event["steps"], event["loss"], event["rate"])
        elif kind == "done":
            self.ended.done.append(event["id"])
            self.show.done(event["id"], event["seconds"])
            self._allow(LEAVE if len(self.ended.done) == len(self.limits) else self.start)
        elif kind == "failed":
            self._allow(min(GRACE, self.until - time.monotonic()))
            self.failures.append(event)

    def _allow(self, seconds: float) -> None:
        """Sets the deadline; after a failure nothing moves it any more."""
        if not self.failures:
            self.until = time.monotonic() + seconds

    def _judge(self, status: int, overdue: bool) -> None:
        ended = self.ended
        if len(ended.done) == len(self.limits):
            return  # whatever happened while the ranks left, every record is published
        deaths = {int(rank): int(code) for rank, code, _ in REPORT.findall(self.tail) if -int(code) not in GOING}
        if not deaths and status < 0 and not overdue and not self.failures:
            deaths = {0: status}
        killed = {rank: -code for rank, code in deaths.items() if code < 0}
        own = [one for one in self.failures if not one["echo"]]
        hard = {rank: number for rank, number in killed.items() if number != signal.SIGABRT}
        if overdue:
            at = self._latest()
            ended.case = at
            limit = self.limits[at] if at else self.start
            ended.reason = f"deadline: {'no end' if at else 'ranks had not started'} after {limit:.0f} s"
        elif hard:
            self._died(*min(hard.items()))
        elif own:
            ended.case, ended.reason, ended.disk = own[0]["id"], own[0]["reason"], any(one["disk"] for one in own)
        elif killed:
            self._died(*min(killed.items()))
        elif self.failures:
            ended.case, ended.reason = self.failures[0]["id"], self.failures[0]["reason"]
        elif status or not ended.started:
            rank, code = min(deaths.items(), default=(0, status))
            ended.case = self.current.get(rank, self._latest())
            ended.reason = f"rank {rank} exited with status {code}" + (f": {text}" if (text := self._last_words()) else "")
        if ended.reason and "address already in use" in ended.reason.lower():
            ended.reason = "port taken: " + ended.reason

    def _died(self, rank: int, number: int) -> None:
        self.ended.case = self.current.get(rank, self._latest())
        self.ended.reason = f"rank {rank} died with signal {number}"

    def _latest(self) -> str | None:
        """The case at hand: the one of the rank that is furthest behind and not done."""
        waiting = [one for one in self.limits if one in self.current.values() and one not in self.ended.done]
        return waiting[0] if waiting else None

    def _last_words(self) -> str:
        for line in reversed(self.tail.splitlines()):
            if re.match(r"\s*[\w.]*(Error|Exception|Interrupt)\b.*", line) and "ChildFailedError" not in line:
                return line.strip()[:200]
        return ""


def _lines(process: subprocess.Popen, until: Any) -> Iterator[str]:
    """Lines of the output until the process ends or the time is over. A grandchild may keep the pipe open: its end counts not."""
    held = b""
    os.set_blocking(process.stdout.fileno(), False)
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while time.monotonic() < until():
            over = process.poll() is not None
            ready = selector.select(0 if over else 0.1)
            data = (process.stdout.read() or b"") if ready else b""
            held += data
            *whole, held = held.split(b"\n")
            for line in whole:
                yield line.decode("utf-8", "replace") + "\n"
            if over and not data:
                break
            if ready and not data:
                time.sleep(0.02)  # the pipe is closed, the process not yet over
    if held:
        yield held.decode("utf-8", "replace") + "\n"
