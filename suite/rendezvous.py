"""How ranks are started: torchrun (tried with torch 2.11 and 2.13), on one machine or, told by its variables, on several.

MASTER_ADDR, MASTER_PORT, NNODES and NODE_RANK are torchrun's. With any of them set, each machine runs the same command with
its own NODE_RANK, and ranks are spread evenly. Without them torchrun picks a free port on this machine. Records of several
machines are filed under this machine's name with their number: `h200x8-x2`.
"""

from __future__ import annotations

import errno
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from suite.case import Case

VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "NNODES", "NODE_RANK")


class RendezvousError(ValueError):
    """One line naming the variable."""


@dataclass(frozen=True)
class Rendezvous:
    """`given`: the user set torchrun's variables."""

    given: bool = False
    address: str = "127.0.0.1"
    port: int = 29500
    nodes: int = 1
    node: int = 0

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Rendezvous:
        """Raises RendezvousError for values that are no numbers or out of range."""
        if not any(environ.get(name) for name in VARIABLES):
            return cls()
        numbers = {}
        for name, usual, least, most in (("MASTER_PORT", 29500, 1, 65535), ("NNODES", 1, 1, 10**6), ("NODE_RANK", 0, 0, 10**6)):
            text = environ.get(name) or str(usual)
            if not text.isdigit() or not least <= int(text) <= most:
                raise RendezvousError(f"{name}: expected a number from {least} to {most}, got {text!r}")
            numbers[name] = int(text)
        if numbers["NODE_RANK"] >= numbers["NNODES"]:
            raise RendezvousError(f"NODE_RANK: {numbers['NODE_RANK']} is not below NNODES {numbers['NNODES']}")
        return cls(True, environ.get("MASTER_ADDR") or "127.0.0.1", numbers["MASTER_PORT"], numbers["NNODES"], numbers["NODE_RANK"])

    @property
    def first(self) -> bool:
        """Whether this machine holds rank 0, which publishes."""
        return self.node == 0

    def local(self, ranks: int) -> int:
        """Ranks on this machine. Raises RendezvousError."""
        if ranks % self.nodes:
            raise RendezvousError(f"NNODES: {ranks} ranks do not divide over {self.nodes} machines")
        return ranks // self.nodes

    def gpus(self, case: Case) -> int:
        """GPUs that the case needs on this machine; ranks joined by gloo share one. Raises RendezvousError."""
        return min(case.gpus, self.local(case.mesh.ranks))

    def filed(self, machine: str) -> str:
        """The name that records are filed under, where this machine is called `machine`."""
        return machine if self.nodes == 1 else f"{machine}-x{self.nodes}"

    def command(self, ranks: int, worker: Sequence[str]) -> list[str]:
        """The command line that starts the local ranks; `worker` begins with the Python interpreter. Raises RendezvousError."""
        local = self.local(ranks)
        if ranks == 1:
            return list(worker)
        run = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={local}"]
        if not self.given:
            return [*run, "--standalone", *worker[1:]]
        if self.first:
            self._free()
        return [
            *run,
            f"--nnodes={self.nodes}",
            f"--node-rank={self.node}",
            f"--master-addr={self.address}",
            f"--master-port={self.port}",
            *worker[1:],
        ]

    def _free(self) -> None:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", self.port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise RendezvousError(f"MASTER_PORT: port {self.port} is taken; choose another") from None
                raise RendezvousError(f"MASTER_PORT: port {self.port}: {error.strerror}") from None
