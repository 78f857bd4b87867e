"""fp32 on the wire: cast to float32, summed by the library in float32, cast back. 4 B per element."""
from __future__ import annotations

import torch

from suite.comm.native import Native


def build(**context) -> Native:
    return Native("fp32", torch.float32)
