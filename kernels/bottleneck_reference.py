"""kernels.bottleneck in plain torch, with the same signatures, on any device. Arithmetic in max(float32, dtype)."""
from __future__ import annotations

import torch
from torch import Tensor


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def scale(x: Tensor, gain: Tensor, eps: float, local: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """See kernels.bottleneck.scale."""
    value = _wide(x)
    square = value.square().sum(-1)
    if not local:
        return (value * _wide(gain)).to(x.dtype), square, square.new_empty(0)
    rms = torch.sqrt(square / x.shape[-1] + eps)
    return (value / rms[:, None] * _wide(gain)).to(x.dtype), square, rms


def _latent(p: Tensor, square: Tensor, hidden: int, eps: float) -> tuple[Tensor, Tensor]:
    w = torch.rsqrt(square.to(_wide(p).dtype) / hidden + eps)[:, None]
    return _wide(p) * w, w


def epilogue(p: Tensor, square: Tensor, hidden: int, eps: float, silu: bool) -> Tensor:
    """See kernels.bottleneck.epilogue."""
    y, _ = _latent(p, square, hidden, eps)
    return (y * torch.sigmoid(y) if silu else y).to(p.dtype)


def epilogue_backward(p: Tensor, square: Tensor, dh: Tensor, hidden: int, eps: float, silu: bool) -> tuple[Tensor, Tensor]:
    """See kernels.bottleneck.epilogue_backward."""
    y, w = _latent(p, square, hidden, eps)
    dy = _wide(dh)
    if silu:
        gate = torch.sigmoid(y)
        dy = dy * gate * (1.0 + y * (1.0 - gate))
    return (dy * w).to(p.dtype), -0.5 * (dy * y).sum(-1) / hidden * w[:, 0].square()
