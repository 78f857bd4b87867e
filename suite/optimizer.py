"""AdamW over the leaves of a model: decay on matrices only, the clipping factor applied in the same pass.

    matrices on a GPU, bfloat16 or float32      kernels.adamw, one launch a matrix
    all else (vectors; the CPU; float64)        torch's fused AdamW, one call for all

The states have the dtype of their leaf. Neither path waits for the device.
"""
from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from suite.case import Optim

KINDS = ("exp_avg", "exp_avg_sq")


class AdamW:
    """leaves: tensors that require gradients. `state[leaf]` maps each of KINDS to a tensor of the leaf's shape and dtype;
    `steps` is how many steps were taken, and may be set where states are loaded."""

    def __init__(self, leaves: Iterable[Tensor], optim: Optim):
        self.leaves, self.optim, self.steps = list(leaves), optim, 0
        self.state = {leaf: {kind: torch.zeros_like(leaf, requires_grad=False) for kind in KINDS} for leaf in self.leaves}
        self._own = [leaf for leaf in self.leaves if _own(leaf)]
        rest = [leaf for leaf in self.leaves if not _own(leaf)]
        self._rest = [([leaf for leaf in rest if leaf.ndim > 1], optim.decay), ([leaf for leaf in rest if leaf.ndim <= 1], 0.0)]

    @torch.no_grad()
    def step(self, lr: float, clip: Tensor | None = None) -> None:
        """One step at rate `lr`. clip: scalar on the device that multiplies every gradient, None for 1. Gradients are used
        up: what they hold afterwards is undefined. Raises ValueError where a leaf has none."""
        for leaf in self.leaves:
            if leaf.grad is None:
                raise ValueError(f"a parameter of shape {tuple(leaf.shape)} has no gradient")
        self.steps += 1
        o = self.optim
        if self._own:
            from kernels.adamw import step

            factor = None if clip is None else clip.to(torch.float32)
            for leaf in self._own:
                step(leaf, leaf.grad, **self.state[leaf], lr=lr, beta1=o.beta1, beta2=o.beta2, eps=o.eps, decay=o.decay,
                     step=self.steps, clip=factor)
        for leaves, decay in self._rest:
            if leaves:
                self._fused(leaves, decay, lr, clip)

    def _fused(self, leaves: list[Tensor], decay: float, lr: float, clip: Tensor | None) -> None:
        gradients = [leaf.grad for leaf in leaves]
        divisor = None
        if clip is not None and leaves[0].dtype == torch.float64:
            torch._foreach_mul_(gradients, clip)
        elif clip is not None:
            divisor = clip.to(torch.float32).reciprocal()  # torch divides by it in the same pass, in float32 only
        before = torch.full((len(leaves),), self.steps - 1.0, device=leaves[0].device)
        moments = [[self.state[leaf][kind] for leaf in leaves] for kind in KINDS]
        adamw(leaves, gradients, *moments, [], list(before.unbind()), fused=True, grad_scale=divisor, amsgrad=False,
              beta1=self.optim.beta1, beta2=self.optim.beta2, lr=lr, weight_decay=decay, eps=self.optim.eps, maximize=False)

    def zero(self) -> None:
        """Drops all gradients."""
        for leaf in self.leaves:
            leaf.grad = None


def _own(leaf: Tensor) -> bool:
    return leaf.is_cuda and leaf.ndim > 1 and leaf.dtype in (torch.bfloat16, torch.float32)
