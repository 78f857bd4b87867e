"""Products by the framework's own matrix multiply in one dtype, weights kept in the same or a wider one.

    forward  y  = x · wᵀ        dX = dy · w        dW = dyᵀ · x

all three in `compute`, accumulated in float32 (float64 for float64). The weight is cast where it is used, so that one
copy of it is kept and its gradient arrives in `master`. The residual stream is kept in `residual`.
"""
from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from suite.precision.batch import batched
from suite.seams import Product, Site


class Plain:
    scale_free = True  # rounding of a product does not depend on the size of its operands
    recordable = True  # see suite.recorded

    def __init__(self, compute: torch.dtype, master: torch.dtype, residual: torch.dtype | None = None):
        self.compute, self.master, self.residual = compute, master, residual or compute

    def matmul(self, x: Tensor, w: Tensor, site: Site, noise: Tensor, product: Product, p: Mapping[str, Tensor]) -> Tensor:
        """x [T, d_in], w [d_out, d_in] -> [T, d_out]. Plain products draw nothing and need to know nothing of where they lie."""
        return F.linear(x, w.to(self.compute))

    def batch(self, x: Tensor, w: Tensor, count: int) -> Tensor:
        """x [T, count·d_in], w [count·d_out, d_in] -> [T, count·d_out]: products of equal shape, side by side."""
        return batched(x, w.to(self.compute), count)
