"""OutControl: the input channels with the loudest activations stay in FP8 (TetraJet-v2, the second of its parts).

    score     s_c = Σ over scored micro-batches and replicas of ‖X[:, c]‖₂      (X: a training forward's input, all tokens)
    select    the k channels of the largest score in each map, frozen for the rest of the run
    use       retained channels: MXFP8 (E4M3, 1x32 blocks, power-of-two scale rounded up) in Y and dW; FP4 in dX; see
              suite/precision/linear.py

`steps` steps are scored from `start` on (the paper: 50 steps, from 4 % of the run; below 1 a share of the run). Before that, and
while scoring, every channel is FP4. A sum of norms, not the norm of the sum, so the score depends on the micro-batch's size.

    count     round     k = round(ratio · n)                                  the paper's
              pad128    k = min(floor128(n), ceil128(int(ratio · n)))         the release's: 12.5 to 25 % of its models' channels
    order     norm      FP4 channels lie in falling order of score, so that blocks hold channels of like magnitude (the release)
              index     in their own order
    select    shard     where the inputs of a map are sharded, each rank picks from its own, k of the local width
              global    over the whole map; ranks may then hold different counts

Scores are summed over replicas after each scored step, in float32, so that replicas choose alike; where the inputs are not
sharded, the ranks of the tensor-parallel group see the same X and choose alike too. State: scores, the choice and how many steps
were scored; all of it lies in the checkpoint and reshards with the model.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from suite.record import CaseFailed
from suite.seams import Spec

COUNTS, ORDERS, SELECTS = ("round", "pad128"), ("norm", "index"), ("shard", "global")


def count_of(width: int, ratio: float, how: str) -> int:
    """Channels retained of `width`."""
    if how == "pad128":
        return min(width // 128 * 128, -(-int(ratio * width) // 128) * 128)
    return round(ratio * width)


class Channels:
    """The inputs of one map of one layer: their score, and which are retained, as `Linear` reads them."""

    def __init__(self, leaf: Tensor, spec: Spec, whole: int):
        self.spec, self.whole = spec, whole
        self.score, self.fresh = (torch.zeros(leaf.shape[1], device=leaf.device) for _ in range(2))  # fresh: of this step
        self.retained, self.rest = (torch.empty(0, dtype=torch.int64, device=leaf.device) for _ in range(2))

    def settle(self, mask: Tensor, order: str) -> None:
        """mask bool [n]: the retained ones."""
        ranked = torch.argsort(self.score, descending=True, stable=True)
        if order == "index":
            ranked = torch.arange(len(mask), device=mask.device)
        for tensor, chosen in ((self.retained, ranked[mask[ranked]]), (self.rest, ranked[~mask[ranked]])):
            tensor.resize_(len(chosen)).copy_(chosen)  # in place: the model holds these tensors

    def mask(self) -> Tensor:
        mask = torch.zeros(len(self.score), dtype=torch.uint8, device=self.score.device)
        mask[self.retained] = 1
        return mask


class OutControl:
    name = "outcontrol"

    def __init__(self, weights: Any, layout: Any, recipe: Any, *, ratio: float, start: float = 0.04, steps: int = 50,
                 count: str = "round", order: str = "norm", select: str = "shard"):
        for key, value, known in (("count", count, COUNTS), ("order", order, ORDERS), ("select", select, SELECTS)):
            if value not in known:
                raise ValueError(f"outcontrol: {key} {value!r}: expected one of {', '.join(known)}")
        if not 0 <= ratio <= 1:
            raise ValueError(f"outcontrol: ratio {ratio}: expected a share from 0 to 1")
        self.ratio, self.start, self.steps, self.count, self.order, self.select = ratio, start, steps, count, order, select
        self.first, self.tp, self.dp = int(start), layout.tp, None
        self.recorded, self.chosen_at = 0, None
        self._seen: set = set()
        self._micro: tuple[int, int] | None = None
        self.sites: dict[str, Channels] = {}
        for leaf, member in recipe.matrices(weights).items():
            sharded = member.spec.dim == 1
            spec = Spec(dim=0, parts=member.spec.parts) if sharded else Spec()
            self.sites[leaf.removesuffix(".weight")] = Channels(weights.leaves[leaf], spec, member.shape[1])
        recipe.listeners.append(self)

    def begin(self, case: Any, dp: Any) -> None:
        """The run's length, and the wire over which replicas add their scores."""
        self.dp = dp
        self.first = int(self.start * case.steps) if self.start < 1 else int(self.start)

    @property
    def chosen(self) -> bool:
        return self.chosen_at is not None

    def phase(self, step: int) -> int | None:
        """See Recipe.phase: all channels alike, scored, and apart."""
        return 1 if self.chosen else 0 if step < self.first else None

    def input(self, call: Any, x: Tensor) -> None:
        """Scores the input of one product, once a micro-batch however often its forward runs."""
        key = call.wire.key
        if self.chosen or key.step < self.first:
            return
        if self._micro != (key.step, key.micro):
            self._micro, self._seen = (key.step, key.micro), set()
        site = f"layers.{call.layer}.{call.name}"
        if site not in self._seen:
            self._seen.add(site)
            self.sites[site].fresh.add_(torch.linalg.vector_norm(x, dim=0, dtype=torch.float32))

    def after_step(self, step: int, weights: Any) -> None:
        if self.chosen or step < self.first:
            return
        self._gather()
        self.recorded += 1
        if self.recorded >= self.steps:
            for one in self.sites.values():
                one.settle(self._mask(one), self.order)
            self.chosen_at = step

    def _gather(self) -> None:
        """Adds the step's norms of all replicas, so that at a checkpoint every replica holds the same scores."""
        fresh = torch.cat([one.fresh for one in self.sites.values()])
        if self.dp is not None and self.dp.size > 1:
            fresh, _ = self.dp.run("all_reduce", fresh, site=(-1, self.name), way="step", purpose="scores")
        for one, part in zip(self.sites.values(), fresh.split([len(one.score) for one in self.sites.values()])):
            one.score.add_(part)
            one.fresh.zero_()

    def _mask(self, one: Channels) -> Tensor:
        score, first = one.score, 0
        if self.select == "global" and one.spec.dim is not None and self.tp.size > 1:
            pieces = self.tp.run("all_gather", score, site=(-1, self.name), way="step", purpose="scores")[0].chunk(self.tp.size)
            score = torch.cat(pieces[::one.spec.copies(self.tp.size)])
            first = one.spec.span((one.whole,), self.tp.index, self.tp.size)[0]
        k = count_of(len(score), self.ratio, self.count)
        mask = torch.zeros(len(score), dtype=torch.bool, device=score.device)
        mask[torch.argsort(score, descending=True, stable=True)[:k]] = True
        return mask[first:first + len(one.score)]

    def buffers(self) -> Mapping[str, Tensor]:
        found = {}
        for site, one in self.sites.items():
            found |= {f"{site}.retained": one.retained, f"{site}.rest": one.rest}
        return found

    def metrics(self) -> Mapping[str, float]:
        """The share of retained channels, and that of the scores' sum which they hold."""
        kept, whole = sum(len(one.retained) for one in self.sites.values()), sum(len(one.score) for one in self.sites.values())
        held = sum(float(one.score[one.retained].sum()) for one in self.sites.values())
        total = sum(float(one.score.sum()) for one in self.sites.values())
        return {"outcontrol_retained": kept / whole, "outcontrol_score_held": held / total if total else 0.0}

    def state(self) -> Mapping[str, tuple[Tensor, Spec]]:
        found: dict[str, tuple[Tensor, Spec]] = {
            "progress": (torch.tensor([self.recorded, -1 if self.chosen_at is None else self.chosen_at]), Spec())}
        for site, one in self.sites.items():
            found |= {f"{site}.score": (one.score, one.spec), f"{site}.mask": (one.mask(), one.spec)}
        return found

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Raises CaseFailed where the channels are not this model's."""
        if "progress" not in state:
            return
        self.recorded, at = (int(n) for n in state["progress"])
        sites = {name.rpartition(".")[0] for name in state if name != "progress"}
        if sites != set(self.sites):
            odd = sorted(sites ^ set(self.sites))[0]
            raise CaseFailed(f"outcontrol: {odd}: the frozen channels are of another model: this one has "
                             f"{'no' if odd in sites else 'a'} map of that name, they have {'one' if odd in sites else 'none'}")
        for site, one in self.sites.items():
            score, mask = (state.get(f"{site}.{kind}") for kind in ("score", "mask"))
            for tensor in (score, mask):
                if tensor is None or tensor.shape != one.score.shape:
                    given = "none" if tensor is None else tuple(tensor.shape)
                    raise CaseFailed(f"outcontrol: {site}: frozen channels of shape {given}, the map has {len(one.score)} inputs "
                                     "here")
            one.score.copy_(score)
            if at >= 0:
                one.settle(mask.to(one.score.device).bool(), self.order)
        self.chosen_at = None if at < 0 else at
