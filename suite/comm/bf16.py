"""bf16 on the wire: cast to bfloat16, summed by the library in bfloat16, cast back. 2 B per element."""
from __future__ import annotations

import torch

from suite.comm.native import Native


def build(**context) -> Native:
    return Native("bf16", torch.bfloat16)
