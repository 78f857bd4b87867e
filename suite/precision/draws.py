"""What is drawn for an operand, by name; and, of a recorded step, the place on the device from which replays read it.

    key = fold(seed, step, micro-batch, replica, layer, product, operand)          of an operand's noise
    key = fold(seed, step, micro-batch, replica, layer, product, "signs dx")       of a rotation's signs, or "signs dw"

A step's keys are numbers of the host. A graph that held them would round every step alike: a recorded step holds the addresses of
rows of a table instead (kernels.nvfp4_reference.drawn), which is written anew before each replay. So replayed steps draw what the
steps would have drawn. The steps that run before one is recorded read rows too: what compiles for these compiles then.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.nvfp4_reference import drawn
from kernels.philox import fold
from suite.record import CaseFailed
from suite.seams import Key

ROWS = 1 << 15  # of a recorded step: half a MiB


class Draw(NamedTuple):
    """Of one operand: number, None where it is not rounded by chance; way: dx or dw, None where it is not rotated; fixed: the
    signs are the same for all."""

    layer: int
    name: str
    number: int | None
    way: str | None
    fixed: bool

    def keys(self, step: Sequence[int]) -> tuple[int | None, int | None]:
        """(of the noise, of the signs). step: seed, step, micro-batch, replica."""
        noise = None if self.number is None else fold(*step, self.layer, self.name, self.number)
        if self.way is None:
            return noise, None
        return noise, fold("signs") if self.fixed else fold(*step, self.layer, self.name, f"signs {self.way}")


class Draws:
    """Of a recorded step: every draw of its passes has a row, the same one where it comes again (activation recompute)."""

    def __init__(self, recipe: Any, device: torch.device) -> None:
        self.recipe, self.rows, self.keys = recipe, dict[tuple[int, Draw], int](), None
        self.table = torch.zeros(ROWS, 4, dtype=torch.int32, device=device)

    @contextmanager
    def read(self, keys: Sequence[Key] | None = None) -> Iterator[None]:
        """Meanwhile the recipe's operands are keyed by rows. keys: of each micro-batch of a step that runs now, whose draws are
        written as they come; without them it is recorded."""
        self.recipe.draws, self.keys = self, keys
        try:
            yield
        finally:
            self.recipe.draws = self.keys = None

    def row(self, micro: int, draw: Draw) -> Tensor:
        """int32 [4]. Raises CaseFailed where there are no more."""
        at = self.rows.setdefault((micro, draw), len(self.rows))
        if at >= ROWS:
            raise CaseFailed(f"graph: {self.recipe.name}: a step draws more than {ROWS} times")
        if self.keys is not None:
            self._write(at, [draw.keys(_numbers(self.keys[micro]))])
        return self.table[at]

    def fill(self, keys: Sequence[Key]) -> None:
        """Writes the draws of a step, given the key of each of its micro-batches."""
        steps = [_numbers(key) for key in keys]
        self._write(0, [draw.keys(steps[micro]) for micro, draw in self.rows])

    def _write(self, first: int, pairs: Sequence[tuple[int | None, int | None]]) -> None:
        found = drawn(pairs)
        # from pinned memory: a copy from pageable memory would wait for the device
        found = found.pin_memory() if self.table.is_cuda else found
        self.table[first:first + len(found)].copy_(found, non_blocking=True)


def _numbers(key: Key) -> tuple[int, int, int, int]:
    return key.seed, key.step, key.micro, key.dp
