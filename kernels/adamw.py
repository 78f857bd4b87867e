"""AdamW with decoupled weight decay (Loshchilov and Hutter, 2019): one pass over a tensor and its states.

    g  = clip · grad
    w  = w - lr · decay · w
    m  = β1 · m + (1 - β1) · g          v  = β2 · v + (1 - β2) · g²
    w  = w - lr / (1 - β1ᵗ) · m / (√v / √(1 - β2ᵗ) + eps)

as torch.optim.AdamW(fused=True) does, in float32 whatever each tensor is stored in (bfloat16 or float32). Every operation is
rounded on its own but the root and the quotient of the last line, which are within 2 ulp of a step that is itself a small part
of the weight: correctly rounded they take half of the kernel's instructions. 14 bytes an element where all is bfloat16, 28
where all is float32.

`clip` is read on the device, so no pass of its own scales the gradients and nobody waits for the norm. The numbers that
change each step are plain arguments: they compile nothing anew. Plain torch: kernels.reference.adamw_step.
"""
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import DTYPES
from kernels.launch import Launch

BLOCK = 1024
WARPS = 4


@triton.jit
def adamw_kernel(param, grad, exp_avg, exp_avg_sq, clip, shrink, rate, correct, beta1, rest1, beta2, rest2, eps, numel,
                 BLOCK: tl.constexpr):
    # 64 bits for the block's place only: within a block 32 are enough, and cheaper
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offset = tl.arange(0, BLOCK)
    inside = offset < numel - start
    param += start
    grad += start
    exp_avg += start
    exp_avg_sq += start
    w = tl.load(param + offset, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad + offset, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(exp_avg + offset, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(exp_avg_sq + offset, mask=inside, other=0.0).to(tl.float32)
    if clip is not None:
        g *= tl.load(clip)
    w -= shrink * w
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    w -= rate * m / (tl.sqrt(v) * correct + eps)
    tl.store(param + offset, w.to(param.dtype.element_ty), mask=inside)
    tl.store(exp_avg + offset, m.to(exp_avg.dtype.element_ty), mask=inside)
    tl.store(exp_avg_sq + offset, v.to(exp_avg_sq.dtype.element_ty), mask=inside)


def step_launch(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *, lr: float, beta1: float, beta2: float,
                eps: float, decay: float, step: int, clip: Tensor | None = None) -> Launch:
    arguments = {"param": param, "grad": grad, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "clip": clip,
                 "shrink": float(lr * decay), "rate": lr / (1.0 - beta1**step), "correct": 1.0 / math.sqrt(1.0 - beta2**step),
                 "beta1": float(beta1), "rest1": 1.0 - beta1, "beta2": float(beta2), "rest2": 1.0 - beta2, "eps": float(eps),
                 "numel": param.numel()}
    return Launch(adamw_kernel, (triton.cdiv(param.numel(), BLOCK),), arguments, {"BLOCK": BLOCK}, WARPS)


def step(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *, lr: float, beta1: float, beta2: float,
         eps: float, decay: float, step: int, clip: Tensor | None = None) -> None:
    """One step in place. param, grad, exp_avg, exp_avg_sq: one shape, contiguous, bfloat16 or float32 each. step: counts
    from 1. clip: float32 scalar on the device that multiplies the gradient (which stays as it is), None for 1.
    Raises ValueError for another dtype, shape or memory order, and for a step below 1."""
    for name, tensor in {"param": param, "grad": grad, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}.items():
        if tensor.dtype not in DTYPES:
            raise ValueError(f"adamw: {name} is {tensor.dtype}, expected bfloat16 or float32")
        if tensor.shape != param.shape or not tensor.is_contiguous():
            raise ValueError(f"adamw: {name} {tuple(tensor.shape)} is no contiguous tensor of shape {tuple(param.shape)}")
    if clip is not None and (clip.dtype != torch.float32 or clip.numel() != 1):
        raise ValueError(f"adamw: clip is {clip.dtype} {tuple(clip.shape)}, expected one float32 number")
    if step < 1:
        raise ValueError(f"adamw: step {step}: steps count from 1")
    if param.numel():
        step_launch(param, grad, exp_avg, exp_avg_sq, lr=lr, beta1=beta1, beta2=beta2, eps=eps, decay=decay, step=step,
                    clip=clip).run()
