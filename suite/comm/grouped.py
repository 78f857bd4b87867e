"""Shared by byte codecs with float32 scales a group: grouping, padding, byte views, sums. int8.py and fp8.py say the numbers.

A row of n elements is cut into ceil(n / group) groups, the last one filled up with zeros:
    wire of a row = [codes of all groups, 1 B each | scales, 4 B each]        (1 + 4 / group) B per element
A group with a NaN or Inf gets a NaN scale, so all of it decodes to NaN, and `nonfinite` counts it. A group of zeros has
scale 0 and decodes to exact zeros. Arithmetic is float32, sums go in rank order; the same input gives the same bytes.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from suite.comm.nonfinite import Nonfinite
from suite.comm.route import PLAIN, Route
from suite.seams import Key


class Grouped(Nonfinite):
    """A value of it gives `name`, `top` (largest code) and the two casts of one-byte codes, or a `quantise` of its own."""

    native = None
    name: str
    top: float
    fields = 1  # float32 numbers sent with a group
    to_codes: Callable[[Tensor], Tensor]  # float32 within [-top, top] -> uint8, rounded half to even
    from_codes: Callable[[Tensor], Tensor]  # uint8 -> float32

    def __init__(self, group: int = 128, route: Route = PLAIN) -> None:
        if group < 1:
            raise ValueError(f"comm {self.name}: group {group}: expected at least 1")
        self.group, self.route = group, route
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
        groups = self._groups(x)
        codes, scales = self._on(x.device, "quantise", groups)
        self._write(codes, scales, out, key)

    def decode(self, wire: Tensor, out: Tensor) -> None:
        """wire [..., nbytes(n)] uint8 -> out [..., n] of any float dtype."""
        codes, scales = self._split(wire)
        values = self._on(wire.device, "dequantise", codes, scales).flatten(-2)
        out.copy_(values[..., : out.shape[-1]])

    def reduce(self, wires: Sequence[Tensor], out: Tensor) -> None:
        """Sum of p wires [nbytes(n)] in float32, in their order -> out [n] of any float dtype."""
        values = self._on(wires[0].device, "total", *self._split_all(wires)).flatten()
        out.copy_(values[: out.shape[0]])

    def reencode(self, wires: Sequence[Tensor], numel: int, out: Tensor, key: Key) -> None:
        """encode(reduce(wires)) of `numel` elements, whole groups throughout -> out [nbytes(numel)]."""
        if numel % self.group:
            raise ValueError(f"comm {self.name}: reencode: {numel} elements are no whole groups of {self.group}")
        codes, scales = self._on(out.device, "requantise", *self._split_all(wires))
        self._write(codes, scales, out, key)

    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """float32 [..., g, group] -> codes uint8 of that shape, scales [..., g]."""
        return self.quantise_by(x, x.abs().amax(-1))

    def quantise_by(self, x: Tensor, peak: Tensor) -> tuple[Tensor, Tensor]:
        """`quantise` with the largest magnitudes [..., g] given."""
        scales = torch.where(torch.isfinite(peak), peak / self.top, torch.nan)
        steps = torch.where(scales > 0, scales, torch.inf)[..., None]  # NaN > 0 is false: such codes are 0, their scale says it
        y = torch.where(torch.isfinite(x), x / steps, 0.0).clamp(-self.top, self.top)
        return self.to_codes(y), scales

    def dequantise(self, codes: Tensor, scales: Tensor) -> Tensor:
        return self.from_codes(codes) * scales[..., None]

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
