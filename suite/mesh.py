"""The mesh of processes: which rank sits where, and the process groups between them. Nothing else.

    rank = (dp_index * pp + pp_index) * tp + tp_index        tp fastest: neighbours in one host share a tensor

A single process needs no torch.distributed. Several are started by torchrun (RANK, WORLD_SIZE, LOCAL_RANK and its
rendezvous variables, over several machines too) and joined by NCCL where each has a GPU of its own, by gloo on the CPU
and where ranks share a GPU (`link: gloo`). Groups are made once a process and reused by every mesh of one launch.
"""
from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

Name = Literal["tp", "dp", "pp", "world"]
_made: dict[tuple[int, ...], dist.ProcessGroup] = {}  # ranks -> group, of all groups this process knows of


class MeshError(ValueError):
    """The processes that run are not the mesh that was asked for; one line."""


@dataclass(frozen=True)
class Group:
    """Processes that meet: `handle` is None where there is one. `staged`: device tensors cross through host memory."""

    ranks: tuple[int, ...] = (0,)
    index: int = 0
    handle: dist.ProcessGroup | None = field(default=None, repr=False, compare=False)
    staged: bool = False

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass
class Mesh:
    """Sizes, this rank's place and its groups. `backend` is "none" for a single process, else "gloo" or "nccl"."""

    dp: int = 1
    pp: int = 1
    tp: int = 1
    rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    backend: Literal["none", "gloo", "nccl"] = "none"
    groups: dict[tuple[str, int], Group] = field(default_factory=dict, repr=False)

    @classmethod
    def from_env(cls, dp: int = 1, pp: int = 1, tp: int = 1, device: str = "cpu", link: str | None = None,
                 timeout: float = 600.0) -> Mesh:
        """Joins the processes that torchrun started; collective: every rank calls it with the same sizes.

        timeout: seconds that a rank waits for the others. Raises MeshError for a wrong number of processes or GPUs.
        """
        size, rank, local = (int(os.environ.get(k, v)) for k, v in (("WORLD_SIZE", 1), ("RANK", 0), ("LOCAL_RANK", 0)))
        if size != dp * pp * tp:
            raise MeshError(f"mesh: dp {dp} x pp {pp} x tp {tp} needs {dp * pp * tp} processes, {size} are running")
        place = _place(device, local, shared=link == "gloo")
        if size == 1:
            return cls(device=place)
        backend = "nccl" if place.type == "cuda" and link != "gloo" else "gloo"
        if not dist.is_initialized():
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
        if dist.get_backend() != backend:
            raise MeshError(f"mesh: this launch is joined by {dist.get_backend()}, link {link} on {device} needs {backend}")
        mesh = cls(dp, pp, tp, rank, place, backend)
        mesh._join()
        return mesh

    @property
    def tp_index(self) -> int:
        return self.rank % self.tp

    @property
    def pp_index(self) -> int:
        return self.rank // self.tp % self.pp

    @property
    def dp_index(self) -> int:
        return self.rank // (self.tp * self.pp)

    @property
    def size(self) -> int:
        return self.dp * self.pp * self.tp

    def group(self, name: Name) -> Group:
        """The ranks that differ from this one in `name` only; "world": all of them."""
        if self.size == 1:
            return Group()
        return self.groups[name, 0]

    def copies(self, n: int) -> Group:
        """The n consecutive tensor-parallel ranks around this one that hold the same shard (K/V heads, n_kv < tp)."""
        if n < 1 or self.tp % n:
            raise MeshError(f"mesh: {n} copies do not divide tp {self.tp}")
        if n == self.tp:
            return self.group("tp")
        return Group(ranks=(self.rank,)) if n == 1 else self.groups["copies", n]

    def close(self) -> None:
        """Leaves the process group; the mesh and all groups of this process end."""
        self.groups.clear()
        if dist.is_initialized():
            _made.clear()
            dist.destroy_process_group()

    def _join(self) -> None:
        """Makes every group on every rank in one order, as torch.distributed demands."""
        grid = torch.arange(self.size).view(self.dp, self.pp, self.tp)
        lines: dict[tuple[str, int], list[list[int]]] = {
            ("world", 0): [list(range(self.size))],
            ("tp", 0): grid.reshape(-1, self.tp).tolist(),
            ("pp", 0): grid.movedim(1, 2).reshape(-1, self.pp).tolist(),
            ("dp", 0): grid.movedim(0, 2).reshape(-1, self.dp).tolist(),
        }
        for n in range(2, self.tp):
            if self.tp % n == 0:
                lines["copies", n] = grid.reshape(-1, n).tolist()
        staged = self.backend == "gloo" and self.device.type == "cuda"
        for key, groups in lines.items():
            for ranks in map(tuple, groups):
                handle = self._make(ranks)
                if self.rank in ranks:
                    self.groups[key] = Group(ranks, ranks.index(self.rank), handle, staged)

    def _make(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        if len(ranks) == 1:
            return None
        if ranks not in _made:
            _made[ranks] = dist.group.WORLD if len(ranks) == self.size else dist.new_group(list(ranks))
        return _made[ranks]


def _place(device: str, local: int, shared: bool) -> torch.device:
    """The device of a process; `shared`: several processes may use one GPU."""
    if device == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 0:
        raise MeshError(f"mesh: device {device} is wanted and torch sees no GPU")
    if local >= count and not shared:
        raise MeshError(f"mesh: local rank {local} has no GPU of its own ({count} found); link gloo lets ranks share one")
    place = torch.device("cuda", local % count)
    torch.cuda.set_device(place)
    return place
