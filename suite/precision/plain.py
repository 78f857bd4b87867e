"""Products by the framework's own matrix multiply in one dtype, weights kept in the same or a wider one.

    forward  y  = x · wᵀ        dX = dy · w        dW = dyᵀ · x

all three in `compute`, accumulated in float32 (float64 for float64). The weight is cast where it is used, so that one
copy of it is kept and its gradient arrives in `master`.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from suite.seams import Layout, Part, Site


class Plain:
    def __init__(self, compute: torch.dtype, master: torch.dtype):
        self.compute, self.master = compute, master

    def matmul(self, x: Tensor, w: Tensor, site: Site, noise: Tensor) -> Tensor:
        """x [T, d_in], w [d_out, d_in] -> [T, d_out]. `noise` names the draw; plain products draw nothing."""
        return F.linear(x, w.to(self.compute))

    def parts(self, params: Mapping[str, Tensor], layout: Layout) -> Sequence[Part]:
        return ()
