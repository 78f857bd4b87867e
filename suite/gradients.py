"""What happens to gradients between the last backward pass and the optimizer, once a step.

    1. partial     replicated tensors whose gradient each rank has for its own tokens (sequence parallelism): one all-reduce
                   of all of them over tp
    2. copies      K/V shards that tp/n_kv neighbours hold alike: one all-reduce over those neighbours
    3. replicas    mean over dp, through the dp wire's backward codec
    4. clip        by the global norm, every parameter counted once whatever holds it: Σ over ranks of |g|² / copies. Only the
                   factor is found here: the optimizer multiplies by it in the pass that it makes anyway

1, 2 and the norm are exact: never compressed, at least float32. All pass the wires, and so are counted as `step`.
"""
from __future__ import annotations

import torch
from torch import Tensor

from suite.comm.wire import Wire
from suite.norms import wide
from suite.weights import Weights

SITE = (-1, "gradients")


def _sum_together(wire: Wire, gradients: list[Tensor], purpose: str, scale: float = 1.0, exact: bool = True) -> None:
    """One all-reduce for many tensors, in place."""
    if wire.size == 1 or not gradients:
        return
    flat = torch.cat([g.reshape(-1).to(wide(g.dtype) if exact else g.dtype) for g in gradients])
    total, _ = wire.run("all_reduce", flat, site=SITE, way="step", purpose=purpose)
    if scale != 1.0:
        total = total * scale
    for gradient, part in zip(gradients, total.split([g.numel() for g in gradients])):
        gradient.copy_(part.view_as(gradient))


class Gradients:
    """tp, dp: wires; copies: wires over neighbours that hold the same K/V shard, by how many they are."""

    def __init__(self, weights: Weights, tp: Wire, dp: Wire, copies: dict[int, Wire]):
        self.weights, self.tp, self.dp, self.copies = weights, tp, dp, copies
        # a leaf whose members are held by equally many ranks is one piece, else each member is
        self.pieces: list[tuple[str, str | None]] = []
        shares = []
        for leaf in weights.leaves:
            copies = {m.name: m.spec.copies(tp.size) for m in weights.members.values() if m.leaf == leaf}
            whole = len(set(copies.values())) == 1
            self.pieces += [(leaf, None)] if whole else [(leaf, name) for name in copies]
            shares += [1.0 / n for n in (list(copies.values())[:1] if whole else copies.values())]
        example = next(iter(weights.leaves.values()))
        self.shares = torch.tensor(shares, dtype=wide(example.dtype), device=example.device)

    @torch.no_grad()
    def settle(self) -> None:
        """Sums what must be summed: afterwards every rank has the gradient of its shard for the whole global batch."""
        weights = self.weights
        _sum_together(self.tp, [weights.gradient(m.name) for m in weights.partial()], "gradients")
        shared: dict[int, list[Tensor]] = {}
        for member, count in weights.copied():
            shared.setdefault(count, []).append(weights.gradient(member.name))
        for count, gradients in shared.items():
            _sum_together(self.copies[count], gradients, "gradients")
        if self.dp.size > 1:
            leaves = [leaf.grad for leaf in weights.leaves.values()]
            _sum_together(self.dp, leaves, "gradients", scale=1.0 / self.dp.size, exact=False)

    @torch.no_grad()
    def norm(self) -> Tensor:
        """Global L2 norm, a scalar tensor equal on all ranks; no synchronisation with the host."""
        weights, size = self.weights, self.tp.size
        gradients = [weights.leaves[leaf].grad if name is None else weights.gradient(name) for leaf, name in self.pieces]
        parts = torch.stack(torch._foreach_norm(gradients))
        square = (parts.to(self.shares.dtype).square() * self.shares).sum()
        if size > 1:
            square, _ = self.tp.run("all_reduce", square.reshape(1), site=SITE, way="step", purpose="norm")
        return square.reshape(()).sqrt()

    @torch.no_grad()
    def clip(self, limit: float) -> tuple[Tensor, Tensor | None]:
        """(global norm, factor that brings it down to at most `limit`), scalar tensors; no factor where `limit` is 0."""
        norm = self.norm()
        return norm, (limit / (norm + 1e-6)).clamp(max=1.0) if limit else None
