"""One decoder. GPT, Qwen2.5, LLaMA and OLMo-2 are rows of `workloads/models.yaml`; where tensors lie is the layout's,
how a map is written the factor's, in what numbers it runs the precision's.

Shapes in names: T tokens of the micro-batch (batch-major), D hidden, E heads x head size of this rank, F feed-forward of
this rank, V vocabulary (padded to a multiple of 128). Every function below works on one rank's shard.

    x_TD = embed(ids)
    a layer:  x = x + attention(norm(x))          place: pre  (GPT, Qwen2.5, LLaMA)
              x = x + norm(attention(x))          place: post (OLMo-2), with RMSNorm over all heads of Q and of K
    loss = cross_entropy(head(norm(x)))           mean over tokens

A sublayer is a chain edge -> core -> edge: ranks meet in the edges (suite/seams.py), cores are local. `block` is the only
block code; compiled, it serves every layer as one graph, for it takes its weights and the layer's number as arguments.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kernels.swiglu import swiglu
from suite.norms import wide
from suite.seams import Edge
from suite.weights import Member, Weights

Card = Mapping[str, Any]
PAD = 128
FIRST = 2  # torch makes graphs of their own for the numbers 0 and 1
OPEN = "L['layer_number']"  # what the compiler is to leave open


def padded(vocab: int) -> int:
    """Rows of the embedding: the vocabulary rounded up so that it divides over any tp up to 128. Independent of tp."""
    return -(-vocab // PAD) * PAD


def maps(card: Card) -> dict[str, dict[str, tuple[int, int, bool]]]:
    """Linear maps of a layer: sublayer -> name -> (d_in, d_out, has bias), unsharded."""
    d, f = card["hidden"], card["ffn"]
    head = d // card["heads"]
    bias = card["bias"]
    kv = card["kv_heads"] * head
    ffn = {"gate": (d, f, bias["ffn"])} if card["gated"] else {}
    return {
        "attention": {"q": (d, d, bias["qkv"]), "k": (d, kv, bias["qkv"]), "v": (d, kv, bias["qkv"]), "o": (d, d, bias["out"])},
        "ffn": {**ffn, "up": (d, f, bias["ffn"]), "down": (f, d, bias["ffn"])},
    }


def members(card: Card, vocab: int, factor: Any, spec: Callable) -> list[Member]:
    """All tensors of the model, unsharded. GPT's maps into the residual start smaller by sqrt(2 L) (GPT-2)."""
    d, std = card["hidden"], card["init_std"]
    found: list[tuple[str, tuple[int, ...], float | None]] = [("embed.weight", (padded(vocab), d), std)]
    if card["position"] == "learned":
        found.append(("positions.weight", (card["positions"], d), std))

    def norm(name: str, width: int) -> None:
        found.append((f"{name}.weight", (width,), None))
        if card["norm"] == "layernorm":
            found.append((f"{name}.bias", (width,), 0.0))

    for layer in range(card["layers"]):
        for sub, linear in maps(card).items():
            at = f"layers.{layer}.{sub}"
            norm(f"{at}.norm", d)
            for name, (d_in, d_out, bias) in linear.items():
                narrow = card["family"] == "gpt" and name in ("o", "down")
                site, dense = (layer, f"{sub}.{name}"), std / math.sqrt(2 * card["layers"]) if narrow else std
                for matrix, shape in factor.shapes(site, d_in, d_out).items():
                    found.append((f"{at}.{name}.{matrix}", shape, factor.std(site, d_in, d_out, dense)))
                if bias:
                    found.append((f"{at}.{name}.bias", (d_out,), 0.0))
            if sub == "attention" and card["qk_norm"]:
                found.append((f"{at}.q_norm.weight", (linear["q"][1],), None))
                found.append((f"{at}.k_norm.weight", (linear["k"][1],), None))
    norm("norm", d)
    if not card["tied"]:
        found.append(("head.weight", (padded(vocab), d), std))
    return [Member(name, shape, std, spec(name, shape)) for name, shape, std in found]


def rotary(card: Card, seq: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """(cos, sin) [seq, head size / 2] in the dtype of statistics; None where positions are learned."""
    if card["position"] != "rope":
        return None
    size = card["hidden"] // card["heads"]
    rate = card["theta"] ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angle = torch.outer(torch.arange(seq, dtype=torch.float64), rate)
    return angle.cos().to(device, wide(dtype)), angle.sin().to(device, wide(dtype))


def _rotate(x_BHSE: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rope
    low, high = x_BHSE.chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(x_BHSE.dtype)


def attention(q_TE: Tensor, k_TE: Tensor, v_TE: Tensor, *, size: int, seq: int,
              rope: tuple[Tensor, Tensor] | None) -> tuple[Tensor]:
    """Causal attention of this rank's heads. q [T, heads·size], k, v [T, K/V heads·size] -> [T, heads·size]."""
    q, k, v = (t.view(-1, seq, t.shape[-1] // size, size).transpose(1, 2) for t in (q_TE, k_TE, v_TE))
    if rope is not None:
        q, k = _rotate(q, rope), _rotate(k, rope)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return (out.transpose(1, 2).reshape(q_TE.shape),)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu_tanh": partial(F.gelu, approximate="tanh"), "silu": F.silu,
                                                      "none": lambda x: x}


def feed_forward(*ys: Tensor, activation: str, gated: bool) -> tuple[Tensor]:
    """up [T, F] -> act(up); gated: gate and up, two tensors or one [T, 2F], -> act(gate) · up [T, F]."""
    act = ACTIVATIONS[activation]
    if not gated:
        return (act(ys[0]),)
    if len(ys) == 1:
        return (swiglu(ys[0]),) if activation == "silu" else feed_forward(*ys[0].chunk(2, -1), activation=activation, gated=True)
    return (act(ys[0]) * ys[1],)


def sublayer(x: Tensor, chain: Sequence, keep: Callable, ends: Callable) -> Tensor:
    """chain: edge, core, edge, (core, edge ...). `keep` calls a segment and keeps or recomputes what it held; a segment
    holds no forward collective in any layout. `ends` does the same with what comes before the first meet and after the last."""
    edge: Edge = chain[0]
    ys, exact = edge.meet(*ends(edge.before, x))
    for core, following in zip(chain[1::2], chain[2::2]):
        ys, exact = following.meet(*keep(_segment, edge, core, following, ys, exact))
        edge = following
    return x + ends(edge.after, ys, exact)[0]


def _segment(edge: Edge, core: Callable, following: Edge, ys: Sequence[Tensor], exact: Tensor | None):
    return following.before(*core(*edge.after(ys, exact)))


def _call(function: Callable, *args):
    return function(*args)


_again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
KEEP = {"none": _call, "segment": _again, "layer": _call}  # of a segment
# of a whole layer, to its end: its collectives run again as well
LAYER = {"none": _call, "segment": _call, "layer": partial(_again, early_stop=False)}


class Decoder:
    """A model on one rank. `layout` has the wires, factor and precision; `seq` tokens a sequence."""

    def __init__(self, card: Card, layout: Any, *, vocab: int, seq: int, device: torch.device, compile: bool = False):
        self.card, self.layout, self.seq, self.vocab = card, layout, seq, vocab
        listed = members(card, vocab, layout.factor, layout.spec)
        self.weights = Weights(listed, layout.groups([m.name for m in listed]), index=layout.tp.index, size=layout.tp.size,
                               device=device, dtype=layout.precision.master)
        self.rope = rotary(card, seq, device, layout.precision.compute)
        self.noise = torch.zeros(4, dtype=torch.int64, device=device)  # seed, step, micro-batch, replica
        self.blocks = []
        for layer in range(card["layers"]):
            at = f"layers.{layer}."
            self.blocks.append({name.removeprefix(at): leaf for name, leaf in self.weights.leaves.items() if name.startswith(at)})
        self.ends = {name: leaf for name, leaf in self.weights.leaves.items() if not name.startswith("layers.")}
        self._numbered = self.numbered
        if compile:
            config = torch.compiler.config
            config.dynamic_sources = ",".join(dict.fromkeys([*filter(None, config.dynamic_sources.split(",")), OPEN]))
            # static: shapes of another model in this process become no variables
            self._numbered = torch.compile(self.numbered, fullgraph=True, dynamic=False)

    def attach(self, buffers: Mapping[str, Tensor]) -> None:
        """Tensors of parts by full name, which the products of their layer then find beside the weights."""
        for name, tensor in buffers.items():
            _, layer, rest = name.split(".", 2)
            self.blocks[int(layer)][rest] = tensor

    def block(self, p: Mapping[str, Tensor], x: Tensor, rope: tuple[Tensor, Tensor] | None, layer: int, noise: Tensor,
              past: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """One layer: p its leaves by name, x the residual stream as the layout keeps it, past what crosses from the layer
        below -> (x, what crosses to the next). Edges find it in p, by names that end in `.latent`, and put theirs there."""
        card, layout = self.card, self.layout
        p = {**p, **past}
        keep = KEEP[layout.recompute]
        ends = keep if layout.recompute_ends else _call
        core = partial(attention, size=card["hidden"] // card["heads"], seq=self.seq, rope=rope)
        chain = layout.attention(p, layer, noise, core)
        x = sublayer(x, chain, keep, ends)
        activation = "none" if card["gated"] and layout.factor.plain_gate else card["activation"]
        activate = partial(feed_forward, activation=activation, gated=card["gated"])
        x = sublayer(x, layout.feed_forward(p, layer, noise, activate), keep, ends)
        return x, {name: t for name, t in p.items() if name.endswith(".latent")} if layout.factor.crosses else {}

    def numbered(self, p: Mapping[str, Tensor], x: Tensor, rope: tuple[Tensor, Tensor] | None, layer_number: int, noise: Tensor,
                 past: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """`block` of layer `layer_number` - FIRST: what is compiled, once for all layers."""
        return self.block(p, x, rope, layer_number - FIRST, noise, past)

    def run(self, p: Mapping[str, Tensor], x: Tensor, layer: int, past: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """`block`, compiled where the model is."""
        return self._numbered(p, x, self.rope, layer + FIRST, self.noise, past)

    def residual(self, ids: Tensor) -> Tensor:
        """ids [B, S] -> the residual stream after the last layer, as the layout keeps it."""
        x = self.layout.embed(self.ends, ids)
        past: dict[str, Tensor] = {}
        again = LAYER[self.layout.recompute]
        for layer, p in enumerate(self.blocks):
            x, past = again(self.run, p, x, layer, past)
        return x

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """ids, targets int64 [B, S] -> mean cross-entropy, a scalar equal on all ranks of the group."""
        return self.layout.head(self.ends, self.residual(ids), targets.reshape(-1), self.vocab)

    def logits(self, ids: Tensor) -> Tensor:
        """ids [B, S] -> this rank's columns of the logits [B·S, V/p] (the vocabulary is sharded)."""
        return self.layout.logits(self.ends, self.residual(ids))
