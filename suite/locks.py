"""File locks, so that two processes never measure at once. They vanish with the process that holds them.

<results>/.locks/<host>/queue     held while one waits for the machine, so that a timed run is not starved by loss runs
<results>/.locks/<host>/machine   a timed run holds it alone; loss runs share it
<results>/.locks/<host>/gpu-<id>  one a GPU that a loss run uses

<host> is the running kernel's id, the same in all its containers. Machines that share a results folder hold locks of their own:
two that run one case together would else wait for one another.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

POLL = 0.2  # seconds between two looks at busy GPUs


def _host() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return platform.node() or "host"


def _open(folder: Path, name: str) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    return os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _try(descriptor: int, how: int) -> bool:
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait(descriptor: int, how: int, waiting: Callable[[str], None], what: str) -> None:
    if not _try(descriptor, how):
        waiting(what)
        fcntl.flock(descriptor, how)


@contextlib.contextmanager
def hold(
    folder: Path, exclusive: bool, gpus: Sequence[str] = (), count: int = 0, waiting: Callable[[str], None] = lambda what: None
) -> Iterator[tuple[str, ...]]:
    """Holds the machine, alone or shared, and where shared `count` free ones of `gpus` (uuids), whose ids are yielded.

    `waiting` is told once what is waited for. Raises ValueError where there are fewer GPUs than asked for.
    """
    if count > len(gpus):
        raise ValueError(f"needs {count} GPUs, has {len(gpus)}")
    folder = folder / _host()
    with contextlib.ExitStack() as stack:
        queue, machine = _open(folder, "queue"), _open(folder, "machine")
        stack.callback(os.close, machine)
        try:
            _wait(queue, fcntl.LOCK_EX, waiting, "the machine (others wait too)")
            _wait(machine, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH, waiting, "the machine (a run is being measured)")
        finally:
            os.close(queue)
        yield tuple(gpus[:count]) if exclusive else stack.enter_context(_free(folder, gpus, count, waiting))


@contextlib.contextmanager
def _free(folder: Path, gpus: Sequence[str], count: int, waiting: Callable[[str], None]) -> Iterator[tuple[str, ...]]:
    """All of `count` locks or none: two that hold a part each would wait for one another for ever."""
    told = False
    while True:
        held: dict[str, int] = {}
        try:
            for gpu in gpus:
                if len(held) == count:
                    break
                descriptor = _open(folder, f"gpu-{gpu.replace('/', '_')}")
                if _try(descriptor, fcntl.LOCK_EX):
                    held[gpu] = descriptor
                else:
                    os.close(descriptor)
            if len(held) == count:
                yield tuple(held)
                return
        finally:
            for descriptor in held.values():
                os.close(descriptor)
        if not told:
            waiting(f"{count} free GPUs")
            told = True
        time.sleep(POLL)
