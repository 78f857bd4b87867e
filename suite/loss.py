"""The head's product and a vocabulary-parallel cross-entropy in one, a chunk of tokens at a time.

    logits = x Wᵀ                     [t, V/p]          W [V/p, D] is this rank's rows
    m = max logits, over ranks        AR max  t         float32
    s = Σ exp(logits - m), z = target's logit           AR [s, z]  2t   float32, summed over ranks
    loss = mean(log s + m - z)
    g = (exp(logits - m) / s - onehot) / T              dX = g W (partial: the layout sums it), dW = gᵀ x

The gradients are computed in the forward pass, where the logits are at hand: they are never kept and never recomputed.
Columns past the vocabulary (padding) carry no probability. Chunks bound the memory: `CHUNK_BYTES` of logits at a time.
"""
from __future__ import annotations

import torch
from torch import Tensor

from suite.norms import wide

CHUNK_BYTES = 2 << 30


def chunk_tokens(tokens: int, columns: int, itemsize: int) -> int:
    """Tokens a chunk, an even split."""
    pieces = max(1, -(-tokens * columns * itemsize // CHUNK_BYTES))
    return -(-tokens // pieces)


def _statistics(logits: Tensor, target: Tensor, valid: int) -> tuple[Tensor, Tensor, Tensor]:
    """logits [t, v], target [t] local column (outside [0, v): another rank's) -> local max, Σ exp(l - max), target's logit."""
    wide_logits = logits.to(wide(logits.dtype))
    if valid < logits.shape[1]:
        column = torch.arange(logits.shape[1], device=logits.device)
        wide_logits = torch.where(column < valid, wide_logits, torch.finfo(wide_logits.dtype).min)
    peak = wide_logits.amax(1)
    total = torch.exp(wide_logits - peak[:, None]).sum(1)
    mine = (target >= 0) & (target < logits.shape[1])
    picked = logits.gather(1, torch.where(mine, target, 0)[:, None])[:, 0].to(wide_logits.dtype)
    return peak, total, torch.where(mine, picked, 0.0)


def _gradient(logits: Tensor, target: Tensor, peak: Tensor, total: Tensor, scale: float, valid: int) -> Tensor:
    """d(mean loss)/d(logits), in the dtype of the logits."""
    column = torch.arange(logits.shape[1], device=logits.device)
    p = torch.exp(logits.to(peak.dtype) - peak[:, None]) / total[:, None]
    p = torch.where(column[None, :] == target[:, None], p - 1.0, p) * scale
    return torch.where(column < valid, p, 0.0).to(logits.dtype)


_COMPILED: dict[str, object] = {}


def _fused(function, like: Tensor):
    if like.device.type != "cuda":
        return function
    return _COMPILED.setdefault(function.__name__, torch.compile(function, dynamic=False))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, targets: Tensor, tp, vocab: int, compute: torch.dtype) -> Tensor:
        tokens, columns = len(x), len(w)
        w_compute = w.detach().to(compute)
        first = tp.index * columns
        valid = max(0, min(columns, vocab - first))
        needs = any(ctx.needs_input_grad[:2])
        grad_x = torch.empty_like(x) if needs else None
        grad_w = None
        loss = torch.zeros((), dtype=wide(compute), device=x.device)
        step = chunk_tokens(tokens, columns, x.element_size())
        for lo in range(0, tokens, step):
            piece, target = x[lo:lo + step], targets[lo:lo + step] - first
            logits = piece @ w_compute.t()
            peak, total, picked = _fused(_statistics, logits)(logits, target, valid)
            if tp.size > 1:
                highest, _ = tp.run("max", peak, site=(-1, "loss"), way="forward", purpose="loss")
                sums, _ = tp.run("all_reduce", torch.stack([total * torch.exp(peak - highest), picked]), site=(-1, "loss"),
                                 way="forward", purpose="loss")
                peak, (total, picked) = highest, sums
            loss += (torch.log(total) + peak - picked).sum()
            if needs:
                gradient = _fused(_gradient, logits)(logits, target, peak, total, 1.0 / tokens, valid)
                del logits
                torch.mm(gradient, w_compute, out=grad_x[lo:lo + step])
                if step >= tokens:
                    grad_w = gradient.t() @ piece
                else:
                    part = (gradient.t() @ piece).to(wide(compute))
                    grad_w = part if grad_w is None else grad_w.add_(part)
        if needs:
            ctx.save_for_backward(grad_x, grad_w.to(w.dtype))
        return loss / tokens

    @staticmethod
    def backward(ctx, grad: Tensor):
        grad_x, grad_w = ctx.saved_tensors
        return grad_x * grad.to(grad_x.dtype), grad_w * grad.to(grad_w.dtype), None, None, None, None


def linear_cross_entropy(x: Tensor, w: Tensor, targets: Tensor, tp, vocab: int, compute: torch.dtype) -> Tensor:
    """x [T, D] whole on every rank, w [V/p, D] this rank's rows, targets int64 [T] global -> scalar in float32 or wider.
    `tp` is the group's wire. The gradient of x is this rank's part of the sum over ranks."""
    return _LinearCrossEntropy.apply(x, w, targets, tp, vocab, compute)
