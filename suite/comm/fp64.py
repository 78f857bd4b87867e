"""fp64 on the wire: cast to float64, summed by the library in float64, cast back. 8 B per element."""
from __future__ import annotations

import torch

from suite.comm.native import Native


def build(**context) -> Native:
    return Native("fp64", torch.float64)
