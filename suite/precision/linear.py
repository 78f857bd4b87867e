"""One quantised product with its two gradients: the three products and six quantisers of a recipe (suite/precision/recipe.py).

    forward   Y  = Q1(X) · Q2(W)ᵀ                                   saved: what Q1 and Q2 gave (or X, W: `aligned`)
    dX        dX = Q3(dY) · Q4(Q2(W)ᵀ)ᵀ                             contraction over d_out
    dW        dW = Q5(dYᵀ) · Q6(Q1(X)ᵀ)ᵀ                            contraction over the micro-batch's tokens

With OutControl's channels (suite/precision/outcontrol.py) the inputs lie as [retained | rest]: M is MXFP8, to nearest,

    forward   Y  = [M(X_r) | Q1(X_f)] · [M(W_r) | Q2(W_f)]ᵀ         one sum in float32, one rounding
    dX        as above, of both parts: all of it FP4
    dW        dW_f as above        dW_r = M(dYᵀ) · M(M(X_r)ᵀ)ᵀ      neither rotated nor stochastic

Noise is keyed by (seed, step, micro-batch, replica, layer, product, operand), the counter is the element's place in the
unsharded tensor. A compiled graph sees two opaque operations, so nothing of a recipe is compiled.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kernels import DTYPES
from kernels.nvfp4_reference import Keyed
from suite.comm.wire import Wire, wire_of
from suite.opaque import opaque
from suite.precision.draws import Draw
from suite.precision.level import product
from suite.precision.operand import MXFP8, Given, Operand, Place, quantise
from suite.seams import Site

if TYPE_CHECKING:
    from suite.precision.recipe import Recipe

STACK = 1 << 24  # rows of the unsharded tensor that one of the maps sharing a product may have


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, noise, retained, rest, layer, name, maps, columns, wire, recipe, originals, training):
        call = (layer, name, maps, columns, wire, recipe)
        y, xq, wq = _operation("forward", x, w, noise, retained, rest, *call, training)
        ctx.save_for_backward(x if originals[0] else xq, w if originals[1] else wq, noise, retained, rest)
        ctx.call, ctx.dtype = call, w.dtype
        return y

    @staticmethod
    def backward(ctx, dy):
        dx, dw = _operation("backward", dy, *ctx.saved_tensors, *ctx.call)
        return dx, dw.to(ctx.dtype), *[None] * 11


@dataclass(frozen=True)
class Call:
    """One run of a product: where it lies, and the noise of its micro-batch (int64 [4]: seed, step, micro-batch, replica)."""

    recipe: Recipe
    wire: Wire
    noise: Tensor
    layer: int
    name: str
    maps: Sequence[int]
    columns: Sequence[int]

    @cached_property
    def drawn(self) -> list[int]:
        """seed, step, micro-batch, replica; on a GPU from the wire, which knows them without waiting for the device."""
        key = self.wire.key
        return [key.seed, key.step, key.micro, key.dp] if self.noise.is_cuda else self.noise.tolist()

    def keys(self, number: int | None, way: str | None) -> tuple[Keyed, Keyed]:
        """(of an operand's noise, of the signs of a rotation), None of what is not drawn; where a step is recorded, the row of
        the device that holds both, for either."""
        if number is None and way is None:
            return None, None
        found = Draw(self.layer, self.name, number, way, self.recipe.fixed)
        if self.recipe.draws is None:
            return found.keys(self.drawn)
        row = self.recipe.draws.row(self.wire.key.micro, found)
        return (None if number is None else row), (None if way is None else row)

    def outputs(self) -> list[tuple[int, int, int]]:
        """Rows of the weight: (first here, how many, first in the unsharded tensor)."""
        thirds = list(zip(self.maps[::3], self.maps[1::3], self.maps[2::3]))
        return [(first, rows, n * STACK + start) for n, (first, rows, start) in enumerate(thirds)]

    def inputs(self, count: int, first: int = 0) -> list[tuple[int, int, int]]:
        return [(0, count, self.columns[0] + first)]

    def tokens(self, count: int) -> list[tuple[int, int, int]]:
        return [(0, count, 0)]

    def most(self, amax: Tensor) -> Tensor:
        return group_max(self.wire, amax, (self.layer, self.name))

    def product(self, a: Given, b: Given, dtype: torch.dtype, beside: tuple[Given, Given] | None = None) -> Tensor:
        return product(self.recipe.level, a, b, dtype, beside)

    def kept(self, *pair: Given) -> list[Tensor]:
        """What of X and W is saved dequantised; nothing where the originals are."""
        return [self.noise.new_empty(one.rows, 0, dtype=self.recipe.kept) if original else one.dense()
                for one, original in zip(pair, self.recipe.originals)]

    def give(self, number: int, x: Tensor, rows: Sequence, columns: Sequence, operand: Operand | None = None,
             out: Tensor | None = None) -> Given:
        """Operand `number` of the recipe: x [r, k] quantised along k."""
        operand = operand or self.recipe.six[number]
        which = {4: 3, 6: 5}.get(number, number) if self.recipe.shared else number
        key, way = self.keys(which if operand.rounding == "stochastic" else None,
                             ("dx" if number in (3, 4) else "dw") if operand.hadamard else None)
        watchers = [one for one in self.recipe.watchers if getattr(one, "at", None) in (None, self.wire.key.step)]
        given = quantise(x, operand, self.recipe.kept, key=key, signs=way, place=Place(rows, columns), most=self.most,
                         whole=bool(watchers), by=self.recipe.quantiser, packed=self.recipe.level == "native", out=out)
        for watcher in watchers:
            watcher.operand(self, number, operand, x, given)
        return given

    def apart(self, number: int, x: Tensor, rows: Sequence, retained: Tensor, rest: Tensor) -> tuple[Given, Given, Given]:
        """Operand `number` of x's retained channels and of the others, and both as one, [retained | rest], where they are
        dequantised."""
        k, n = len(retained), len(rest)
        whole = x.new_empty(len(x), k + n, dtype=self.recipe.kept) if self.recipe.level == "emulated" else None
        left, right = (None, None) if whole is None else whole.split([k, n], 1)
        a = self.give(number, taken(x, retained), rows, self.inputs(k), MXFP8, left)
        b = self.give(number, taken(x, rest), rows, self.inputs(n, k), out=right)
        return a, b, b if whole is None else Given(whole)


def taken(x: Tensor, order: Tensor) -> Tensor:
    """x[:, order]"""
    if not x.is_cuda or x.dtype not in DTYPES or x.stride(1) != 1:
        return x[:, order]
    from kernels import columns

    return columns.taken(x, order)


def group_max(wire: Any, amax: Tensor, site: Site = (-1, "weight")) -> Tensor:
    """A scalar's largest value over the group: a message, where there are several ranks."""
    if wire.size == 1:
        return amax
    return wire.run("max", amax.reshape(1), site=site, way="step", purpose="amax")[0].reshape(())


def _forward(x: Tensor, w: Tensor, noise: Tensor, retained: Tensor | None, rest: Tensor | None, layer: int, name: str,
             maps: Sequence[int], columns: Sequence[int], wire: int, recipe: int, training: bool) -> tuple[Tensor, Tensor, Tensor]:
    call = _call(recipe, wire, noise, layer, name, maps, columns)
    if call.recipe.plain(layer) or not x.numel():
        given = [Given(one.to(call.recipe.kept, copy=True)) for one in (x, w)]
        return x @ w.to(x.dtype).t(), *call.kept(*given)
    for listener in call.recipe.listeners if training else ():
        listener.input(call, x)
    t, d_in = x.shape
    if not _chosen(retained):
        a = call.give(1, x, call.tokens(t), call.inputs(d_in))
        b = call.give(2, w, call.outputs(), call.inputs(d_in))
        return call.product(a, b, x.dtype), *call.kept(a, b)
    a8, a, one = call.apart(1, x, call.tokens(t), retained, rest)
    b8, b, other = call.apart(2, w, call.outputs(), retained, rest)
    y = call.product(one, other, x.dtype, beside=(a8, b8))
    if call.recipe.level == "emulated":
        return y, *call.kept(one, other)
    return y, *(torch.cat(pair, 1) for pair in zip(call.kept(a8, b8), call.kept(a, b)))


def _backward(dy: Tensor, x: Tensor, w: Tensor, noise: Tensor, retained: Tensor | None, rest: Tensor | None, layer: int,
              name: str, maps: Sequence[int], columns: Sequence[int], wire: int, recipe: int) -> tuple[Tensor, Tensor]:
    call = _call(recipe, wire, noise, layer, name, maps, columns)
    if call.recipe.plain(layer) or not dy.numel():
        return dy @ w.to(dy.dtype), dy.t() @ x.to(dy.dtype)
    (t, d_in), k = x.shape, len(retained) if _chosen(retained) else 0
    if k:
        order = torch.cat([retained, rest])
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        w = w if call.recipe.originals[1] else taken(w, place)  # dX lies as X did: that is a pass over W, not over dX
        x = taken(x, order) if call.recipe.originals[0] else x
    a = call.give(3, dy, call.tokens(t), call.outputs())
    b = call.give(4, w.t(), call.inputs(d_in), call.outputs())
    dx = call.product(a, b, dy.dtype)
    a = call.give(5, dy.t(), call.outputs(), call.tokens(t))
    b = call.give(6, x[:, k:].t(), call.inputs(d_in - k, k), call.tokens(t))
    dw = call.product(a, b, dy.dtype)
    if not k:
        return dx, dw
    a = call.give(5, dy.t(), call.outputs(), call.tokens(t), MXFP8)
    b = call.give(6, x[:, :k].t(), call.inputs(k), call.tokens(t), MXFP8)
    return dx, taken(torch.cat([call.product(a, b, dy.dtype), dw], 1), place)


def _call(recipe: int, wire: int, noise: Tensor, layer: int, name: str, maps: Sequence[int], columns: Sequence[int]) -> Call:
    from suite.precision.recipe import recipe_of

    return Call(recipe_of(recipe), wire_of(wire), noise, int(layer), name, maps, columns)


def _chosen(retained: Tensor | None) -> bool:
    return retained is not None and len(retained) > 0


def _operation(which: str, *arguments):
    """The opaque operation where a graph is being traced; else the same function without the dispatcher's detour."""
    if torch.compiler.is_compiling():
        return _opaque[which](*arguments)
    return {"forward": _forward, "backward": _backward}[which](*arguments)


SITE = "SymInt layer, str name, SymInt[] maps, SymInt[] columns, SymInt wire, SymInt recipe"
CHANNELS = "Tensor noise, Tensor? retained, Tensor? rest"


def _forward_shapes(x, w, noise, retained, rest, layer, name, maps, columns, wire, recipe, training):
    from suite.precision.recipe import recipe_of

    known = recipe_of(int(recipe))
    kept = [t.new_empty(len(t), 0 if original else t.shape[1], dtype=known.kept) for t, original in zip((x, w), known.originals)]
    return x.new_empty(len(x), len(w)), *kept


def _backward_shapes(dy, x, w, noise, retained, rest, layer, name, maps, columns, wire, recipe):
    return dy.new_empty(len(dy), x.shape[1]), dy.new_empty(dy.shape[1], x.shape[1])


_opaque = {
    "forward": opaque("quantised_forward", f"(Tensor x, Tensor w, {CHANNELS}, {SITE}, bool training) -> (Tensor, Tensor, Tensor)",
                      _forward, _forward_shapes),
    "backward": opaque("quantised_backward", f"(Tensor dy, Tensor x, Tensor w, {CHANNELS}, {SITE}) -> (Tensor, Tensor)",
                       _backward, _backward_shapes),
}
