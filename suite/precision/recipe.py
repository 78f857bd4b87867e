"""A recipe: which operand of which product is quantised how. TetraJet, NVIDIA's recipe and MXFP4 are rows of one table.

    Q   operand   of product                   lies as          along which blocks lie (contraction)
    1   X         forward  Y  = X Wᵀ           [T, d_in]        d_in
    2   W         forward                      [d_out, d_in]    d_in
    3   dY        dX = dY W                    [T, d_out]       d_out
    4   Wᵀ        dX                           [d_in, d_out]    d_out
    5   dYᵀ       dW = dYᵀ X                   [d_out, T]       T
    6   Xᵀ        dW                           [d_in, T]        T

`aligned` says what Q4 and Q6 are given: what the forward used, dequantised (gradients are then those of the quantised
forward), or the tensors before Q1 and Q2. Two operands that are rotated share their signs, so that the rotation cancels.
"""
from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from suite.precision.draws import Draws
from suite.precision.level import real, refuse
from suite.precision.linear import Linear, group_max
from suite.precision.operand import QUANTISERS, Operand, quantise
from suite.precision.probe import Probe
from suite.seams import Product, Site

ALIGNED = ("both", "weight", "none")
_recipes: WeakValueDictionary[int, Recipe] = WeakValueDictionary()


@dataclass(frozen=True)
class Six:
    """The operands by number; one whose format is `none` goes into its product as it is."""

    q1: Operand
    q2: Operand
    q3: Operand
    q4: Operand
    q5: Operand
    q6: Operand

    def __getitem__(self, number: int) -> Operand:
        return getattr(self, f"q{number}")


class Recipe:
    """A precision whose products are quantised. `id` names it inside compiled graphs; see Wire for how ids are given.

    tail: so many layers at the end stay in `compute`. shared: both operands of a backward product draw the same noise, as the
    authors' release does; else each draws its own. fixed: the rotation's signs never change, else they do with every product.
    quantiser: by what operands are made on a GPU (suite/precision/operand.py); the numbers are the same.
    """

    stack = True

    def __init__(self, name: str, six: Six, *, level: str = "emulated", compute: str = "bfloat16", params: str = "float32",
                 residual: str = "bfloat16", aligned: str = "both", tail: int = 0, shared: bool = False, fixed: bool = False,
                 quantiser: str = "kernels"):
        if quantiser not in QUANTISERS:
            raise ValueError(f"precision {name}: quantiser {quantiser!r}: expected one of {', '.join(QUANTISERS)}")
        if aligned not in ALIGNED:
            raise ValueError(f"precision {name}: aligned {aligned!r}: expected one of {', '.join(ALIGNED)}")
        self.name, self.six, self.level, self.aligned = name, six, level, aligned
        self.compute, self.master = getattr(torch, compute), getattr(torch, params)
        self.residual = torch.float32 if self.compute == torch.float32 else getattr(torch, residual)
        self.tail, self.shared, self.fixed, self.quantiser = tail, shared, fixed, quantiser
        self.layers: int | None = None
        self.listeners: list[Any] = []  # input(call, x): sees the inputs of training forwards
        # operand(call, number, operand, x, given): sees what every quantiser gave, in step `at` or always
        self.watchers: list[Any] = []
        self.draws: Draws | None = None  # while a step is recorded
        self.id = next(i for i in range(len(_recipes) + 1) if i not in _recipes)
        _recipes[self.id] = self

    recordable = True  # what it draws, replays read from `draws`

    def drawn(self, device: torch.device) -> Draws:
        """What a recorded step reads its draws from."""
        return Draws(self, device)

    def phase(self, step: int) -> Hashable:
        """See suite.trainer: what those who look at the operands make of the passes of a step; None where they must run."""
        found = tuple(one.phase(step) for one in (*self.listeners, *self.watchers))
        return None if None in found else found

    def matmul(self, x: Tensor, w: Tensor, site: Site, noise: Tensor, product: Product, p: Mapping[str, Tensor]) -> Tensor:
        """x [T, d_in], w [d_out, d_in] -> [T, d_out]. `p` may hold the product's channels as OutControl left them:
        NAME.retained [k] and NAME.rest [d_in - k], both empty before they are chosen."""
        channels = [p.get(f"{product.name}.{kind}") for kind in ("retained", "rest")]
        maps = [number for one in product.maps for number in one]
        return Linear.apply(x, w, noise, *channels, site[0], product.name, maps, list(product.columns), product.wire.id, self.id,
                            self.originals, torch.is_grad_enabled())

    @property
    def originals(self) -> tuple[bool, bool]:
        """Whether backward needs X, W themselves instead of what the forward used."""
        return self.aligned != "both", self.aligned == "none"

    @property
    def kept(self) -> torch.dtype:
        """What a dequantised operand is kept in: exact where the level's products are."""
        return self.compute if self.level == "emulated" else torch.float32

    def timing(self, device: torch.device) -> str:
        """The kind of a step's time: `emulated` unless the products ran in the numbers they stand for."""
        return "measured" if real(self.level, self.six.q1.format, device) else "emulated"

    def plain(self, layer: int) -> bool:
        """Whether a layer's products are left alone."""
        return bool(self.tail) and self.layers is not None and layer >= self.layers - self.tail

    def matrices(self, weights: Any) -> dict[str, Any]:
        """The leaves that products of this recipe multiply by, each with one of its members."""
        found = {}
        for member in weights.members.values():
            path = member.leaf.split(".")
            if path[0] == "layers" and len(member.shape) == 2 and not self.plain(int(path[1])):
                found.setdefault(member.leaf, member)
        return found

    def weight(self, w: Tensor, channels: Any | None, tp: Any) -> tuple[Tensor, Tensor, Tensor]:
        """What the forward makes of a weight [d_out, d_in]: (value, code doubled, scale), all float32, 0, 0, 1 in the inputs that
        OutControl retains. A per-tensor scale is a message: every rank of the group calls it."""
        mine = w if channels is None else w[:, channels.rest]
        given = quantise(mine, self.six.q2, torch.float32, most=lambda amax: group_max(tp, amax))
        found = given.values, 2 * given.codes, given.scales
        if channels is None:
            return found
        whole = [torch.full(w.shape, fill, device=w.device) for fill in (0.0, 0.0, 1.0)]
        for tensor, part in zip(whole, found):
            tensor[:, channels.rest] = part
        return tuple(whole)

    def parts(self, weights: Any, layout: Any) -> list[Any]:
        """What the recipe keeps beside weights. Raises CaseFailed where the device cannot run the level."""
        refuse(self.name, self.level, next(iter(weights.leaves.values())).device)
        self.layers = layout.card["layers"]
        return [Probe(self, layout.tp)]


def recipe_of(number: int) -> Recipe:
    """The recipe of an id. Raises ValueError where it is gone."""
    recipe = _recipes.get(number)
    if recipe is None:
        raise ValueError(f"precision {number} is gone: keep it as long as the model that multiplies by it")
    return recipe
