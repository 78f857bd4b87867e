"""SwiGLU of gate and up that lie side by side, and its backward pass in one.

    z  = silu(g) · u                                    [g | u] [T, 2F] -> z [T, F]
    dg = dz · u · σ(g)(1 + g(1 - σ(g)))     du = dz · silu(g)          -> [dg | du] [T, 2F]

The backward pass reads g, u and dz once and writes both gradients where one product takes them: 10·T·F bytes in bfloat16.
Left to the compiler, the two gradients are gathered by a kernel that computes both for each place: 16·T·F bytes read and
written (330 against 200 microseconds at T = 16384, F = 4864 on an H200). Arithmetic in float32 or wider.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def reference(gu: Tensor, dz: Tensor) -> Tensor:
    """gu [T, 2F], dz [T, F] -> gradient of gu [T, 2F], in plain torch."""
    wide = torch.promote_types(gu.dtype, torch.float32)
    g, u = gu.to(wide).chunk(2, dim=-1)
    grad, gate = dz.to(wide), torch.sigmoid(g)
    return torch.cat([grad * u * gate * (1 + g * (1 - gate)), grad * g * gate], dim=-1).to(gu.dtype)


@triton.jit
def backward_kernel(gu, dz, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    g = tl.load(gu + row * 2 * width + column, mask=inside).to(tl.float32)
    u = tl.load(gu + row * 2 * width + width + column, mask=inside).to(tl.float32)
    grad = tl.load(dz + row * width + column, mask=inside).to(tl.float32)
    gate = tl.sigmoid(g)
    tl.store(out + row * 2 * width + column, grad * u * gate * (1 + g * (1 - gate)), mask=inside)
    tl.store(out + row * 2 * width + width + column, grad * g * gate, mask=inside)


@torch.library.triton_op("triaxis::swiglu_backward", mutates_args=())
def backward(gu: Tensor, dz: Tensor) -> Tensor:
    """As `reference`, on a GPU. Raises ValueError where shapes do not fit or rows are not contiguous."""
    if gu.shape != (*dz.shape[:-1], 2 * dz.shape[-1]) or not gu.is_contiguous() or not dz.is_contiguous():
        raise ValueError(f"swiglu: {tuple(gu.shape)} and its gradient {tuple(dz.shape)} are not contiguous [T, 2F] and [T, F]")
    out = torch.empty_like(gu)
    rows, width = dz.numel() // dz.shape[-1], dz.shape[-1]
    torch.library.wrap_triton(backward_kernel)[(rows, triton.cdiv(width, BLOCK))](gu, dz, out, width, BLOCK)
    return out


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gu: Tensor) -> Tensor:
        ctx.save_for_backward(gu)
        g, u = gu.chunk(2, dim=-1)
        return torch.nn.functional.silu(g) * u

    @staticmethod
    def backward(ctx, dz: Tensor) -> Tensor:
        (gu,) = ctx.saved_tensors
        if gu.device.type == "cuda" and gu.dtype != torch.float64:
            return backward(gu, dz.contiguous())
        return reference(gu, dz)


def swiglu(gu: Tensor) -> Tensor:
    """gu [..., 2F], gate before up, contiguous -> [..., F]; differentiable."""
    return _SwiGLU.apply(gu)
