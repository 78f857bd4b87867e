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


def statistics(x: Tensor, norm: str) -> Tensor:
    """What the norm of a whole needs to know of this shard [T, n], as sums over shards: RMSNorm Σx² [T, 1] in `wide`,
    LayerNorm [Σx, Σx²] [T, 2] in float64, from mean and centred squares of the shard. Chan's formula in float64."""
    x = x.to(wide(x.dtype))
    if norm == "rmsnorm":
        return x.square().sum(-1, keepdim=True)
    mean = x.mean(-1, keepdim=True)
    centred = (x - mean).square().sum(-1, keepdim=True).double()
    mean, n = mean.double(), x.shape[-1]
    return torch.cat([n * mean, centred + n * mean.square()], dim=-1)


def moments(sums: Tensor, width: int, eps: float) -> tuple[Tensor, Tensor]:
    """LayerNorm's sums [T, 2] over all `width` elements -> (mean, 1 / sqrt(variance + eps)) [T, 1] in float64."""
    total, squares = sums.split(1, dim=-1)
    mean = total / width
    return mean, torch.rsqrt((squares / width - mean.square()).clamp_min(0) + eps)


def normalised(x: Tensor, sums: Tensor, width: int, eps: float, gain: Tensor, bias: Tensor | None) -> Tensor:
    """A shard [T, n] under the norm of a whole of `width` elements, whose `statistics` sum to `sums`."""
    if bias is None:
        return rms_norm(x, gain, eps, sums / width)
    mean, scale = (t.to(wide(x.dtype)) for t in moments(sums, width, eps))
    return ((x.to(mean.dtype) - mean) * scale * gain.to(mean.dtype) + bias.to(mean.dtype)).to(x.dtype)


def scaled(x: Tensor, gain: Tensor, eps: float, local: bool = True) -> tuple[Tensor, Tensor | None]:
    """(x / l · gain, l): a shard [T, n] by its own RMS l [T, 1], a constant in the backward pass, to be multiplied back behind
    the next product. It keeps partial products in range; the result does not depend on it. Not `local`: (x · gain, None)."""
    x_wide = x.to(wide(x.dtype))
    if not local:
        return (x_wide * gain.to(x_wide.dtype)).to(x.dtype), None
    rms = torch.sqrt(x_wide.detach().square().mean(-1, keepdim=True) + eps)
    return (x_wide / rms * gain.to(x_wide.dtype)).to(x.dtype), rms
