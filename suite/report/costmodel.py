"""A small explicit cost model: what a training step should take, for cells that were not run. Kind `modelled`.

T tokens a step, p ranks of the tensor-parallel group, L layers, d hidden, f feed-forward, kv = K/V heads x head size,
g = 2 where the feed-forward is gated else 1, r = d/4 the width of a factor.

    computation   t_c = T · (F + R) / (p · rate)      F: model FLOPs a token (suite.measure.flops), rate: FLOP/s a GPU;
                                                      R, pairwise: 6 (p - 1) L s d, core attention of all heads on every rank
    wire          W   = 2 (p - 1) / p · T · E · b + S  bytes a rank sends; an all-gather or reduce-scatter is half an all-reduce
    communication t_w = W / link
    throughput    T / (t_c + t_w)

E, elements all-reduced a token, forward and backward, the ends of the network included:

    megatron      (4 L + 2) d
    megatron-sp   (4 L + 2) d                         gathered inputs are kept, not gathered again
    pairwise      L (6 d + 2 kv + (g + 1) f) + 2 d
    btp           2 L (5 + g) r + 2 d

b, bytes an element: a 16- or 32-bit float, or one byte a code and a float32 scale a group.

S, what crosses in float32 whatever the codec; all-reduced over p ranks an element is 2 (p - 1) / p · 4 bytes:

    cross-entropy's maximum and sums       3 T        norm of the gradients          1 a step
    QK-norm over all heads                 4 L T      (sums of squares of Q and K, forward and backward)
    megatron-sp, a step                    gradients of norms, biases of row-parallel maps and learned positions
    megatron*, K/V heads fewer than ranks  a step, over p / n_kv ranks: gradients of one head of K and V

For the layouts megatron and megatron-sp W is what the counter counts of one micro-batch, to the byte (tested). Nothing
overlaps, and latency, codecs and memory are free: a number here says what to expect, not what was seen, nor that the run
would fit.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from suite.measure.flops import model_flops_per_token, parameters
from suite.report.source import Entry

LINKS = {"p2p": 303.0, "shm": 28.6, "socket": 3.0}  # GB/s, bf16 all-reduce of 256 MiB on two H200s, measured
ASSUMED_TFLOPS = 450.0  # of one H200 in bf16; dense models of 350M to 7B reach 350 to 530
SMALLEST = 100e6  # parameters; below, launches decide and no rate is assumed
GROUP = 128
BYTES = {"bf16": (2.0, 0.0), "fp32": (4.0, 0.0), "fp64": (8.0, 0.0), "int8": (1.0, 4.0), "fp8": (1.0, 4.0),
         "int8-hadamard": (1.0, 4.0), "taco": (1.0, 4.0)}  # codec -> bytes a code, bytes a group
WIDTHS = {"dense": None, "svd": 0.25, "cola": 0.25, "lax": 0.25}  # factor -> r / d
FULL_RATE = ("bf16",)  # precisions whose products run at the rate above


@dataclass(frozen=True)
class LowRank:
    """A factor of width r: two thin products instead of one. The interface of `Factor.flops`."""

    width: int

    def flops(self, site: tuple[int, str], d_in: int, d_out: int, tokens: int) -> int:
        return 2 * tokens * self.width * (d_in + d_out)


def elements(card: Mapping[str, Any], layout: str) -> float | None:
    """All-reduced elements a token (E above); None where the layout has no formula here."""
    d, f, n = card["hidden"], card["ffn"], card["layers"]
    kv = card["kv_heads"] * d // card["heads"]
    g, r = (2 if card["gated"] else 1), d / 4
    table = {"megatron": (4 * n + 2) * d, "megatron-sp": (4 * n + 2) * d,
             "pairwise": n * (6 * d + 2 * kv + (g + 1) * f) + 2 * d, "btp": 2 * n * (5 + g) * r + 2 * d}
    return table.get(layout)


def replicated(card: Mapping[str, Any], layout: str, tp: int, seq: int) -> float:
    """FLOPs a token beside the model's (R above)."""
    table = {"pairwise": 6 * (tp - 1) * card["layers"] * seq * card["hidden"]}
    return table.get(layout, 0)


def bytes_per_element(codec: str, group: int = GROUP) -> float | None:
    code = BYTES.get(codec)
    return None if code is None else code[0] + code[1] / group


def once(card: Mapping[str, Any], layout: str) -> tuple[int, int]:
    """Gradients summed once a step: (elements over all ranks, elements over the ranks that hold the same K/V head)."""
    d, n, bias = card["hidden"], card["layers"], card["bias"]
    replicated = (2 * n + 1) * d * (2 if card["norm"] == "layernorm" else 1) + n * d * (bool(bias["out"]) + bool(bias["ffn"]))
    replicated += card["positions"] * d if card["position"] == "learned" else 0
    shared = 2 * n * (d // card["heads"]) * (d + bool(bias["qkv"]))
    table = {"megatron": (0, shared), "megatron-sp": (replicated, shared)}
    return table.get(layout, (0, 0))


def exact(card: Mapping[str, Any], tp: int, tokens: int, layout: str) -> float:
    """Bytes one rank sends in a step that no codec touches (S above)."""
    replicated, shared = once(card, layout)
    elements = 3 * tokens + 1 + 4 * card["layers"] * tokens * bool(card["qk_norm"]) + replicated
    copies = tp // min(tp, card["kv_heads"])
    return 4 * (2 * (tp - 1) / tp * elements + 2 * (copies - 1) / copies * shared)


def wire(card: Mapping[str, Any], tp: int, tokens: int, layout: str, codec: str) -> float | str:
    """Bytes one rank sends in a step of that many tokens, or why there is no number."""
    per_token, size = elements(card, layout), bytes_per_element(codec)
    if tp == 1:
        return 0.0
    if per_token is None:
        return f"no cost model for layout {layout}"
    if size is None:
        return f"no cost model for codec {codec}"
    return 2 * (tp - 1) / tp * tokens * per_token * size + exact(card, tp, tokens, layout)


def throughput(card: Mapping[str, Any], tp: int, seq: int, batch: int, *, factor: str, layout: str, codec: str, precision: str,
               link_gb: float, tflops: float | str) -> float | str:
    """Tokens/s, or why there is no number. `link_gb`: GB/s (decimal); `tflops`: per GPU, or why it is not known."""
    sent = wire(card, tp, seq * batch, layout, codec)
    if factor not in WIDTHS:
        return f"no cost model for factor {factor}"
    if precision not in FULL_RATE:
        return f"no rate known for {precision} products"
    for reason in (tflops, sent):
        if isinstance(reason, str):
            return reason
    share = WIDTHS[factor]
    flops = model_flops_per_token(card, seq, factor=LowRank(int(card["hidden"] * share)) if share else None)
    flops += replicated(card, layout, tp, seq)
    tokens = seq * batch
    return tokens / (tokens * flops / (tp * tflops * 1e12) + sent / (link_gb * 1e9))


def rate(entries: Sequence[Entry], card: Mapping[str, Any]) -> tuple[float | str, str]:
    """TFLOP/s a GPU (or why none is known) and where it comes from.

    The best ok baseline run of the model on one H200; else the assumed one, for models that are large enough for it.
    """
    found = [(metric.value, e.label) for e in entries
             if e.machine.startswith("h200") and e.case["model"] == card["name"] and e.case["mesh"]["tp"] == 1
             and e.method == "baseline" and (metric := e.metric("model_tflops")) is not None
             and metric.value is not None and metric.kind == "measured"]
    if found:
        return max(found)
    if parameters(card) < SMALLEST:
        return "no rate known for a model this small: launches decide", "none"
    return ASSUMED_TFLOPS, "assumed"
