"""A product whose input's gradient is summed over ranks: the sum is under way while the weight's gradient is computed.

    y  = h wᵀ                       h [T, k r], w [k n, r] -> y [T, k n], k products side by side (suite/precision/batch.py)
    dh = dy w, sent                 forward: nothing      backward: all-reduce of dh [T, k r] ...
    dw = dyᵀ h, dh awaited                                ... hidden behind this product

A message that is one launch on NVLink (kernels/exchange.py) is queued whole before the product: there nothing is hidden.
One opaque operation each way, so that a compiler reorders nothing. It sends what a `meet` before the product would.
"""
from __future__ import annotations

import torch
from torch import Tensor

from suite.comm.wire import Wire, wire_of
from suite.opaque import opaque
from suite.precision.batch import of_input, of_weight, product
from suite.seams import Site


def _forward(h: Tensor, w: Tensor, k: int, wire: int, layer: int, name: str) -> Tensor:
    return product(h, w, k)


def _backward(dy: Tensor, h: Tensor, w: Tensor, k: int, wire: int, layer: int, name: str) -> tuple[Tensor, Tensor]:
    pending = wire_of(wire).start("all_reduce", of_input(dy, h, w, k), site=(layer, name), way="backward")
    dw = of_weight(dy, h, w, k)
    return pending.wait()[0], dw


def _shape(h, w, k, wire, layer, name):
    return h.new_empty(len(h), len(w))


def _shapes(dy, h, w, k, wire, layer, name):
    return h.new_empty(h.shape), torch.empty_like(w)


def _keep(ctx, inputs, output):
    h, w, *ctx.rest = inputs
    ctx.save_for_backward(h, w)


def _differentiate(ctx, dy):
    return *_gradients(dy.contiguous(), *ctx.saved_tensors, *ctx.rest), None, None, None, None


_ARGUMENTS = "Tensor h, Tensor w, SymInt k, SymInt wire, SymInt layer, str name"
_product = opaque("entered", f"({_ARGUMENTS}) -> Tensor", _forward, _shape, _differentiate, _keep)
_gradients = opaque("entered_backward", f"(Tensor dy, {_ARGUMENTS}) -> (Tensor, Tensor)", _backward, _shapes)


def entered(h: Tensor, w: Tensor, k: int, wire: Wire, site: Site) -> Tensor:
    """h [T, k r] equal on all ranks of the wire, w [k n, r] of one dtype -> [T, k n]; the gradient of h is whole on every rank."""
    return _product(h, w.contiguous(), k, wire.id, *site)
