"""`min_bytes: auto`: each size crosses in the way that was fastest on this machine and link when it first came.

For every codec, operation, number of elements and dimension, the plain bf16 collective and the codec's algorithms are timed on
random numbers, all ranks together; the slowest rank's median decides, so that every rank decides alike. Compression must win by
`MARGIN`, or the message crosses as it would without a codec. A throughput row only: what a loss or a count rests on forces the
codec.
"""
from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from suite.comm import bytewise
from suite.comm.counter import Counter
from suite.comm.transport import Transport
from suite.measure.turns import timed
from suite.seams import Codec, Key, Op

UNCOMPRESSED = "uncompressed"
MARGIN = 1.03
TIMED = 7


class Place(NamedTuple):
    """What is timed once. Codecs of a wire's two directions may differ; `codec`: its name, `number`: which of a wire's it is."""

    op: str
    elements: int
    size: int  # bytes of one
    dim: int
    codec: str
    number: int


@dataclass
class Choices:
    """Of one wire. paths: the way that each place goes; seconds: what each way took."""

    paths: dict[Place, str] = field(default_factory=dict)
    seconds: dict[Place, dict[str, float]] = field(default_factory=dict)
    codecs: list[Codec] = field(default_factory=list)  # by number

    def path(self, transport: Transport, codec: Codec, op: Op, x: Tensor, dim: int) -> str:
        """UNCOMPRESSED, an algorithm of an all-reduce, or "" for the codec. Collective where the size is new."""
        number = next((i for i, one in enumerate(self.codecs) if one is codec), len(self.codecs))
        self.codecs += [codec] if number == len(self.codecs) else []
        name, dim_of = getattr(codec, "name", type(codec).__name__), 0 if op == "all_reduce" else dim
        place = Place(op, x.numel(), x.element_size(), dim_of, name, number)
        if place not in self.paths:
            self.seconds[place] = took = _measure(transport, codec, op, x, dim)
            plain = took.pop(UNCOMPRESSED)
            best = min(took, key=took.__getitem__)
            self.paths[place] = best if took[best] * MARGIN <= plain else UNCOMPRESSED
            took[UNCOMPRESSED] = plain
        return self.paths[place]

    def rows(self) -> list[dict[str, object]]:
        """For a record: one a place."""
        return [place._asdict() | {"path": path or "codec", "seconds": self.seconds[place]}
                for place, path in sorted(self.paths.items())]


def _measure(transport: Transport, codec: Codec, op: Op, x: Tensor, dim: int) -> dict[str, float]:
    sample = torch.randn(x.shape, generator=torch.Generator(x.device).manual_seed(0), device=x.device).to(x.dtype)
    key, scratch = Key(site=(-2, "choice"), operand=f"{op} {transport.index}"), sample.clone()
    counter, transport.counter = transport.counter, Counter()  # what is tried out is not the model's traffic
    try:
        one = torch.ones(1, device=x.device)
        took = timed(_ways(transport, codec, op, scratch, dim, key), x.device, TIMED, transport.barrier,
                     lambda: scratch.copy_(sample),  # sums in place would grow without end
                     lambda: transport.all_reduce(one, "max").wait())
        return {name: _agreed(transport, statistics.median(seconds)) for name, seconds in took.items()}
    finally:
        transport.counter = counter


def _ways(transport: Transport, codec: Codec, op: Op, x: Tensor, dim: int, key: Key) -> dict[str, Callable[[], object]]:
    if op == "all_reduce":
        wanted = bytewise.route_of(codec).algorithm
        algorithms = ("one-shot", "two-shot") if wanted == "auto" else (wanted,)
        ways = {name: lambda name=name: bytewise.all_reduce(transport, codec, x, None, key, name, True).finish()
                for name in algorithms}
        return {UNCOMPRESSED: lambda: transport.all_reduce(x.to(torch.bfloat16)).wait().to(x.dtype), **ways}
    if op == "reduce_scatter":
        def plain() -> Tensor:
            parts = x.unflatten(dim, (transport.size, x.shape[dim] // transport.size)).movedim(dim, 0)
            return transport.reduce_scatter(parts.to(torch.bfloat16).contiguous()).wait().to(x.dtype)

        return {UNCOMPRESSED: plain, "": lambda: bytewise.reduce_scatter(transport, codec, x, dim, key).finish()}
    return {UNCOMPRESSED: lambda: bytewise.joined(transport.all_gather(x.to(torch.bfloat16).contiguous()).wait(), dim).to(x.dtype),
            "": lambda: bytewise.all_gather(transport, codec, x, dim, key).finish()}


def _agreed(transport: Transport, seconds: float) -> float:
    """The slowest rank's, the same on all."""
    device = torch.device("cuda", torch.cuda.current_device()) if transport.group.staged or _is_nccl(transport) else "cpu"
    return float(transport.all_reduce(torch.tensor([seconds], dtype=torch.float64, device=device), "max").wait())


def _is_nccl(transport: Transport) -> bool:
    return transport.group.handle is not None and torch.distributed.get_backend(transport.group.handle) == "nccl"
