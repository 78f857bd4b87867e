"""Processes on Linux: dying with one's parent, finding descendants, killing a tree. No dependency beyond the kernel."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1  # linux/prctl.h
# Looked up here because die_with_parent runs between fork and exec, where nothing may be imported.
_prctl = getattr(ctypes.CDLL(None), "prctl", None)


def die_with_parent(how: int = signal.SIGKILL) -> None:
    """Asks the kernel to signal this process when its parent ends, however it ends. Elsewhere than on Linux: nothing."""
    if _prctl is not None:
        _prctl(PR_SET_PDEATHSIG, int(how), 0, 0, 0)


def descendants(pid: int) -> list[int]:
    """Pids below `pid`, nearest first; ranks have sessions of their own, so a process group does not hold them all."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])  # the name before ")" may hold anything
            children.setdefault(parent, []).append(int(stat.parent.name))
    found, waiting = [], [pid]
    while waiting:
        below = children.get(waiting.pop(0), [])
        found += below
        waiting += below
    return found


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, IndexError):
        return False


def kill_tree(pid: int, patience: float = 10.0) -> list[int]:
    """Kills `pid`, the group that it leads or led, and everything below; waits until they are gone. Returns survivors.

    `pid` must have been started as the leader of a group.
    """
    doomed = [pid, *descendants(pid)]
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    for one in doomed[1:]:
        with contextlib.suppress(OSError):
            os.kill(one, signal.SIGKILL)
    end = time.monotonic() + patience
    while time.monotonic() < end:
        if not any(alive(one) for one in doomed):
            return []
        time.sleep(0.02)
    return [one for one in doomed if alive(one)]
