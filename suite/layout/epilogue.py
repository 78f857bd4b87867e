"""The two passes around the bottleneck's product as differentiable operations: kernels.bottleneck on a GPU, its plain-torch
reference elsewhere and in float64. Opaque to torch.compile, so that both run as they were tested.

    scale      (x / l · gain, s, l)     dx = dy · gain / l + 2 x ds      dgain = Σ_T dy x / l        l is a constant (btp.py)
               (x · gain, s), not local: the same with l = 1
    epilogue   f(p / RMS)               of dh: dp and ds (kernels/bottleneck.py); both dh and what follows are replicated
"""
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels import bottleneck_reference
from suite.norms import wide
from suite.opaque import opaque


def _chosen(x: Tensor):
    if x.is_cuda and x.dtype != torch.float64:
        from kernels import bottleneck

        return bottleneck
    return bottleneck_reference


def _scale_of(x: Tensor, gain: Tensor, eps: float, local: bool) -> tuple[Tensor, Tensor, Tensor]:
    return _chosen(x).scale(x.contiguous(), gain, eps, local)


def _scale_shapes(x, gain, eps, local):
    row = x.new_empty(len(x), dtype=wide(x.dtype))
    return x.new_empty(x.shape), row, row.new_empty(len(x) if local else 0)


def _keep_scale(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], inputs[1], output[2] if inputs[3] else None)


def _scale_gradients(ctx, dy, ds, dl):
    x, gain, rms = ctx.saved_tensors
    value, dy = x.to(ds.dtype), dy.to(ds.dtype)
    dy = dy if rms is None else dy / rms[:, None]
    dx = dy * gain.to(ds.dtype) + 2.0 * value * ds[:, None]
    return dx.to(x.dtype), (dy * value).sum(0).to(gain.dtype), None, None


def _epilogue_of(p: Tensor, square: Tensor, hidden: int, eps: float, silu: bool) -> Tensor:
    return _chosen(p).epilogue(p.contiguous(), square, hidden, eps, silu)


def _epilogue_shape(p, square, hidden, eps, silu):
    return p.new_empty(p.shape)


def _epilogue_backward_of(p: Tensor, square: Tensor, dh: Tensor, hidden: int, eps: float, silu: bool) -> tuple[Tensor, Tensor]:
    return _chosen(p).epilogue_backward(p.contiguous(), square, dh.contiguous(), hidden, eps, silu)


def _epilogue_backward_shapes(p, square, dh, hidden, eps, silu):
    return p.new_empty(p.shape), p.new_empty(len(p), dtype=wide(p.dtype))


def _keep_epilogue(ctx, inputs, output):
    p, square, *ctx.rest = inputs
    ctx.save_for_backward(p, square)


def _epilogue_gradients(ctx, dh):
    return *_epilogue_backward(*ctx.saved_tensors, dh, *ctx.rest), None, None, None


_REST = "SymInt hidden, float eps, bool silu"
_scale = opaque("bottleneck_scale", "(Tensor x, Tensor gain, float eps, bool local) -> (Tensor, Tensor, Tensor)",
                _scale_of, _scale_shapes, _scale_gradients, _keep_scale)
_epilogue = opaque("bottleneck_epilogue", f"(Tensor p, Tensor square, {_REST}) -> Tensor",
                   _epilogue_of, _epilogue_shape, _epilogue_gradients, _keep_epilogue)
_epilogue_backward = opaque("bottleneck_epilogue_backward", f"(Tensor p, Tensor square, Tensor dh, {_REST}) -> (Tensor, Tensor)",
                            _epilogue_backward_of, _epilogue_backward_shapes)


def scale(x: Tensor, gain: Tensor, eps: float, local: bool = True) -> tuple[Tensor, Tensor, Tensor | None]:
    """x [T, n], gain [n] -> (x / l · gain [T, n], Σ x² [T, 1], l [T, 1]), the last two float32 or wider; l has no gradient.
    Not `local`: (x · gain, Σ x², None)."""
    y, square, rms = _scale(x, gain, eps, local)
    return y, square[:, None], rms.detach()[:, None] if local else None


def epilogue(p: Tensor, square: Tensor, hidden: int, eps: float, silu: bool) -> Tensor:
    """p [T, m] and square [T, 1], both summed over ranks -> f(p / sqrt(square / hidden + eps)) [T, m]."""
    return _epilogue(p, square[:, 0].contiguous(), hidden, eps, silu)


def passes(tokens: int, shard: int, width: int, hidden: int, eps: float, silu: bool, local: bool, dtype: torch.dtype,
           device: torch.device) -> dict[str, tuple[Callable[[], object], int]]:
    """Each pass on [tokens, shard] or [tokens, width] normal values, as the operations above run it: name -> (run, bytes that it
    reads and writes)."""
    draw = torch.Generator(device=device).manual_seed(0)
    x, p, dh = (torch.randn(tokens, n, generator=draw, device=device).to(dtype) for n in (shard, width, width))
    gain, square = torch.ones(shard, dtype=dtype, device=device), torch.full((tokens,), float(hidden), device=device)
    square = square.to(wide(dtype))
    kernels, row = _chosen(x), square.nbytes
    return {
        "scale": (lambda: kernels.scale(x, gain, eps, local), 2 * x.nbytes + gain.nbytes + (1 + local) * row),
        "epilogue": (lambda: kernels.epilogue(p, square, hidden, eps, silu), 2 * p.nbytes + row),
        "epilogue_backward": (lambda: kernels.epilogue_backward(p, square, dh, hidden, eps, silu), 3 * p.nbytes + 2 * row),
    }
