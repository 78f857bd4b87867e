"""RMSNorm and LayerNorm, statistics in max(float32, dtype of x).

    RMSNorm    y = x / sqrt(mean(x²) + eps) · g              LayerNorm    y = (x - mean) / sqrt(var + eps) · g + b
"""
from __future__ import annotations

import torch
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rms_norm(x: Tensor, gain: Tensor, eps: float, mean_square: Tensor | None = None) -> Tensor:
    """x [..., D], gain [D] -> [..., D]. `mean_square` [..., 1]: over a whole of which x is a shard."""
    x_wide = x.to(wide(x.dtype))
    square = x_wide.square().mean(-1, keepdim=True) if mean_square is None else mean_square
    return (x_wide * torch.rsqrt(square + eps) * gain.to(x_wide.dtype)).to(x.dtype)


def layer_norm(x: Tensor, gain: Tensor, bias: Tensor, eps: float) -> Tensor:
    """x [..., D], gain, bias [D] -> [..., D]."""
    x_wide = x.to(wide(x.dtype))
    if x_wide.device.type == "cpu" and not torch.compiler.is_compiling():
        return torch.nn.functional.layer_norm(x_wide, gain.shape, gain.to(x_wide.dtype), bias.to(x_wide.dtype), eps).to(x.dtype)
    centred = x_wide - x_wide.mean(-1, keepdim=True)
    scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return (centred * scale * gain.to(x_wide.dtype) + bias.to(x_wide.dtype)).to(x.dtype)
