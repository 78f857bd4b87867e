"""Several products of equal shape as one strided batch, without a copy.

    y_i = h_i w_iᵀ      h [T, k r], w [k n, r] -> y [T, k n]         i of k, each a column block of h and y, a row block of w
    dh_i = dy_i w_i     written into column blocks of one contiguous [T, k r], which is what ranks then sum
    dw_i = dy_iᵀ h_i    row blocks of [k n, r]

A block of columns is a matrix with a leading dimension of its own, which every BLAS takes. Custom operations, so that
torch.compile neither copies the blocks nor splits the batch.
"""
from __future__ import annotations

import torch
from torch import Tensor

from suite.opaque import opaque


def _columns(x: Tensor, k: int) -> Tensor:
    """[T, k m] -> [k, T, m], a view."""
    return x.unflatten(-1, (k, x.shape[-1] // k)).transpose(0, 1)


def _rows(w: Tensor, k: int) -> Tensor:
    return w.unflatten(0, (k, len(w) // k))


def product(h: Tensor, w: Tensor, k: int) -> Tensor:
    """y, without a gradient."""
    y = h.new_empty(len(h), len(w))
    torch.bmm(_columns(h, k), _rows(w, k).transpose(1, 2), out=_columns(y, k))
    return y


def of_input(dy: Tensor, h: Tensor, w: Tensor, k: int) -> Tensor:
    """dh, contiguous."""
    dh = h.new_empty(h.shape)
    torch.bmm(_columns(dy, k), _rows(w, k), out=_columns(dh, k))
    return dh


def of_weight(dy: Tensor, h: Tensor, w: Tensor, k: int) -> Tensor:
    """dw."""
    dw = torch.empty_like(w)
    torch.bmm(_columns(dy, k).transpose(1, 2), _columns(h, k), out=_rows(dw, k))
    return dw


def _shape(h, w, k):
    return h.new_empty(len(h), len(w))


def _backward(dy: Tensor, h: Tensor, w: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return of_input(dy, h, w, k), of_weight(dy, h, w, k)


def _shapes(dy, h, w, k):
    return h.new_empty(h.shape), torch.empty_like(w)


def _keep(ctx, inputs, output):
    h, w, ctx.k = inputs
    ctx.save_for_backward(h, w)


def _gradients(ctx, dy):
    return *_batch_backward(dy.contiguous(), *ctx.saved_tensors, ctx.k), None


_batch = opaque("batch", "(Tensor h, Tensor w, SymInt k) -> Tensor", product, _shape, _gradients, _keep)
_batch_backward = opaque("batch_backward", "(Tensor dy, Tensor h, Tensor w, SymInt k) -> (Tensor, Tensor)", _backward, _shapes)


def batched(h: Tensor, w: Tensor, k: int) -> Tensor:
    """h [T, k r], w [k n, r] of one dtype -> [T, k n]. Raises ValueError where k divides neither."""
    if h.shape[-1] % k or len(w) % k or h.shape[-1] // k != w.shape[-1]:
        raise ValueError(f"batch: {tuple(h.shape)} and {tuple(w.shape)} are not [T, {k} r] and [{k} n, r]")
    return _batch(h, w.contiguous(), k)
