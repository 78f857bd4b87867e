"""pairwise: Megatron's split applied to each factor pair by itself, what BOOST (arXiv 2512.12131) calls vanilla.

The residual stream is whole on every rank. A is column-parallel, so the split runs along the width r of the bottleneck; B is
row-parallel, so its partial sums meet at full width, one all-reduce a map. q, k and v are then whole on every rank, and core
attention of all heads runs on each of them, as in the authors' release (`pairwise-heads` shards it).

    n = norm(x)                              replicated             backward: all-reduce of dn [T, D]  (o: dz; down: [T, F])
    h = f(n A)                               [T, r/p] of this rank
    q, k, v = Σ h B                          partial sums           forward: all-reduce of each, [T, D] and twice [T, K/V]
    z = attention(q, k, v)                   all heads, p times
    x = x + Σ f(z A_o) B_o + b_o             the same again         forward: all-reduce of [T, D]

Elements a block (boost.md 2.4): forward T(3 D + 2 K/V + g F), backward 3 T D + T F with grouped A, each map's own with
`grouped: false`; g = 2 where the feed-forward layer is gated. The second factors are never one batch, whose sums would lie apart.
The ends are `megatron`'s.

    a [r, d_in] rows        b [d_out, r] columns        norms, biases, positions replicated, with equal gradients
    dense K and V (`kv: dense`): replicated, computed on every rank from n, for no rank has a part of what meets

r must divide by p, which only this way of splitting asks for.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from suite.comm.meet import meet
from suite.comm.wire import Wire
from suite.layout.lowrank import OUT, LowRankLayout
from suite.layout.megatron import norm_of
from suite.layout.overlap import entered
from suite.norms import rms_norm
from suite.seams import Op, Precision, Spec


class Pairwise(LowRankLayout):
    heads_ops: tuple[Op, Op] = ("all_reduce", "none")  # of q, k, v
    core_ops: tuple[Op, Op] = ("none", "all_reduce")  # between the core and o
    stacks_dense = False
    whole_heads = True  # every rank runs the core of all heads

    def refuse(self, tokens: int) -> str | None:
        if self.factored("attention", "o") and self.factor.width % self.tp.size:
            return f"{self.tp.size} ranks do not divide the width {self.factor.width} of the factors"
        return super().refuse(tokens)

    def spec(self, param: str, shape: Sequence[int]) -> Spec:
        *_, name, kind = param.split(".")
        if name in ("embed", "head") or kind == "a":
            return Spec(dim=0)
        return Spec(dim=1) if kind == "b" else Spec()

    def attention(self, p: Mapping[str, Tensor], layer: int, noise: Tensor, core: Callable) -> list:
        return self.chain(p, layer, noise, "attention", core, self.heads_ops)

    def feed_forward(self, p: Mapping[str, Tensor], layer: int, noise: Tensor, core: Callable) -> list:
        return self.chain(p, layer, noise, "ffn", core, self.leave_ops)

    def chain(self, p: dict[str, Tensor], layer: int, noise: Tensor, sub: str, core: Callable, ops: tuple[Op, Op]) -> list:
        found = []
        for names, how in ((self.into(sub), ops), ((OUT[sub],), self.leave_ops)):
            found += [Narrow(self, p, layer, noise, sub, names), _same, Widen(self, p, layer, noise, sub, names, how), core]
        return found[:-1]

    def ups(self, sub: str) -> list[tuple[str, ...]]:
        """Each map's sums are a message of their own: a product of its own leaves them in one piece, with nothing to copy."""
        return [(name,) for name in self.into(sub) if self.factored(sub, name)]

    def pieces(self, sub: str, names: Sequence[str]) -> list[tuple[str, ...]]:
        return [tuple(names)] if tuple(names) == (OUT[sub],) else self.downs(sub)

    def ops_of(self, name: str, ops: tuple[Op, Op]) -> tuple[Op, Op]:
        """How the sums of a map meet."""
        return ops

    def heads_here(self, name: str, y: Tensor) -> Tensor:
        """Of what met, this rank's."""
        return y

    def executed_flops(self, tokens: int, seq: int, vocab: int) -> int:
        """As `Megatron.executed_flops`. Core attention runs p times, as do dense K and V; recomputing a segment runs the first
        factors and the core again, not the products that end it."""
        p = self.tp.size if self.whole_heads else 1
        narrow = widen = dense = 0
        for sub, linear in self.linear.items():
            for name, (d_in, d_out, _) in linear.items():
                if self.factored(sub, name):
                    narrow += 2 * tokens * self.factor.width * d_in
                    widen += 2 * tokens * self.factor.width * d_out
                else:
                    dense += 2 * tokens * d_in * d_out * (p if self.whole_heads else self.tp.size // self.kv_parts)
        core = 2 * tokens * seq * self.card["hidden"] * p
        once = narrow + widen + dense + core
        again = {"none": 0, "segment": narrow + core, "layer": once}[self.recompute]
        return self.card["layers"] * (3 * once + again) + 6 * tokens * vocab * self.card["hidden"]


def _same(*ys: Tensor) -> tuple[Tensor, ...]:
    return ys


class Narrow:
    """norm (where it comes first) -> meet -> the first factors -> f."""

    def __init__(self, layout: Pairwise, p: Mapping[str, Tensor], layer: int, noise: Tensor, sub: str, names: Sequence[str]):
        self.layout, self.p, self.layer, self.noise, self.sub, self.names = layout, p, layer, noise, sub, tuple(names)
        self.out = self.names == (OUT[sub],)
        self.dense = any(not layout.factored(sub, name) for name in self.names)
        self.site = layer, f"{sub}.{'+'.join(self.names)}.a"
        self.ops = layout.core_ops if self.out and sub == "attention" else layout.enter_ops
        # the input's gradient is summed behind the products that make the weights' (suite/layout/overlap.py)
        self.hidden = layout.overlap and self.ops == ("none", "all_reduce") and not self.dense

    def before(self, x: Tensor):
        if not self.out and self.layout.card["place"] == "pre":
            x = norm_of(self.layout.card, self.p, f"{self.sub}.norm", x)
        x = x.to(self.layout.precision.compute)
        return (x, x) if self.dense else (x,), None

    def meet(self, ys, exact):
        layout, ends = self.layout, len(self.layout.pieces(self.sub, self.names))
        if self.hidden:
            return ys * ends, exact
        (forward, backward), site = self.ops, self.site
        # ungrouped, each first factor's part of the input's gradient is a message of its own
        met = [meet(layout.tp, ys[0], forward=forward, backward=backward, dim=-1, site=site)[0] for _ in range(ends)]
        return (*met, *ys[1:]), exact

    def after(self, ys, exact):
        layout, found = self.layout, []
        pieces = layout.pieces(self.sub, self.names)
        for x, piece in zip(ys, pieces):
            if self.hidden:
                leaf = self.p[layout.place(self.sub, piece, "a")[0]]
                y = entered(x, leaf.to(layout.precision.compute), 1, layout.tp, self.site)
            else:
                y = layout.down(x, self.p, self.layer, self.noise, self.sub, piece)
            found.append(layout.latent(y, self.p, self.sub, piece))
        rest = ys[len(pieces):]
        return [*found, *rest] if layout.whole_heads or not self.dense else [*found, ys[0]]


class Widen:
    """the second factors (partial sums), dense maps -> meet, one message a map -> bias, norm (where it comes last)."""

    def __init__(self, layout: Pairwise, p: Mapping[str, Tensor], layer: int, noise: Tensor, sub: str, names: Sequence[str],
                 ops: tuple[Op, Op]):
        self.layout, self.p, self.layer, self.noise, self.sub, self.names, self.ops = layout, p, layer, noise, sub, names, ops

    def before(self, *hs: Tensor):
        layout, found = self.layout, {}
        for h, piece in zip(hs, layout.pieces(self.sub, self.names)):
            found.update(zip(piece, layout.maps_of(h, self.p, self.layer, self.noise, self.sub, piece)))
        for name in self.names:
            if name not in found:
                found[name] = layout.down(hs[-1], self.p, self.layer, self.noise, self.sub, (name,))
        return tuple(found[name] for name in self.names), None

    def meet(self, ys, exact):
        met = []
        for name, y in zip(self.names, ys):
            if self.layout.factored(self.sub, name):
                site = self.layer, f"{self.sub}.{name}.b"
                forward, backward = self.layout.ops_of(name, self.ops)
                y, _ = meet(self.layout.tp, y, forward=forward, backward=backward, dim=-1, site=site)
                y = self.layout.heads_here(name, y)
            met.append(y)
        return met, exact

    def after(self, ys, exact):
        layout, card = self.layout, self.layout.card
        ys = [layout.biased(y, self.p, self.sub, name) for name, y in zip(self.names, ys)]
        if self.sub == "attention" and len(ys) > 1 and card["qk_norm"]:
            q, k, v = ys
            return [rms_norm(q, self.p["attention.q_norm.weight"], card["eps"]),
                    rms_norm(k, self.p["attention.k_norm.weight"], card["eps"]), v]
        if self.names == (OUT[self.sub],) and card["place"] == "post":
            ys = [norm_of(card, self.p, f"{self.sub}.norm", ys[0])]
        return ys


def build(recompute: str = "none", grouped: bool = True, overlap: bool = False, *, card: Mapping[str, Any], factor: Any,
          precision: Precision, tp: Wire) -> Pairwise:
    return Pairwise(card=card, factor=factor, precision=precision, tp=tp, recompute=recompute, overlap=overlap, grouped=grouped)
