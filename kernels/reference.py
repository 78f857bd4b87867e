"""The kernels in plain torch, with the same signatures and on any device: what tests and benchmarks compare with.

Arithmetic in max(float32, dtype of the tensors), so that float64 stays float64.
"""
from __future__ import annotations

import importlib
import math

import torch
from torch import Tensor


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def cross_entropy_statistics(logits: Tensor, target: Tensor, valid: int) -> tuple[Tensor, Tensor, Tensor]:
    """See kernels.cross_entropy.statistics."""
    x = logits.to(_wide(logits.dtype))
    if valid < logits.shape[1]:
        x = torch.where(torch.arange(logits.shape[1], device=logits.device) < valid, x, -math.inf)
    peak = x.amax(1).clamp(min=torch.finfo(x.dtype).min)
    total = torch.exp(x - peak[:, None]).sum(1)
    mine = (target >= 0) & (target < logits.shape[1])
    picked = logits.gather(1, torch.where(mine, target, 0)[:, None])[:, 0].to(x.dtype)
    return peak, total, torch.where(mine, picked, 0.0)


def cross_entropy_gradient(logits: Tensor, target: Tensor, peak: Tensor, total: Tensor, scale: float, valid: int) -> None:
    """See kernels.cross_entropy.gradient."""
    column = torch.arange(logits.shape[1], device=logits.device)
    p = torch.exp(logits.to(peak.dtype) - peak[:, None]) / total[:, None]
    p = torch.where(column[None, :] == target[:, None], p - 1.0, p) * scale
    logits.copy_(torch.where(column < valid, p, 0.0))


def adamw_step(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *, lr: float, beta1: float, beta2: float,
               eps: float, decay: float, step: int, clip: Tensor | None = None) -> None:
    """See kernels.adamw.step."""
    wide = _wide(param.dtype)
    w, g, m, v = (tensor.to(wide) for tensor in (param, grad, exp_avg, exp_avg_sq))
    if clip is not None:
        g = g * clip.to(wide)
    w = w - (lr * decay) * w
    m = beta1 * m + (1.0 - beta1) * g
    v = beta2 * v + (1.0 - beta2) * g * g
    w = w - (lr / (1.0 - beta1**step)) * m / (v.sqrt() / math.sqrt(1.0 - beta2**step) + eps)
    param.copy_(w)
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)


def swiglu_backward(gu: Tensor, dz: Tensor) -> Tensor:
    """See kernels.swiglu.backward."""
    g, u = gu.to(_wide(gu.dtype)).chunk(2, dim=-1)
    grad, gate = dz.to(g.dtype), torch.sigmoid(g)
    return torch.cat([grad * u * gate * (1.0 + g * (1.0 - gate)), grad * g * gate], dim=-1).to(gu.dtype)


def columns_taken(x: Tensor, order: Tensor, *, out: Tensor | None = None) -> Tensor:
    """See kernels.columns.taken."""
    return x[:, order] if out is None else out.copy_(x[:, order])


def over(a: Tensor | float, b: Tensor | float) -> Tensor:
    """a / b, correctly rounded on every device: with a number in it, torch multiplies by a reciprocal on a GPU. Scales are made by
    it, whose bits are compared."""
    like = a if isinstance(a, Tensor) else b
    return torch.div(*(v if isinstance(v, Tensor) else like.new_full((), v) for v in (a, b)))


def power_above(x: Tensor) -> Tensor:
    """The smallest power of two that is at least x, float32, of normal numbers."""
    bits = x.clamp(min=2.0**-126).view(torch.int32)
    return ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def mxfp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., 32] float32 -> (E4M3 codes as numbers, scales [..., 1], NaN where x is not finite)."""
    amax = x.abs().amax(-1, keepdim=True)
    scale = torch.where(torch.isfinite(amax), power_above(over(amax, 448.0)), torch.nan)
    # clamped: torch 2.11 gives NaN above 464
    return (x / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).to(torch.float32), scale


def mxfp8_rounded(x: Tensor, *, dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None) -> Tensor:
    """See kernels.mxfp8.rounded."""
    codes, scale = mxfp8(torch.nn.functional.pad(x.to(torch.float32), (0, -x.shape[1] % 32)).unflatten(1, (-1, 32)))
    found = (codes * scale).flatten(1)[:, :x.shape[1]]
    return found.to(dtype) if out is None else out.copy_(found)


def __getattr__(name: str):
    """taco_encode, taco_decode, taco_total, taco_reduce, nvfp4_quantize and nvfp4_requantize, loaded when asked for: who imports
    the losses' references does not depend on the codec or the format."""
    for method in ("taco", "nvfp4"):
        if name.startswith(method + "_"):
            return getattr(importlib.import_module(f"kernels.{method}_reference"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
