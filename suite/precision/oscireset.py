"""OsciReset: weights that swing between two codes are set onto the value of their code (TetraJet-v2, the third of its parts).

Over a window of T steps, for every weight w of every quantised map, q(w) its dequantised value in the forward pass:

    moved      Σ |w_t - w_{t-1}|            of the master weight
    jumped     Σ |q(w_t) - q(w_{t-1})|      scales follow the live weights, so their jitter counts as well
    risk       jumped / moved               0 where moved is 0
    reset      w <- q(w) where risk >= tau; the optimizer's moments stay

    i = step        i % P == 0: snapshot        1 .. T: track        T + 1: reset, forget          only from `start` on

`start` below 1 is a share of the run's length (the paper: 59 to 69 %; P = 200 or 400, T = 50, tau 8 in its configurations and 16
as its default). It monitors exactly what the forward quantises: the same operand of the same recipe, of the same tensor. Only
channels that OutControl leaves in FP4 take part, and a window in which it chose its channels is dropped.

`share` below 1 is the memory-efficient variant: at the snapshot the weights of this rank nearest to a decision edge are picked,

    nearness = 1 - distance to the nearest edge / half the gap on that side

and only they are tracked. (The release measures distance from the code in units of a centred interval, which codes 2 and 4 do
not have, and its variant ignores `start`; neither is followed.)

At tau = 8, T = 50 and a small learning rate one rightful crossing is risk enough. So the record says, over all windows, what share
was flagged, how often a flagged weight changed its code in the window, and what share of codes ended elsewhere than it began.

State, saved and resharded as weights are: the window's snapshot and sums. A resume in the middle of a window gives the same bits;
where the state is missing, the window is skipped.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from suite.precision.operand import nearness
from suite.seams import Spec

FIELDS = ("weight", "value", "code", "first", "moved", "jumped", "flips", "watched")
COUNTS = ("flagged", "flips", "changed", "watched", "windows")


class Window:
    """Of one leaf: what is tracked, of all its elements or of those at `index` (flat). code: of the last step; first: of the
    snapshot; flips: changes of code so far."""

    def __init__(self, weight: Tensor, value: Tensor, code: Tensor, index: Tensor | None):
        self.index = index
        self.weight, self.value, self.code = self.pick(weight).clone(), self.pick(value).clone(), self.pick(code).clone()
        self.first = self.code.clone()
        self.moved, self.jumped = torch.zeros_like(self.weight), torch.zeros_like(self.value)
        self.flips = torch.zeros_like(self.code, dtype=torch.int16)

    def pick(self, tensor: Tensor) -> Tensor:
        return tensor if self.index is None else tensor.reshape(-1)[self.index]

    def track(self, weight: Tensor, value: Tensor, code: Tensor) -> None:
        weight, value, code = self.pick(weight), self.pick(value), self.pick(code)
        self.moved.add_((weight - self.weight).abs_())
        self.jumped.add_((value - self.value).abs_())
        self.flips.add_((code != self.code).to(torch.int16))
        self.weight.copy_(weight)
        self.value.copy_(value)
        self.code.copy_(code)

    def flagged(self, tau: float) -> Tensor:
        return (self.moved > 0) & (self.jumped >= tau * self.moved)


class OsciReset:
    name = "oscireset"

    def __init__(self, weights: Any, layout: Any, recipe: Any, control: Any | None = None, *, tau: float, start: float = 0.64,
                 period: int = 200, window: int = 50, share: float = 1.0):
        if period < window + 2:
            raise ValueError(f"oscireset: a period of {period} steps is too short for a window of {window}: it takes {window + 2}")
        if not tau > 0 or not 0 < share <= 1:
            raise ValueError(f"oscireset: tau {tau}, share {share}: expected a number above 0, and a share above 0 up to 1")
        self.weights, self.recipe, self.control, self.tp = weights, recipe, control, layout.tp
        self.tau, self.start, self.period, self.window, self.share = tau, start, period, window, share
        self.first = int(start)
        self.leaves = list(recipe.matrices(weights))
        self.windows: dict[str, Window] = {}
        self.counts = torch.zeros(len(COUNTS), dtype=torch.float64, device=next(iter(weights.leaves.values())).device)
        self.fresh = torch.zeros_like(self.counts[:4])

    def begin(self, case: Any, dp: Any) -> None:
        """The run's length."""
        self.first = int(self.start * case.steps) if self.start < 1 else int(self.start)

    @torch.no_grad()
    def after_step(self, step: int, weights: Any) -> None:
        if step < self.first:
            return
        if self.control is not None and self.control.chosen_at == step:
            self.windows = {}  # its blocks are others now
            return
        at = step % self.period
        if at == 0:
            self.windows = {leaf: self._snapshot(leaf) for leaf in self.leaves}
        elif self.windows and at <= self.window:
            for leaf in self.leaves:
                self.windows[leaf].track(self.weights.leaves[leaf].data, *self._quantised(leaf)[:2])
        elif self.windows and at == self.window + 1:
            for leaf in self.leaves:
                self._reset(leaf, self.windows[leaf])
            self._sum()
            self.windows = {}

    def _channels(self, leaf: str) -> Any | None:
        """OutControl's choice for the leaf, once there is one."""
        return self.control.sites[leaf.removesuffix(".weight")] if self.control is not None and self.control.chosen else None

    def _quantised(self, leaf: str) -> tuple[Tensor, Tensor, Tensor]:
        """(value, twice the code as int8, scale) of every weight as the forward has it; nothing in retained channels."""
        value, code, scale = self.recipe.weight(self.weights.leaves[leaf].data, self._channels(leaf), self.tp)
        return value, code.to(torch.int8), scale

    def _snapshot(self, leaf: str) -> Window:
        weight = self.weights.leaves[leaf].data
        value, code, scale = self._quantised(leaf)
        index = None
        if self.share < 1:
            near = nearness(weight, code, scale).reshape(-1)
            index = torch.topk(near, max(1, round(self.share * near.numel()))).indices.sort().values
        return Window(weight, value, code, index)

    def _sum(self) -> None:
        """Adds the window's counts of all ranks of the group."""
        if self.tp.size > 1:
            self.fresh, _ = self.tp.run("all_reduce", self.fresh, site=(-1, self.name), way="step", purpose="counts")
        self.counts[:4] += self.fresh
        self.counts[4] += 1
        self.fresh = torch.zeros_like(self.fresh)

    def _reset(self, leaf: str, window: Window) -> None:
        weight = self.weights.leaves[leaf].data
        value, code, _ = self._quantised(leaf)
        flagged = window.flagged(self.tau)
        channels = self._channels(leaf)
        if channels is not None:
            free = torch.ones(weight.shape[1], dtype=torch.bool, device=weight.device)
            free[channels.retained] = False
            flagged &= window.pick(free.expand_as(weight))
        changed = window.pick(code) != window.first
        found = (flagged.sum(), window.flips[flagged].sum(), changed.sum(), torch.tensor(flagged.numel()))
        self.fresh += torch.stack([n.to(self.counts) for n in found])
        value = value.to(weight.dtype)
        if window.index is None:
            weight.copy_(torch.where(flagged, value, weight))
        else:
            at = window.index[flagged]
            weight.view(-1)[at] = value.reshape(-1)[at]

    def buffers(self) -> Mapping[str, Tensor]:
        return {}

    def metrics(self) -> Mapping[str, float]:
        """Over all windows, of all ranks of the group."""
        flagged, flips, changed, watched, windows = self.counts.tolist()
        found = {"oscireset_windows": windows}
        if watched:
            found |= {"oscireset_flagged": flagged / watched, "oscireset_codes_changed": changed / watched,
                      "oscireset_flips_per_flagged": flips / flagged if flagged else 0.0}
        return found

    def state(self) -> Mapping[str, tuple[Tensor, Spec]]:
        """Members by name, dense: `watched` marks what a share of them tracks."""
        found: dict[str, tuple[Tensor, Spec]] = {"counts": (self.counts, Spec())}
        for member in self.weights.members.values():
            if member.leaf in self.windows:
                window = self.windows[member.leaf]
                for field in FIELDS:
                    tensor = self._dense(member.leaf, window, field)
                    found[f"{member.name}.{field}"] = (tensor.narrow(0, member.start, member.rows).contiguous(), member.spec)
        return found

    def _dense(self, leaf: str, window: Window, field: str) -> Tensor:
        shape = self.weights.leaves[leaf].shape
        if field == "watched":
            tensor = torch.ones(window.weight.shape, dtype=torch.uint8, device=window.weight.device)
        else:
            tensor = getattr(window, field)
        if window.index is None:
            return tensor.view(shape)
        whole = torch.zeros(shape.numel(), dtype=tensor.dtype, device=tensor.device)
        whole[window.index] = tensor
        return whole.view(shape)

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.windows = {}
        if "counts" in state:
            self.counts.copy_(state["counts"])
        members = [m for m in self.weights.members.values() if m.leaf in self.leaves]
        if any(f"{m.name}.{field}" not in state for m in members for field in FIELDS):
            return
        for leaf in self.leaves:
            mine = [m for m in members if m.leaf == leaf]
            whole = {field: torch.cat([state[f"{m.name}.{field}"] for m in mine]).to(self.counts.device) for field in FIELDS}
            watched = whole.pop("watched").reshape(-1).bool()
            window = Window(whole["weight"], whole["value"], whole["code"], None if watched.all() else watched.nonzero()[:, 0])
            for field in ("first", "moved", "jumped", "flips"):
                setattr(window, field, window.pick(whole[field]).clone())
            self.windows[leaf] = window
