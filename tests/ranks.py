"""Tests over several processes: `run_ranks(function, size, *args)` calls a module-level function on every rank.

    def rank_sum(mesh, factor): ...                 # gets a Mesh first; runs on each rank
    results = run_ranks(rank_sum, 2, 10.0)          # what ranks 0 and 1 returned; keyword `dp` shapes the mesh, tp = size / dp

Ranks of one size are started once, forked from a server that has imported torch already, and serve all tests of the
session. They are joined by gloo over a file, run on one thread each, and are killed where one of them raises (its
traceback is raised here), dies or takes longer than `timeout` seconds; the next call starts new ones.
"""
from __future__ import annotations

import atexit
import contextlib
import importlib
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

GRACE = 2.0  # seconds the other ranks get to report after the first one raised


class RankError(AssertionError):
    """A rank raised, died or did not come back."""


def run_ranks(function: Callable, size: int, *args: Any, dp: int = 1, timeout: float = 60.0, **kwargs: Any) -> list[Any]:
    """The results of all ranks, in rank order. Arguments and results are pickled by value. Raises RankError."""
    if size not in _pools:
        _pools[size] = _Pool(size)
    pool = _pools[size]
    try:
        return pool.call(function, dp, timeout, args, kwargs)
    except BaseException:
        _pools.pop(size).kill()
        raise


def close_ranks() -> None:
    """Ends all ranks of this process."""
    while _pools:
        _pools.popitem()[1].kill()


class _Pool:
    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "suite.comm.meet"])
        self.folder = tempfile.TemporaryDirectory(prefix="ranks")
        self.ranks = []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, rank, size, str(Path(self.folder.name) / "store")), daemon=True)
            process.start()
            there.close()
            self.ranks.append((process, here))

    def call(self, function: Callable, dp: int, timeout: float, args: tuple, kwargs: dict) -> list[Any]:
        order = pickle.dumps((function.__module__, function.__qualname__, dp, args, kwargs))
        for rank, (_, pipe) in enumerate(self.ranks):
            try:
                pipe.send_bytes(order)
            except OSError:
                raise RankError(f"rank {rank} of {len(self.ranks)} has died") from None
        pipes: dict[Connection, int] = {pipe: rank for rank, (_, pipe) in enumerate(self.ranks)}
        results: dict[int, Any] = {}
        faults: dict[int, str] = {}
        end = time.monotonic() + timeout
        while pipes:
            ready = wait(pipes, max(0.0, end - time.monotonic()))
            if not ready and not faults:
                raise RankError(f"ranks {sorted(pipes.values())} of {len(self.ranks)} did not come back within {timeout:g} s")
            if not ready:
                break
            for pipe in ready:
                rank = pipes.pop(pipe)
                try:
                    fine, value = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    fine, value = False, "the process died\n"
                (results if fine else faults)[rank] = value
            if faults:
                end = min(end, time.monotonic() + GRACE)
        if faults:
            raise RankError("\n".join(f"rank {rank} of {len(self.ranks)}:\n{text}" for rank, text in sorted(faults.items())))
        return [results[rank] for rank in range(len(self.ranks))]

    def kill(self) -> None:
        for process, pipe in self.ranks:
            pipe.close()
            process.kill()
        for process, _ in self.ranks:
            process.join()
        self.folder.cleanup()


_pools: dict[int, _Pool] = {}
atexit.register(close_ranks)


def _serve(pipe: Connection, rank: int, size: int, store: str) -> None:
    import torch
    import torch.distributed as dist

    from suite.mesh import Mesh

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=120))
    while True:
        try:
            module, name, dp, args, kwargs = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)  # the parent has gone; destroying the group would wait for ranks that went first
        try:
            function = importlib.import_module(module)
            for part in name.split("."):
                function = getattr(function, part)
            answer = pickle.dumps((True, function(Mesh.from_env(dp=dp, tp=size // dp), *args, **kwargs)))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        sys.stdout.flush()
        with contextlib.suppress(OSError):
            pipe.send_bytes(answer)
