"""fp8 on the wire: E4M3 codes, one float32 scale a group, no transform. (1 + 4/group) B per element.

    s = max|x| / 448,   q = E4M3(clamp(x / s, -448, 448)) rounded half to even,   x' = q s
The clamp is explicit because torch's own cast saturates in some releases and gives NaN above 464 in others. The relative
L2 error of a Gaussian is 2.6 % at group 128, and 3.6 % after the two quantisations of a two-shot all-reduce.
"""
from __future__ import annotations

import torch
from torch import Tensor

from suite.comm.grouped import Grouped
from suite.comm.route import Route


class Fp8(Grouped):
    name = "fp8"
    top = 448.0

    def to_codes(self, y: Tensor) -> Tensor:
        return y.to(torch.float8_e4m3fn).view(torch.uint8)

    def from_codes(self, codes: Tensor) -> Tensor:
        return codes.view(torch.float8_e4m3fn).to(torch.float32)


def build(group: int = 128, min_bytes: int | str = 0, algorithm: str = "auto", depth: int = 1, direct: bool = True,
          **context) -> Fp8:
    return Fp8(group, Route(min_bytes, algorithm, depth, direct))
