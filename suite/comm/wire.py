"""A wire: one group of processes, a codec per direction, a transport and the byte counter. All collectives of a model pass it.

    what crosses                                          in which form
    activations and their gradients (`way` forward, backward)   the codec of that direction
    gradients of weights over the data-parallel group (`step`)  the backward codec of that wire
    statistics, loss terms, norms, maxima, integers, all else   uncompressed; sums in at least float32

A native codec is a cast, and the library adds; a byte codec ships uint8 and adds here, in float32 and rank order
(`bytewise.py`). A statistic given as `exact` is summed over ranks in max(float32, its dtype): behind the codes of a byte
codec's all-reduce, else as a second message that is under way at the same time. A NaN or Inf reaches the output, and
`nonfinite` counts the groups of a byte codec that held one.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import get_args
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from suite.comm import bytewise
from suite.comm.agreement import Agreement
from suite.comm.choice import UNCOMPRESSED, Choices
from suite.comm.counter import Counter, ring_bytes
from suite.comm.transport import Transport
from suite.mesh import Group
from suite.seams import Codec, Key, Op, Site, Way

_wires: WeakValueDictionary[int, Wire] = WeakValueDictionary()
Result = tuple[Tensor, Tensor | None]


class WireError(ValueError):
    """What was asked of a wire cannot be sent; names the wire, the site and what is wrong."""


class Pending:
    """A message under way."""

    def __init__(self, finish: Callable[[], Result]) -> None:
        self._finish: Callable[[], Result] | None = finish
        self._result: Result | None = None

    def wait(self) -> Result:
        """(the tensor, the summed statistic or None); the same at every call."""
        if self._finish is not None:
            with torch.no_grad():
                self._result = self._finish()
            self._finish = None
        return self._result


class Wire:
    """See the module docstring. `name`: the group as rows name it (tp, dp). `key`: the noise key of the running micro-batch.

    `id` names the wire inside compiled graphs. Ids of wires that are gone are given again in order, so that a model built
    anew after another one finds its compiled graphs.
    """

    def __init__(self, name: str, group: Group, codecs: Mapping[str, Codec], counter: Counter,
                 transport: Transport | None = None) -> None:
        if set(codecs) != {"forward", "backward"}:
            raise WireError(f"wire {name}: codecs: expected forward and backward, got {', '.join(sorted(codecs))}")
        self.name, self.codecs, self.counter = name, dict(codecs), counter
        self.transport = transport or Transport(group, counter)
        self.size, self.index = group.size, group.index
        self.key, self.choices, self.agreement = Key(), Choices(), Agreement(self.transport.group)
        self.id = next(i for i in range(len(_wires) + 1) if i not in _wires)
        _wires[self.id] = self

    @property
    def nonfinite(self) -> int:
        """Groups with a NaN or Inf that byte codecs of this wire encoded so far."""
        return sum(int(getattr(c, "nonfinite", 0)) for c in {id(c): c for c in self.codecs.values()}.values())

    @property
    def nonfinite_at(self) -> dict[tuple[Site, str], int]:
        """The same by (site, operand), in the order in which messages were first sent, where codecs tell it."""
        found: dict[tuple[Site, str], int] = {}
        for codec in {id(c): c for c in self.codecs.values()}.values():
            found |= getattr(codec, "nonfinite_at", {})
        return found

    def run(self, op: Op, x: Tensor, *, dim: int = 0, exact: Tensor | None = None, site: Site = (0, ""), way: Way = "forward",
            purpose: str = "activations", key: Key | None = None, owned: bool = False) -> Result:
        """Sends and waits; see `start`."""
        return self.start(op, x, dim=dim, exact=exact, site=site, way=way, purpose=purpose, key=key, owned=owned).wait()

    def start(self, op: Op, x: Tensor, *, dim: int = 0, exact: Tensor | None = None, site: Site = (0, ""), way: Way = "forward",
              purpose: str = "activations", key: Key | None = None, owned: bool = False) -> Pending:
        """Starts a collective; no autograd.

        op: none | all_reduce (same shape) | reduce_scatter (`dim` shrinks by p) | all_gather (`dim` grows by p) | max.
        exact: a statistic of any shape, always summed over all ranks. The result has the dtype of `x`, the statistic
        max(float32, its dtype). Where p is 1 or op is none, `x` itself comes back. Every rank must make the same calls.
        owned: an all-reduce may overwrite x and give it back: it saves a copy.
        Raises WireError where p does not divide x.shape[dim] of a reduce_scatter, and where ranks come with unlike tensors.
        """
        with torch.no_grad():
            dim = self._check(op, x, dim, site)
            exact = None if exact is None else exact.detach().to(torch.promote_types(exact.dtype, torch.float32))
            if self.size == 1 or (op == "none" and exact is None):
                return Pending(lambda: (x, exact))
            if op == "none":
                statistic = self._sum_exact(exact, way)
                return Pending(lambda: (x, statistic()))
            unequal = self.agreement.differs((str(site[1]), op, way), x)
            if unequal:
                raise WireError(f"wire {self.name}: {site}: {op} {way}: {unequal}")
            codec = self._codec(op, x, way, purpose)
            if isinstance(codec, torch.dtype):
                name = "exact"
            elif codec.native is not None:
                name, codec = _name(codec), codec.native
            else:
                path = self._path(op, x, dim, codec)
                if path == UNCOMPRESSED:
                    name, codec = "bf16", torch.bfloat16
            if isinstance(codec, torch.dtype):
                value = self._native(op, x, dim, codec, name, way, purpose, owned)
                statistic = self._sum_exact(exact, way)
                return Pending(lambda: (value(), statistic()))
            key = replace(key or self.key, site=(int(site[0]), site[1]), way=way, operand=f"{op} {self.index}")
            return Pending(self._bytes(op, x, dim, exact, codec, way, purpose, key, path, owned))

    def barrier(self) -> None:
        """Returns once every rank of the group has come here."""
        self.transport.barrier()

    def _check(self, op: Op, x: Tensor, dim: int, site: Site) -> int:
        if op not in get_args(Op):
            raise WireError(f"wire {self.name}: {site}: unknown op {op!r}; known: {', '.join(get_args(Op))}")
        if op in ("reduce_scatter", "all_gather"):
            if not -x.dim() <= dim < x.dim():
                raise WireError(f"wire {self.name}: {site}: {op}: no dimension {dim} in {tuple(x.shape)}")
            dim %= x.dim()
            if op == "reduce_scatter" and x.shape[dim] % self.size:
                raise WireError(f"wire {self.name}: {site}: reduce_scatter: dimension {dim} of {tuple(x.shape)} "
                                f"does not divide by {self.size}")
        return dim

    def _codec(self, op: Op, x: Tensor, way: Way, purpose: str) -> Codec | torch.dtype:
        """The codec that a message passes, or the dtype in which it crosses uncompressed."""
        if op != "max" and x.is_floating_point():
            if purpose == "activations" and way != "step":
                return self.codecs[way]
            if purpose == "gradients" and self.name == "dp":
                return self.codecs["backward"]
            if op != "all_gather":
                return torch.promote_types(x.dtype, torch.float32)
        return x.dtype

    def _path(self, op: Op, x: Tensor, dim: int, codec: Codec) -> str:
        """UNCOMPRESSED, an algorithm, or "" for the codec's own."""
        least = bytewise.route_of(codec).min_bytes
        if least != "auto":
            return UNCOMPRESSED if x.numel() * 2 < least else ""
        return self.choices.path(self.transport, codec, op, x, dim)

    def _native(self, op: Op, x: Tensor, dim: int, dtype: torch.dtype, codec: str, way: Way, purpose: str,
                owned: bool) -> Callable[[], Tensor]:
        if op in ("all_reduce", "max"):
            mine = x if owned and x.dtype == dtype and x.is_contiguous() else _copy(x, dtype)
            handle = self.transport.all_reduce(mine, "max" if op == "max" else "sum")
            finish = handle.wait
        elif op == "reduce_scatter":
            parts = x.unflatten(dim, (self.size, x.shape[dim] // self.size)).movedim(dim, 0)
            handle = self.transport.reduce_scatter(parts.to(dtype).contiguous())
            finish = handle.wait
        else:
            handle = self.transport.all_gather(x.to(dtype).contiguous())

            def finish() -> Tensor:
                return bytewise.joined(handle.wait(), dim)

        elements = x.numel() * (self.size if op == "all_gather" else 1)
        self._count(op, codec, dtype, elements, elements * dtype.itemsize, way, purpose)
        return lambda: finish().to(x.dtype)

    def _sum_exact(self, exact: Tensor | None, way: Way) -> Callable[[], Tensor | None]:
        if exact is None:
            return lambda: None
        handle = self.transport.all_reduce(_copy(exact, exact.dtype))
        self._count("all_reduce", "exact", exact.dtype, exact.numel(), exact.nbytes, way, "statistic")
        return handle.wait

    def _bytes(self, op: Op, x: Tensor, dim: int, exact: Tensor | None, codec: Codec, way: Way, purpose: str,
               key: Key, path: str, owned: bool) -> Callable[[], Result]:
        statistic, elements = None, x.numel()
        across = getattr(codec, "axis", "hidden") == "token" and x.dim() > 1
        if across:
            x, dim = x.movedim(-1, 0), (dim + 1) % x.dim()
        if op == "all_reduce":
            exact = None if exact is None else exact.contiguous()
            flight = bytewise.all_reduce(self.transport, codec, x, exact, key, path or None, owned and not across)
        else:
            if op == "reduce_scatter":
                flight = bytewise.reduce_scatter(self.transport, codec, x, dim, key)
            else:
                flight = bytewise.all_gather(self.transport, codec, x, dim, key)
                elements *= self.size
            statistic = self._sum_exact(exact, way)
        common = {"group": self.name, "way": way, "op": op, "kind": "counted"}
        self.counter.add(**common, codec=_name(codec), dtype="uint8", purpose=purpose, elements=elements,
                         payload_bytes=flight.payload, wire_bytes=flight.sent)
        if flight.exact_payload:
            self.counter.add(**common, codec="exact", dtype=_word(exact.dtype), purpose="statistic", elements=exact.numel(),
                             payload_bytes=flight.exact_payload, wire_bytes=flight.exact_sent, calls=0)

        def finish() -> Result:
            y, total = flight.finish()
            y = y.movedim(0, -1).contiguous() if across else y
            return y, total if statistic is None else statistic()

        return finish

    def _count(self, op: Op, codec: str, dtype: torch.dtype, elements: int, payload: int, way: Way, purpose: str) -> None:
        self.counter.add(group=self.name, way=way, op=op, codec=codec, dtype=_word(dtype), purpose=purpose, kind="modelled",
                         elements=elements, payload_bytes=payload, wire_bytes=ring_bytes(op, payload, self.size))


def wire_of(number: int) -> Wire:
    """The wire of an id. Raises WireError where it is gone."""
    wire = _wires.get(number)
    if wire is None:
        raise WireError(f"wire {number} is gone: keep it as long as the model that sends on it")
    return wire


def _copy(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype, copy=True, memory_format=torch.contiguous_format)


def _name(codec: Codec) -> str:
    return getattr(codec, "name", type(codec).__name__)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
