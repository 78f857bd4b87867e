"""The head's product and a vocabulary-parallel cross-entropy in one, a chunk of tokens at a time.

    logits = x Wᵀ                     [t, V/p]          W [V/p, D] is this rank's rows
    m = max logits, over ranks        AR max  t         float32
    s = Σ exp(logits - m), z = target's logit           AR [s, z]  2t   float32, summed over ranks
    loss = mean(log s + m - z)
    g = (exp(logits - m) / s - onehot) / T              dX = g W (partial: the layout sums it), dW = gᵀ x

The gradients are computed in the forward pass, where the logits are at hand: they are never kept and never recomputed, and g
overwrites them. Columns past the vocabulary (padding) carry no probability. Chunks bound the memory: `chunk_bytes` of logits
at a time. Statistics and g: kernels.cross_entropy on a GPU, its plain-torch reference elsewhere and in float64.
"""
from __future__ import annotations

import functools

import torch
from torch import Tensor

from kernels import reference
from suite.norms import wide

CHUNK_LIMIT = {"cpu": 256 << 20, "cuda": 8 << 30}
CHUNK_SHARE = 16  # of a GPU's memory, at most one part in this many


@functools.lru_cache
def chunk_bytes(device: torch.device) -> int:
    """Logits held at once. Few, large chunks: each one reads the whole head and adds a whole gradient of it."""
    limit = CHUNK_LIMIT[device.type]
    return limit if device.type == "cpu" else min(limit, torch.cuda.get_device_properties(device).total_memory // CHUNK_SHARE)


def chunk_tokens(tokens: int, columns: int, itemsize: int, limit: int) -> int:
    """Tokens a chunk of at most `limit` bytes (one token at least), an even split."""
    most = max(1, limit // (columns * itemsize))
    return -(-tokens // -(-tokens // most))


def _statistics(logits: Tensor, target: Tensor, valid: int) -> tuple[Tensor, Tensor, Tensor]:
    if logits.is_cuda and logits.dtype != torch.float64:
        from kernels.cross_entropy import statistics

        return statistics(logits, target, valid)
    return reference.cross_entropy_statistics(logits, target, valid)


def _gradient(logits: Tensor, target: Tensor, peak: Tensor, total: Tensor, scale: float, valid: int) -> None:
    if logits.is_cuda and logits.dtype != torch.float64:
        from kernels.cross_entropy import gradient

        gradient(logits, target, peak, total, scale, valid)
    else:
        reference.cross_entropy_gradient(logits, target, peak, total, scale, valid)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b; the product is rounded to the dtype of `a` where `total` is wider."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, targets: Tensor, tp, vocab: int, compute: torch.dtype, learns: bool) -> Tensor:
        tokens, columns = len(x), len(w)
        w_compute = w.detach().to(compute)
        first = tp.index * columns
        valid = max(0, min(columns, vocab - first))
        needs = learns and any(ctx.needs_input_grad[:2])  # which is true under no_grad as well
        grad_x = torch.empty_like(x) if needs else None
        grad_w = None
        loss = torch.zeros((), dtype=wide(compute), device=x.device)
        step = chunk_tokens(tokens, columns, w_compute.element_size(), chunk_bytes(x.device))
        for lo in range(0, tokens, step):
            piece, target = x[lo:lo + step], targets[lo:lo + step] - first
            logits = piece @ w_compute.t()
            peak, total, picked = _statistics(logits, target, valid)
            if tp.size > 1:
                highest, _ = tp.run("max", peak, site=(-1, "loss"), way="forward", purpose="loss")
                sums, _ = tp.run("all_reduce", torch.stack([total * torch.exp(peak - highest), picked]), site=(-1, "loss"),
                                 way="forward", purpose="loss")
                peak, (total, picked) = highest, sums
            loss += (torch.log(total) + peak - picked).sum()
            if needs:
                _gradient(logits, target, peak, total, 1.0 / tokens, valid)
                torch.mm(logits, w_compute, out=grad_x[lo:lo + step])
                if grad_w is None:
                    grad_w = logits.t() @ piece
                    grad_w = grad_w if step >= tokens else grad_w.to(wide(compute))
                else:
                    _add_product(grad_w, logits.t(), piece)
        if needs:
            ctx.save_for_backward(grad_x, grad_w.to(w.dtype))
        return loss / tokens

    @staticmethod
    def backward(ctx, grad: Tensor):
        grad_x, grad_w = ctx.saved_tensors
        return grad_x * grad.to(grad_x.dtype), grad_w * grad.to(grad_w.dtype), None, None, None, None, None


def linear_cross_entropy(x: Tensor, w: Tensor, targets: Tensor, tp, vocab: int, compute: torch.dtype) -> Tensor:
    """x [T, D] whole on every rank, w [V/p, D] this rank's rows, targets int64 [T] global -> scalar in float32 or wider.
    `tp` is the group's wire. The gradient of x is this rank's part of the sum over ranks."""
    return _LinearCrossEntropy.apply(x, w, targets, tp, vocab, compute, torch.is_grad_enabled())
