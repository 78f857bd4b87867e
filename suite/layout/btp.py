"""btp: bottleneck-aware tensor parallelism (BOOST, Wang et al., 2025, arXiv 2512.12131, its section on BTP and Algorithm 1).

A chunk starts at B and ends at the next A, so that ranks meet where the model is narrow. The residual stream x is sharded along
the hidden dimension from the embedding to the last layer and is never gathered in between. On rank i of p:

    s, l = Σ x², sqrt(s / (D/p) + eps)       local statistic, local RMS
    P = ((x / l · γ) A) · l                  partial                    forward: all-reduce of [P, s], T(k r) and [T, 1]
    y = P / sqrt(s / D + eps)                k r, on every rank
    h = f(y)                                 only now: f of a sum       backward: all-reduce of dh, T(k r)
    q, k, v = h B                            heads of this rank
    z = attention(q, k, v)
    x = x + f(Σ z A_o) B_o + b_o             shard of D                 all-reduce of T r forward, of T r backward

k = 3 (q, k, v), 1 (o), 2 (gate, up; 1 for GPT's up), 1 (down). Elements a block (DESIGN 7a): (5 + g) T r forward and backward, 4
calls each, and the statistics. Dense K and V are row-parallel and meet at their own width beside q's latent: T(r + 2 K/V).

`norm: online`   the statistic crosses with the product; what follows is replicated, so that its gradient is whole on every rank
                 and needs no message. l is absent from the result: a constant in the backward pass. Calls 6 + 4.
`prescale`       whether l is divided and multiplied back at all. `always` is Algorithm 1 to the letter; `auto`: only where products
                 run in numbers with a scale or a range to keep (quantised ones). Rounding of plain floats does not see l, so
                 there P = (x · γ) A loses nothing and saves a pass over P each way.
`norm: sync`     the statistic crosses before the product, and its gradient after it: calls 6 + 6.
`norm: local`    each shard by its own statistic: another model for each p, to be timed only.
LayerNorm        y = (Σ P - μ c) / σ + b with c = Σ γ A, b = Σ β A, reduced once a norm beside the statistics (2 k r elements).
                 Each rank's mean and centred squares become sums in float64, whose combination there is Chan's without
                 cancellation: statistics of 2 columns. The product itself carries the mean in its own dtype.
`overlap: true`  the all-reduce of dh is under way while B's gradient is computed (suite/layout/overlap.py), where products are
                 plain ones and the maps of a message are one batch.
`grouped: false` every map has a product and a message of its own: 7 + statistics instead of 4.

    x, norms (D), biases     this rank's part         a [r, d_in] columns         b [d_out, r] rows: heads, feed-forward, hidden
    embedding, head          vocabulary rows; forward reduce-scatter of [T, D] over the hidden dimension, backward all-gather;
                             the head: all-gather, backward reduce-scatter. The last norm works on the gathered stream; its
                             gradient, of this rank's part of the vocabulary, is summed once a step.

`recompute: segment` keeps the all-reduced latents, the statistics and the shards of x. It runs norms, f, B and the core again,
no A (the last product of a segment is nobody's input) and no forward collective. OLMo-2's norms, behind the sublayer and over
all heads, would each need one more meet of sharded activations and are refused.

Deviations: the release reduces statistic and product one after the other; here they are two messages under way at once, or one
where a byte codec carries the product (`suite/comm/wire.py`). Its embedding all-reduces whole rows and slices.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from suite.comm.meet import meet
from suite.comm.wire import Wire
from suite.layout.epilogue import epilogue, passes, scale
from suite.layout.lowrank import OUT, LowRankLayout
from suite.layout.megatron import norm_of
from suite.layout.overlap import entered
from suite.norms import moments, normalised, scaled, statistics, wide
from suite.seams import Precision, Spec


class BTP(LowRankLayout):
    def __init__(self, *, norm: str = "online", prescale: str = "auto", **rest: Any):
        super().__init__(**rest)
        self.norm = norm
        self.prescale = not getattr(self.precision, "scale_free", False) if prescale == "auto" else prescale == "always"

    def refuse(self, tokens: int) -> str | None:
        if self.card["place"] != "pre" or self.card["qk_norm"]:
            return "norms behind a sublayer or over all heads need whole activations, which are sharded here; see pairwise"
        return super().refuse(tokens)

    def spec(self, param: str, shape: Sequence[int]) -> Spec:
        *path, name, kind = param.split(".")
        if name in ("embed", "head"):
            return Spec(dim=0)
        if not path and name == "norm":
            return Spec(partial=True)
        if kind == "a" or name == "positions" or (kind == "weight" and name in ("k", "v")):
            return Spec(dim=1)
        return Spec(dim=0, parts=self.kv_parts if name in ("k", "v") else None)

    def attention(self, p: Mapping[str, Tensor], layer: int, noise: Tensor, core: Callable) -> list:
        return self.chain(p, layer, noise, "attention", core)

    def feed_forward(self, p: Mapping[str, Tensor], layer: int, noise: Tensor, core: Callable) -> list:
        return self.chain(p, layer, noise, "ffn", core)

    def chain(self, p: Mapping[str, Tensor], layer: int, noise: Tensor, sub: str, core: Callable) -> list:
        into, out = Into(self, p, layer, noise, sub), Out(self, p, layer, noise, sub)
        return [Statistic(self, p, layer, sub), _same, into, core, out] if self.sync else [into, core, out]

    @property
    def sync(self) -> bool:
        return self.norm == "sync" and self.tp.size > 1

    def entered(self, h: Tensor, p: Mapping[str, Tensor], layer: int, noise: Tensor, sub: str, names: tuple[str, ...],
                whole: bool = False) -> list[Tensor]:
        """As `maps_of` of a latent that is equal on all ranks, and so is its gradient."""
        site = layer, f"{sub}.{'+'.join(names)}.b"
        if self.overlap and (len(names) == 1 or names in self.ups(sub)):
            leaf, _ = self.place(sub, names, "b")
            y = entered(h, p[leaf].to(self.precision.compute), len(names), self.tp, site)
            return [y] if whole else list(y.chunk(len(names), dim=-1))
        h, _ = meet(self.tp, h, forward="none", backward="all_reduce", site=site)
        return self.maps_of(h, p, layer, noise, sub, names, whole)

    def norm_alone(self, p: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """`sync`: the statistic's message and the norm. `online`: the pass before the product, the statistic's message, and
        the division behind the product as a pass of its own, over as many columns as q, k and v have there."""
        if self.norm != "online" or self.tp.size == 1 or self.card["norm"] != "rmsnorm":
            edge = Statistic(self, p, 0, "attention")
            return edge.after(*edge.meet(*edge.before(x)))[0] if self.tp.size > 1 else norm_of(self.card, p, "attention.norm", x)
        y, square, _ = scale(x, p["attention.norm.weight"], self.card["eps"], self.prescale)
        square, _ = meet(self.tp, square, forward="all_reduce", backward="none", site=(0, "attention.norm"), purpose="statistic")
        return epilogue(y.new_empty(len(y), self.latents), square, self.card["hidden"], self.card["eps"], False)

    @property
    def latents(self) -> int:
        """Columns of what meets in front of attention."""
        return sum(self.factor.width if self.factored("attention", name) else self.linear["attention"][name][1]
                   for name in self.into("attention"))

    def passes(self, tokens: int, device: torch.device) -> dict[str, tuple[Callable[[], object], int]]:
        """The passes around attention's bottleneck at this rank's shapes: name -> (run, bytes read and written)."""
        return passes(tokens, self.card["hidden"] // self.tp.size, self.latents, self.card["hidden"], self.card["eps"],
                      getattr(self.factor, "silu", False), self.prescale, self.precision.compute, device)

    def embed(self, p: Mapping[str, Tensor], ids: Tensor) -> Tensor:
        """ids [B, S] -> this rank's columns of the residual stream [T, D/p]."""
        table, tp = p["embed.weight"], self.tp
        local = ids.reshape(-1) - tp.index * len(table)
        mine = (local >= 0) & (local < len(table))
        x = F.embedding(torch.where(mine, local, 0), table) * mine[:, None]
        x, _ = meet(tp, x.to(self.precision.compute), forward="reduce_scatter", backward="all_gather", dim=-1, site=(-1, "embed"))
        x = x.to(self.precision.residual)
        if self.card["position"] == "learned":
            position = torch.arange(ids.shape[1], device=ids.device).repeat(ids.shape[0])
            x = x + F.embedding(position, p["positions.weight"]).to(x.dtype)
        return x

    def final(self, p: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """This rank's columns -> [T, D] whole on every rank, normalised."""
        x, _ = meet(self.tp, x, forward="all_gather", backward="reduce_scatter", dim=-1, site=(-1, "head"))
        return norm_of(self.card, p, "norm", x).to(self.precision.compute)

    def executed_flops(self, tokens: int, seq: int, vocab: int) -> int:
        """As `Megatron.executed_flops`: second factors of K and V run as often as they are held; recomputing a segment runs the
        second factors into the core and the core again."""
        copies = self.tp.size // self.kv_parts
        down = up = out = 0
        for sub, linear in self.linear.items():
            for name, (d_in, d_out, _) in linear.items():
                whole = self.factor.flops((0, f"{sub}.{name}"), d_in, d_out, tokens)
                second = 2 * tokens * self.factor.width * d_out if self.factored(sub, name) else 0
                down += whole - second
                up += second * (copies if name in ("k", "v") else 1) * (name != OUT[sub])
                out += second * (name == OUT[sub])
        up += 2 * tokens * seq * self.card["hidden"]
        once = down + up + out
        again = {"none": 0, "segment": up, "layer": once}[self.recompute]
        return self.card["layers"] * (3 * once + again) + 6 * tokens * vocab * self.card["hidden"]


def _same(*ys: Tensor) -> tuple[Tensor, ...]:
    return ys


class Statistic:
    """The sums of a norm [T, c], all-reduced forward and backward -> the normalised shard."""

    def __init__(self, layout: BTP, p: Mapping[str, Tensor], layer: int, sub: str):
        self.layout, self.p, self.layer, self.sub = layout, p, layer, sub

    def before(self, x: Tensor):
        return (x,), statistics(x, self.layout.card["norm"])

    def meet(self, ys, exact):
        exact, _ = meet(self.layout.tp, exact, forward="all_reduce", backward="all_reduce", site=(self.layer, f"{self.sub}.norm"),
                        purpose="statistic")
        return ys, exact

    def after(self, ys, exact):
        card, at = self.layout.card, f"{self.sub}.norm"
        return (normalised(ys[0], exact, card["hidden"], card["eps"], self.p[f"{at}.weight"], self.p.get(f"{at}.bias")),)


class Into:
    """local norm -> the first factors -> meet, statistic beside it -> global norm, f -> the second factors, biases."""

    def __init__(self, layout: BTP, p: dict[str, Tensor], layer: int, noise: Tensor, sub: str):
        self.layout, self.p, self.layer, self.noise, self.sub = layout, p, layer, noise, sub
        self.pieces = layout.downs(sub)
        self.online = layout.norm == "online" and layout.tp.size > 1

    def before(self, x: Tensor):
        layout, card, at = self.layout, self.layout.card, f"{self.sub}.norm"
        gain, bias = self.p[f"{at}.weight"], self.p.get(f"{at}.bias")
        if not self.online:
            if not layout.sync:
                x = norm_of(card, self.p, at, x)
            return tuple(self._down(x.to(layout.precision.compute), piece) for piece in self.pieces), None
        if bias is None:
            x, exact, rms = scale(x, gain, card["eps"], layout.prescale)
        else:
            exact = statistics(x, card["norm"])
            x, rms = scaled(x, gain, card["eps"], layout.prescale)
        ys = [self._down(x.to(layout.precision.compute), piece) for piece in self.pieces]
        if bias is not None:
            exact = torch.cat([exact.flatten(), *self._shifts(gain, bias)])
        return tuple(ys if rms is None else ((y.to(rms.dtype) * rms).to(y.dtype) for y in ys)), exact

    def meet(self, ys, exact):
        met, total = [], None
        for piece, y in zip(self.pieces, ys):
            site = self.layer, f"{self.sub}.{'+'.join(piece)}.a"
            y, summed = meet(self.layout.tp, y, forward="all_reduce", backward="none", exact=exact, exact_grad=("whole", 0.0),
                             site=site)
            met.append(y)
            total, exact = (summed if total is None else total), None
        return met, total

    def after(self, ys, exact):
        fused = self.online and self.layout.card["norm"] == "rmsnorm"
        if self.online and not fused:
            ys = self._shifted(ys, exact)
        found: dict[str, Tensor] = {}
        for piece, y in zip(self.pieces, ys):
            found.update(self._maps(piece, y, exact if fused else None))
        names = self.layout.into(self.sub)
        if names[0] in found:
            return [self.layout.biased(found[name], self.p, self.sub, name) for name in names]
        return (found["+".join(names)],)  # gate and up side by side

    def _down(self, x: Tensor, piece: Sequence[str]) -> Tensor:
        return self.layout.down(x, self.p, self.layer, self.noise, self.sub, piece)

    def _shifts(self, gain: Tensor, bias: Tensor) -> list[Tensor]:
        """This rank's part of gain · A and bias · A, which LayerNorm needs because the mean is taken off behind A."""
        leaves = [self.p[self.layout.place(self.sub, piece, "a")[0]] for piece in self.pieces]
        dtype = torch.float64
        return [(a.to(dtype) @ v.to(dtype)) for v in (gain, bias) for a in leaves]

    def _shifted(self, ys: Sequence[Tensor], exact: Tensor) -> list[Tensor]:
        card, dtype = self.layout.card, wide(ys[0].dtype)
        widths = [y.shape[-1] for y in ys]
        sums, *shifts = exact.split([2 * len(ys[0]), *widths, *widths])
        mean, inverse = (t.to(dtype) for t in moments(sums.view(-1, 2), card["hidden"], card["eps"]))
        pairs = zip(ys, shifts[:len(ys)], shifts[len(ys):])
        return [((y.to(dtype) - mean * c.to(dtype)) * inverse + b.to(dtype)).to(y.dtype) for y, c, b in pairs]

    def _maps(self, piece: Sequence[str], y: Tensor, square: Tensor | None) -> dict[str, Tensor]:
        """Latents (and dense K and V) of a piece, side by side, still to be divided by the RMS where its `square` is given ->
        what the maps give."""
        layout, sub = self.layout, self.sub
        low = tuple(name for name in piece if layout.factored(sub, name))
        width = layout.factor.width * len(low)
        silu = square is not None and layout.factor.silu and len(low) == len(piece)
        if square is not None:
            y = epilogue(y, square, layout.card["hidden"], layout.card["eps"], silu)
        latent, dense = y[:, :width], y[:, width:]
        found: dict[str, Tensor] = {}
        if low:
            h = latent if silu else layout.latent(latent, self.p, sub, low)
            whole = sub == "ffn" and not self.layout.card["bias"]["ffn"]
            ys = layout.entered(h, self.p, self.layer, self.noise, sub, low, whole)
            found.update(zip(low, ys) if len(ys) == len(low) else [("+".join(low), ys[0])])
        if dense.shape[-1]:
            names = [name for name in piece if name not in low]
            site = self.layer, f"{sub}.{'+'.join(names)}.b"
            dense, _ = meet(layout.tp, dense, forward="none", backward="all_reduce", site=site)
            for name, kv in zip(names, dense.chunk(len(names), dim=-1)):
                held = layout.widths[name]
                found[name] = kv.narrow(-1, layout.tp.index * layout.kv_parts // layout.tp.size * held, held)
        return found


class Out:
    """the first factor of o or down -> meet -> f -> the second factor, bias."""

    def __init__(self, layout: BTP, p: dict[str, Tensor], layer: int, noise: Tensor, sub: str):
        self.layout, self.p, self.layer, self.noise, self.sub, self.name = layout, p, layer, noise, sub, OUT[sub]

    def before(self, z: Tensor):
        return (self.layout.down(z, self.p, self.layer, self.noise, self.sub, (self.name,)),), None

    def meet(self, ys, exact):
        site = self.layer, f"{self.sub}.{self.name}.a"
        return (meet(self.layout.tp, ys[0], forward="all_reduce", backward="none", site=site)[0],), exact

    def after(self, ys, exact):
        layout = self.layout
        h = layout.latent(ys[0], self.p, self.sub, (self.name,))
        (y,) = layout.entered(h, self.p, self.layer, self.noise, self.sub, (self.name,))
        return (layout.biased(y, self.p, self.sub, self.name),)


def build(recompute: str = "none", grouped: bool = True, norm: str = "online", prescale: str = "auto", overlap: bool = False, *,
          card: Mapping[str, Any], factor: Any, precision: Precision, tp: Wire) -> BTP:
    return BTP(card=card, factor=factor, precision=precision, tp=tp, recompute=recompute, overlap=overlap, grouped=grouped,
               norm=norm, prescale=prescale)
