"""fp8-cast on the wire: every element cast to E4M3 as it is, no scale. 1 B per element.

    q = E4M3(clamp(x, -448, 448)) rounded half to even,   x' = q
What is below 2^-10 becomes 0 (all of a gradient of size 1e-6), what is above 448 becomes 448: the zero collapse and the
overflow that scales avoid. A NaN or Inf becomes the NaN of E4M3 and is counted, element by element.
"""
from __future__ import annotations

import torch
from torch import Tensor

from kernels.grouped_reference import values
from kernels.taco_reference import to_codes
from suite.comm.fp8 import Fp8
from suite.comm.route import Route


class Fp8Cast(Fp8):
    name = "fp8-cast"
    fields = 0
    kernels = False

    def __init__(self, route: Route) -> None:
        super().__init__(1, route)

    def quantise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """No scales; the NaNs are in the codes, where they are counted."""
        return to_codes(torch.where(torch.isfinite(x), x, torch.nan), self.format), x[..., :0]

    def dequantise(self, codes: Tensor, scales: Tensor) -> Tensor:
        return values(codes, self.format)

    def _split(self, wire: Tensor) -> tuple[Tensor, Tensor]:
        return wire.unsqueeze(-1), wire[..., :0]

    def bad(self, codes: Tensor, scales: Tensor) -> Tensor:
        return (codes & 0x7F == 0x7F).sum()


def build(min_bytes: int | str = 0, algorithm: str = "auto", depth: int = 1, direct: bool = True,
          **context) -> Fp8Cast:
    return Fp8Cast(Route(min_bytes, algorithm, depth, direct))
