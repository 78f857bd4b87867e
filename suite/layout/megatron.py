"""megatron: tensor parallelism of Megatron-LM (Shoeybi et al., 2019), the baseline of the layout axis.

The residual stream [T, D] is whole on every rank; a sublayer enters by column-parallel maps and leaves by a row-parallel one:

    n = norm(x)             replicated               forward: nothing       backward: all-reduce of dn   [T, D]
    q, k, v = n Wᵀ          heads of this rank
    z = attention(q, k, v)
    y = z W_oᵀ              partial sums             forward: all-reduce of y [T, D]    backward: nothing
    x = x + y + b_o

Elements on the wire for L layers and T tokens (DESIGN 7a): forward T·D (embedding) + 2L·T·D, backward 2L·T·D + T·D (head);
cross-entropy T (max) + 2T (sums) in float32. OLMo-2's RMSNorm over all heads of Q and K adds float32 [T, 2] a layer and way.

    tensor                              shard
    embedding, head [V, D]              rows: the vocabulary
    q, k, v, gate, up [out, in]         rows: heads, feed-forward; K/V heads fewer than ranks are held by neighbours alike
    o, down [out, in]                   columns
    norms, positions, biases of o, down replicated, with equal gradients

Q, K, V share one product, gate and up another. `recompute: segment` keeps what ranks exchanged and recomputes what lies
between two meets, which holds no forward collective. `overlap: true`: the all-reduce of dn is under way while the gradient of the
product's weight is computed, as Megatron-LM has it (suite/layout/overlap.py).
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from suite.comm.meet import meet
from suite.comm.wire import Wire
from suite.layout.overlap import entered
from suite.loss import linear_cross_entropy
from suite.model import maps
from suite.norms import layer_norm, rms_norm, wide
from suite.seams import Op, Precision, Product, Site, Spec


def norm_of(card: Mapping[str, Any], p: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    """The model's norm over the last dimension, which is whole here."""
    if card["norm"] == "rmsnorm":
        return rms_norm(x, p[f"{name}.weight"], card["eps"])
    return layer_norm(x, p[f"{name}.weight"], p[f"{name}.bias"], card["eps"])


class Megatron:
    enter_ops: tuple[Op, Op] = ("none", "all_reduce")
    leave_ops: tuple[Op, Op] = ("all_reduce", "none")
    recompute_ends = False  # norms and biases alone lie there
    partial = False  # gradients of replicated tensors are whole on every rank

    def __init__(self, *, card: Mapping[str, Any], factor: Any, precision: Precision, tp: Wire, recompute: str = "none",
                 overlap: bool = False):
        self.card, self.factor, self.precision, self.tp, self.recompute = card, factor, precision, tp, recompute
        self.overlap = overlap and hasattr(precision, "batch") and tp.size > 1
        self.head_size = card["hidden"] // card["heads"]
        self.kv_parts = min(card["kv_heads"], tp.size)
        local = {"q": card["heads"] // tp.size, "k": card["kv_heads"] // self.kv_parts, "v": card["kv_heads"] // self.kv_parts}
        self.widths = {name: heads * self.head_size for name, heads in local.items()}
        self.products: dict[str, Product] = {}

    def refuse(self, tokens: int) -> str | None:
        """Why `tokens` of a micro-batch cannot be trained, None where they can."""
        factored = [name for sub, linear in maps(self.card).items() for name in linear if self.factored(sub, name)]
        if factored and self.tp.size > 1:
            return f"maps written as two factors ({', '.join(factored)}) are not split over {self.tp.size} ranks here"
        if factored and self.recompute == "segment" and self.factor.crosses:
            return "recompute: segment keeps no latent that crosses to the next layer"
        if self.partial and tokens % self.tp.size:
            return f"{tokens} tokens of a micro-batch do not divide over {self.tp.size} ranks"
        return None

    def factored(self, sub: str, name: str) -> bool:
        return self.factor.factored((0, f"{sub}.{name}"))

    # where tensors lie

    def spec(self, param: str, shape: Sequence[int]) -> Spec:
        *_, name, kind = param.split(".")
        if name in ("embed", "head", "q", "gate", "up", "q_norm"):
            return Spec(dim=0)
        if name in ("k", "v", "k_norm"):
            return Spec(dim=0, parts=self.kv_parts)
        if name in ("o", "down") and kind != "bias":
            return Spec(dim=1)
        return Spec(partial=self.partial)

    def groups(self, names: Sequence[str]) -> dict[str, list[str]]:
        """Leaves that hold several members: `...attention.q+k+v.weight`, `...ffn.gate+up.weight`. A precision whose numbers
        depend on what shares a product says `stack = False`."""
        found: dict[str, list[str]] = {}
        self._places()
        if not getattr(self.precision, "stack", True) or any(name.endswith(".a") for name in names):
            return found
        for name in names:
            *path, linear, kind = name.split(".")
            for together in (("q", "k", "v"), ("gate", "up")):
                if linear in together and (linear != "up" or self.card["gated"]):
                    found.setdefault(".".join([*path, "+".join(together), kind]), []).append(name)
        return found

    # where ranks meet

    def attention(self, p: Mapping[str, Tensor], layer: int, noise: Tensor, core: Callable) -> list:
        """The attention sublayer's chain; a norm over all heads is one more meet, of statistics alone."""
        into, out = self.enter(p, layer, noise, "attention", ("q", "k", "v")), self.leave(p, layer, noise, "attention", "o")
        if not self.card["qk_norm"]:
            return [into, core, out]
        return [into, lambda *qkv: qkv, HeadsNorm(self, p, layer), core, out]

    def feed_forward(self, p: Mapping[str, Tensor], layer: int, noise: Tensor, core: Callable) -> list:
        """The feed-forward sublayer's chain."""
        into = ("gate", "up") if self.card["gated"] else ("up",)
        return [self.enter(p, layer, noise, "ffn", into), core, self.leave(p, layer, noise, "ffn", "down")]

    def _places(self) -> None:
        """Finds all products before a block is compiled, which may change nothing outside itself."""
        for sub, linear in maps(self.card).items():
            for name in linear:
                self.product(sub, (name,))
        self.product("attention", ("q", "k", "v"))
        if self.card["gated"]:
            self.product("ffn", ("gate", "up"))

    def product(self, sub: str, names: Sequence[str]) -> Product:
        """Where the operands of a product lie; made once, for it is the same in every layer."""
        key = f"{sub}.{'+'.join(names)}"
        if key not in self.products:
            rows, linear, first = [], maps(self.card)[sub], 0
            for name in names:
                d_in, d_out, _ = linear[name]
                spec, shape = self.spec(f"{sub}.{name}.weight", (d_out, d_in)), (d_out, d_in)
                start, length = spec.span(shape, self.tp.index, self.tp.size) if spec.dim == 0 else (0, d_out)
                rows.append((first, length, start))
                columns = (spec.span(shape, self.tp.index, self.tp.size)[0] if spec.dim == 1 else 0, d_in)
                first += length
            self.products[key] = Product(key, tuple(rows), columns, self.tp)
        return self.products[key]

    def multiply(self, x: Tensor, p: Mapping[str, Tensor], layer: int, noise: Tensor, sub: str, names: Sequence[str]) -> Tensor:
        """x times the stacked maps, before any bias. A map of two factors runs as it is written, on the one rank there is."""
        if self.factored(sub, names[0]):
            at, width = f"{sub}.{names[0]}", self.factor.width
            a = Product(f"{at}.a", ((0, width, 0),), (0, x.shape[-1]), self.tp)
            y = self.precision.matmul(x, p[a.name], (layer, a.name), noise, a, p)
            h = self.factor.between(y, p.get(f"{at}.latent"))
            if self.factor.crosses:
                p[f"{at}.latent"] = y
            b = Product(f"{at}.b", ((0, len(p[f"{at}.b"]), 0),), (0, width), self.tp)
            return self.precision.matmul(h, p[b.name], (layer, b.name), noise, b, p)
        product = self.product(sub, names)
        return self.precision.matmul(x, p[f"{product.name}.weight"], (layer, product.name), noise, product, p)

    def enter(self, p: Mapping[str, Tensor], layer: int, noise: Tensor, sub: str, names: Sequence[str]) -> Enter:
        return Enter(self, p, layer, noise, sub, names)

    def leave(self, p: Mapping[str, Tensor], layer: int, noise: Tensor, sub: str, name: str) -> Leave:
        return Leave(self, p, layer, noise, sub, name)

    def norm_alone(self, p: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """One norm of a layer by itself, of the residual stream as it lies here: what suite.measure.block times."""
        return norm_of(self.card, p, "attention.norm", x)

    def embed(self, p: Mapping[str, Tensor], ids: Tensor) -> Tensor:
        """ids [B, S] -> residual stream. Each rank looks up its rows of the vocabulary; the sum over ranks is the embedding."""
        table = p["embed.weight"]
        local = ids.reshape(-1) - self.tp.index * len(table)
        if self.tp.size == 1:
            x = torch.nn.functional.embedding(local, table)
        else:
            mine = (local >= 0) & (local < len(table))
            x = torch.nn.functional.embedding(torch.where(mine, local, 0), table) * mine[:, None]
        x = x.to(self.precision.compute)
        x, _ = meet(self.tp, x, forward=self.leave_ops[0], backward=self.embed_backward, site=(-1, "embed"))
        x = x.to(self.precision.residual)
        if self.card["position"] == "learned":
            position = torch.arange(ids.shape[1], device=ids.device).repeat(ids.shape[0])
            x = x + torch.nn.functional.embedding(self.tokens_here(position), p["positions.weight"]).to(x.dtype)
        return x

    embed_backward: Op = "none"

    def tokens_here(self, t: Tensor) -> Tensor:
        """Of something along the tokens, what goes with this rank's residual stream: all of it."""
        return t

    def final(self, p: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Residual stream -> [T, D] whole on every rank, normalised; backward sums the ranks' parts of the head's dX."""
        x = norm_of(self.card, p, "norm", x).to(self.precision.compute)
        x, _ = meet(self.tp, x, forward=self.enter_ops[0], backward=self.enter_ops[1], site=(-1, "head"))
        return x

    def head_weight(self, p: Mapping[str, Tensor]) -> Tensor:
        return p["embed.weight" if self.card["tied"] else "head.weight"]

    def head(self, p: Mapping[str, Tensor], x: Tensor, targets: Tensor, vocab: int) -> Tensor:
        """Residual stream, targets [T] -> mean loss."""
        return linear_cross_entropy(self.final(p, x), self.head_weight(p), targets, self.tp, vocab, self.precision.compute)

    def logits(self, p: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Residual stream -> this rank's columns of the logits [T, V/p]."""
        return torch.nn.functional.linear(self.final(p, x), self.head_weight(p).to(self.precision.compute))

    def executed_flops(self, tokens: int, seq: int, vocab: int) -> int:
        """Forward and backward FLOPs of `tokens` tokens on all ranks together. K/V maps that neighbours hold alike run as often
        as they are held; recomputing a segment runs what leads to its last saved tensor again: all maps into the sublayers
        and attention, but not the row-parallel maps that end them, nor the head. Where a norm over all heads cuts the segment
        behind Q, K and V and needs no statistic (one rank), these are inputs of the next segment, kept and not run again."""
        card, copies = self.card, self.tp.size // self.kv_parts
        kept = ("q", "k", "v") if card["qk_norm"] and self.tp.size == 1 else ()
        into = out = spared = 0
        for sub, linear in maps(card).items():
            for name, (d_in, d_out, _) in linear.items():
                flops = self.factor.flops((0, f"{sub}.{name}"), d_in, d_out, tokens)
                if name in ("o", "down"):
                    out += flops
                else:
                    flops *= copies if name in ("k", "v") else 1
                    into += flops
                    spared += flops if name in kept else 0
        into += 2 * tokens * seq * card["hidden"]  # causal attention
        once = card["layers"] * (into + out) + 2 * tokens * vocab * card["hidden"]
        again = {"none": 0, "segment": into - spared, "layer": into + out}[self.recompute]
        return 3 * once + card["layers"] * again


class Enter:
    """norm (where it comes first) -> meet -> one column-parallel product for all maps."""

    def __init__(self, layout: Megatron, p: Mapping[str, Tensor], layer: int, noise: Tensor, sub: str, names: Sequence[str]):
        self.layout, self.p, self.layer, self.noise, self.sub, self.names = layout, p, layer, noise, sub, names

    @property
    def site(self) -> Site:
        return self.layer, f"{self.sub}.{'+'.join(self.names)}"

    def before(self, x: Tensor):
        if self.layout.card["place"] == "pre":
            x = norm_of(self.layout.card, self.p, f"{self.sub}.norm", x)
        return (x.to(self.layout.precision.compute),), None

    def meet(self, ys, exact):
        if self.hidden:
            return ys, exact
        forward, backward = self.layout.enter_ops
        y, exact = meet(self.layout.tp, ys[0], forward=forward, backward=backward, exact=exact, site=self.site)
        return (y,), exact

    @property
    def hidden(self) -> bool:
        """Whether the input's gradient is summed behind the product that makes the weight's (suite/layout/overlap.py)."""
        return self.layout.overlap and f"{self.sub}.{'+'.join(self.names)}.weight" in self.p

    def after(self, ys, exact):
        if f"{self.sub}.{'+'.join(self.names)}.weight" not in self.p:
            return [self._maps(ys[0], (name,)) for name in self.names]
        y = self._maps(ys[0], self.names)
        if self.sub == "ffn":
            return (y,)  # gate and up side by side
        return y.split([self.layout.widths[n] for n in self.names], dim=-1)

    def _maps(self, x: Tensor, names: Sequence[str]) -> Tensor:
        if self.hidden:
            leaf = self.p[f"{self.sub}.{'+'.join(names)}.weight"]
            y = entered(x, leaf.to(self.layout.precision.compute), 1, self.layout.tp, self.site)
        else:
            y = self.layout.multiply(x, self.p, self.layer, self.noise, self.sub, names)
        bias = f"{self.sub}.{'+'.join(names)}.bias"
        return y + self.p[bias].to(y.dtype) if bias in self.p else y


class Leave:
    """row-parallel product -> meet -> bias, norm (where it comes last)."""

    def __init__(self, layout: Megatron, p: Mapping[str, Tensor], layer: int, noise: Tensor, sub: str, name: str):
        self.layout, self.p, self.layer, self.noise, self.sub, self.name = layout, p, layer, noise, sub, name

    @property
    def site(self) -> Site:
        return self.layer, f"{self.sub}.{self.name}"

    def before(self, z: Tensor):
        return (self.layout.multiply(z, self.p, self.layer, self.noise, self.sub, (self.name,)),), None

    def meet(self, ys, exact):
        forward, backward = self.layout.leave_ops
        y, exact = meet(self.layout.tp, ys[0], forward=forward, backward=backward, exact=exact, site=self.site)
        return (y,), exact

    def after(self, ys, exact):
        (y,) = ys
        bias = f"{self.sub}.{self.name}.bias"
        if bias in self.p:
            y = y + self.p[bias].to(y.dtype)
        if self.layout.card["place"] == "post":
            y = norm_of(self.layout.card, self.p, f"{self.sub}.norm", y)
        return (y,)


class HeadsNorm:
    """RMSNorm over all heads of Q and over all of K, which are sharded: their sums of squares [T, 2] are what meets, in
    float32, forward and backward. K/V heads that several ranks hold count once."""

    def __init__(self, layout: Megatron, p: Mapping[str, Tensor], layer: int):
        self.layout, self.p, self.layer = layout, p, layer

    def before(self, q: Tensor, k: Tensor, v: Tensor):
        if self.layout.tp.size == 1:
            return (q, k, v), None
        copies = self.layout.tp.size // self.layout.kv_parts
        squares = [t.to(wide(t.dtype)).square().sum(-1) / n for t, n in ((q, 1), (k, copies))]
        return (q, k, v), torch.stack(squares, dim=-1)

    def meet(self, ys, exact):
        if exact is not None:
            site = (self.layer, "attention.qk_norm")
            exact, _ = meet(self.layout.tp, exact, forward="all_reduce", backward="all_reduce", site=site, purpose="statistic")
        return ys, exact

    def after(self, ys, exact):
        q, k, v = ys
        card = self.layout.card
        widths = card["hidden"], card["kv_heads"] * self.layout.head_size
        squares = [None, None] if exact is None else [s / width for s, width in zip(exact.split(1, dim=-1), widths)]
        q = rms_norm(q, self.p["attention.q_norm.weight"], card["eps"], squares[0])
        return q, rms_norm(k, self.p["attention.k_norm.weight"], card["eps"], squares[1]), v


def build(recompute: str = "none", overlap: bool = False, *, card: Mapping[str, Any], factor: Any, precision: Precision,
          tp: Wire) -> Megatron:
    return Megatron(card=card, factor=factor, precision=precision, tp=tp, recompute=recompute, overlap=overlap)


