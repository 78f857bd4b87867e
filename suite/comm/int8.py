"""int8 on the wire: one float32 scale a group, symmetric, no transform. (1 + 4/group) B per element.

    s = max|x| / 127,   q = round_half_even(x / s) in [-127, 127],   x' = q s
The relative L2 error of a Gaussian is 0.65 % at group 128.
"""
from __future__ import annotations

from suite.comm.grouped import Grouped
from suite.comm.route import Route


class Int8(Grouped):
    name = "int8"
    format = "int8"
    kernels = True


def build(group: int = 128, min_bytes: int | str = 0, algorithm: str = "auto", depth: int = 1, direct: bool = True,
          fused: bool = True, **context) -> Int8:
    return Int8(group, Route(min_bytes, algorithm, depth, direct), fused)
