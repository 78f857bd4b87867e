"""How good the operands of a run were: error, bias and clipping of each of the six, and what was not finite.

In the last step of a loss run, over all layers, maps and micro-batches of this rank, x an operand as its quantiser got it
(rotated, where it is rotated) and x̂ what came out:

    q<n>_snr        10 log10(Σ x² / Σ (x̂ - x)²)                   dB
    q<n>_bias       Σ x·x̂ / Σ x² - 1                              0 where rounding is unbiased, about -0.0026 where E4M3 scales clip
    q<n>_clipped    share of elements beyond the largest code      of FP4 operands
    q<n>_nonfinite  NaN and Inf among what came out

A timed run is not looked at.
"""
from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from suite.seams import Spec

SUMS = ("square", "error", "dot", "clipped", "count", "nonfinite")


class Probe:
    def __init__(self, recipe: Any, tp: Any):
        self.name = f"probe-{recipe.name}"
        self.recipe, self.tp, self.at = recipe, tp, None
        self.sums: dict[int, Tensor] = {}
        self.units = {f"q{n}_snr": "dB" for n in range(1, 7)}

    def begin(self, case: Any, dp: Any) -> None:
        if case.measure == "loss":
            self.at = case.steps - 1
            self.recipe.watchers.append(self)

    def phase(self, step: int) -> int | None:
        """See Recipe.phase: it looks at one step."""
        return None if step == self.at else 0

    def operand(self, call: Any, number: int, operand: Any, x: Tensor, given: Any) -> None:
        if operand != self.recipe.six[number]:
            return
        sums = self.sums.setdefault(number, torch.zeros(len(SUMS), dtype=torch.float64, device=x.device))
        y = given.dense().to(torch.float32)
        x = x.to(torch.float32) if given.before is None else given.before.to(torch.float32)
        finite = torch.isfinite(y)
        x, y = torch.where(finite, x, 0.0), torch.where(finite, y, 0.0)
        found = (x.square().sum(), (y - x).square().sum(), (x * y).sum(), given.clipped().sum(), torch.tensor(x.numel()),
                 (~finite).sum())
        sums += torch.stack([one.to(sums) for one in found])

    def after_step(self, step: int, weights: Any) -> None:
        if step == self.at:
            self.at = -1  # what follows is validation

    def buffers(self) -> Mapping[str, Tensor]:
        return {}

    def metrics(self) -> Mapping[str, float]:
        found: dict[str, float] = {}
        for number, sums in sorted(self.sums.items()):
            square, error, dot, clipped, count, nonfinite = sums.tolist()
            found[f"q{number}_nonfinite"] = nonfinite
            if square and count:
                found |= {f"q{number}_bias": dot / square - 1, f"q{number}_clipped": clipped / count}
                if error:
                    found[f"q{number}_snr"] = 10 * math.log10(square / error)
        return found

    def state(self) -> Mapping[str, tuple[Tensor, Spec]]:
        return {}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Has nothing to resume."""
