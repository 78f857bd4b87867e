"""bf16: the baseline of the precision axis. Products and activations in bfloat16, accumulated in float32.

Weights and optimizer states are `params`: float32 (master weights, the usual recipe) or bfloat16 (half the memory;
updates smaller than 2⁻⁸ of a weight are lost, so it serves timing and fitting more than loss). The residual stream is
bfloat16 as in Megatron, or float32 as torch.autocast leaves it.
"""
from __future__ import annotations

import torch

from suite.precision.plain import Plain


def build(params: str = "float32", residual: str = "bfloat16") -> Plain:
    return Plain(torch.bfloat16, getattr(torch, params), getattr(torch, residual))
