"""Shared by byte codecs with float32 scales a group: grouping, padding, byte views, sums. int8.py and fp8.py say the numbers.

A row of n elements is cut into ceil(n / group) groups, the last one filled up with zeros:
    wire of a row = [codes of all groups, 1 B each | scales, 4 B each]        (1 + 4 / group) B per element
A group with a NaN or Inf gets a NaN scale, so all of it decodes to NaN, and `nonfinite` counts it. A group of zeros decodes to
exact zeros. Arithmetic is float32, sums go in rank order; the same input gives the same bytes.

On a GPU each step of fp8, int8 and int8-hadamard is one kernel, as TACO's are (kernels/grouped.py), for groups that those take (a
power of two from 32 to 512). `fused: false` and the others run the same plain torch as a CPU, compiled by torch.compile.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.grouped_reference import quantise, values
from kernels.taco_reference import GROUPS
from suite.comm.nonfinite import Nonfinite
from suite.comm.route import PLAIN, Route
from suite.comm.stripes import apart, stacked
from suite.seams import Key


class Grouped(Nonfinite):
    """A value of it gives `name` and `format` (kernels.grouped_reference.NUMBERS), or `quantise` and `dequantise` of its own."""

    native = None
    name: str
    format: str
    fields = 1  # float32 numbers sent with a group
    kernels = False  # whether kernels/grouped.py has it
    hadamard = False
    recordable = True  # see suite.recorded

    def __init__(self, group: int = 128, route: Route = PLAIN, fused: bool = True) -> None:
        if group < 1:
            raise ValueError(f"comm {self.name}: group {group}: expected at least 1")
        self.group, self.route = group, route
        self.fused = fused and self.kernels and group in GROUPS
        super().__init__()
        self._compiled: dict[str, Callable] = {}

    @property
    def width(self) -> int:
        """Bytes of a group's codes."""
        return self.group

    def nbytes(self, numel: int) -> int:
        return -(-numel // self.group) * (self.width + 4 * self.fields)

    def encode(self, x: Tensor, out: Tensor, key: Key) -> None:
        """x [..., n] of any float dtype -> out [..., nbytes(n)] uint8."""
        if step := self._kernel(x.device, "encode"):
            step(x, hadamard=self.hadamard, out=out, bad=self.counter(x.device, key))
            return
        codes, scales = self._on(x.device, "quantise", self._groups(x))
        self._write(codes, scales, out, key)

    def decode(self, wire: Tensor, out: Tensor) -> None:
        """wire [..., nbytes(n)] uint8 -> out [..., n] of any float dtype."""
        if step := self._kernel(wire.device, "decode"):
            step(wire, hadamard=self.hadamard, out=out)
            return
        codes, scales = self._split(wire)
        found = self._on(wire.device, "dequantise", codes, scales).flatten(-2)
        out.copy_(found[..., : out.shape[-1]])

    def reduce(self, wires: Sequence[Tensor], out: Tensor) -> None:
        """Sum of p wires [nbytes(n)] in float32, in their order -> out [n] of any float dtype."""
        if step := self._kernel(out.device, "total"):
            distance = apart(wires)
            rows = stacked(wires) if distance is None else wires[0][None]
            step(rows, hadamard=self.hadamard, out=out, stripes=len(wires), stripe=distance)
            return
        found = self._on(wires[0].device, "total", *self._split_all(wires)).flatten()
        out.copy_(found[: out.shape[0]])

    def reencode(self, wires: Sequence[Tensor], numel: int, out: Tensor, key: Key) -> None:
        """encode(reduce(wires)) of `numel` elements, whole groups throughout -> out [nbytes(numel)]."""
        if numel % self.group:
            raise ValueError(f"comm {self.name}: reencode: {numel} elements are no whole groups of {self.group}")
        if step := self._kernel(out.device, "reduce"):
            step(stacked(wires), out=out, bad=self.counter(out.device, key))
            return
        codes, scales = self._on(out.device, "requantise", *self._split_all(wires))
        self._write(codes, scales, out, key)

    def exchanges(self, x: Tensor) -> bool:
        """Whether `exchange` takes it."""
        return self.fused and x.dtype in (torch.bfloat16, torch.float32)

    def exchange(self, x: Tensor, out: Tensor, slots: Tensor, flags: Tensor, rank: int, key: Key) -> None:
        """A whole collective where ranks read each other's memory: kernels/exchange.py."""
        from kernels.exchange import exchange

        exchange(x, out, slots, flags, rank, self.group, mode="quotient", hadamard=self.hadamard, format=self.format,
                 bad=self.counter(x.device, key))

    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """float32 [..., g, group] -> codes uint8 of that shape, scales [..., g]."""
        return self.quantise_by(x, x.abs().amax(-1))

    def quantise_by(self, x: Tensor, peak: Tensor) -> tuple[Tensor, Tensor]:
        """`quantise` with the largest magnitudes [..., g] given."""
        return quantise(x, peak, self.format)

    def dequantise(self, codes: Tensor, scales: Tensor) -> Tensor:
        return values(codes, self.format) * scales[..., None]

    def total(self, codes: Sequence[Tensor], scales: Sequence[Tensor]) -> Tensor:
        out = self.dequantise(codes[0], scales[0])
        for c, s in zip(codes[1:], scales[1:]):
            out = out + self.dequantise(c, s)
        return out

    def requantise(self, codes: Sequence[Tensor], scales: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return self.quantise(self.total(codes, scales))

    def bad(self, codes: Tensor, scales: Tensor) -> Tensor:
        """How many groups held a NaN or Inf."""
        return torch.isnan(scales).sum()

    def _kernel(self, device: torch.device, step: str) -> Callable | None:
        """A step as one kernel, None where plain torch takes it."""
        if device.type != "cuda" or not self.fused:
            return None
        from kernels import grouped

        return partial(getattr(grouped, step), group=self.group, format=self.format)

    def _on(self, device: torch.device, method: str, *arguments):
        """Runs one of the four above, fused by torch.compile on a GPU: eager would pass over memory ten times."""
        if device.type != "cuda":
            return getattr(self, method)(*arguments)
        if method not in self._compiled:
            self._compiled[method] = torch.compile(getattr(self, method), dynamic=True)
        return self._compiled[method](*arguments)

    def _groups(self, x: Tensor) -> Tensor:
        n = x.shape[-1]
        x = F.pad(x, (0, -n % self.group)) if n % self.group else x
        return x.reshape(*x.shape[:-1], -1, self.group).to(torch.float32)

    def _write(self, codes: Tensor, scales: Tensor, out: Tensor, key: Key) -> None:
        n = codes.shape[-2] * codes.shape[-1]
        out[..., :n].copy_(codes.flatten(-2))
        if self.fields:
            out[..., n:].copy_(scales.contiguous().view(torch.uint8).view(out[..., n:].shape))
        self.counter(out.device, key).add_(self.bad(codes, scales))

    def _split(self, wire: Tensor) -> tuple[Tensor, Tensor]:
        groups = wire.shape[-1] // (self.width + 4 * self.fields)
        n = groups * self.width
        scales = wire[..., n:].clone(memory_format=torch.contiguous_format).view(torch.float32)  # its bytes may lie anywhere
        scales = scales if self.fields <= 1 else scales.unflatten(-1, (groups, self.fields))
        return wire[..., :n].unflatten(-1, (groups, self.width)), scales

    def _split_all(self, wires: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        pairs = [self._split(wire) for wire in wires]
        return [codes for codes, _ in pairs], [scales for _, scales in pairs]
