"""fp8 on the wire: E4M3 codes, one float32 scale a group, no transform. (1 + 4/group) B per element.

    s = max|x| / 448,   q = E4M3(x / s) rounded half to even,   x' = q s
The relative L2 error of a Gaussian is 2.6 % at group 128, and 3.6 % after the two quantisations of a two-shot all-reduce.
"""
from __future__ import annotations

from suite.comm.grouped import Grouped
from suite.comm.route import Route


class Fp8(Grouped):
    name = "fp8"
    format = "e4m3"
    kernels = True


def build(group: int = 128, min_bytes: int | str = 0, algorithm: str = "auto", depth: int = 1, direct: bool = True,
          fused: bool = True, **context) -> Fp8:
    return Fp8(group, Route(min_bytes, algorithm, depth, direct), fused)
