"""layouts.csv: what low rank and its layouts cost each model on paper, one row a model card. No measurement; kind `modelled`.

For T = 16,384 tokens in bf16 and factors of width r = d/4, unless a column says otherwise; g = 2 where the feed-forward is gated
else 1, kv = K/V heads x head size. Tests hold the columns against the code itself, run on meta tensors.

    parameters_full, parameters_low_rank    of the model; parameter_ratio: full over low
    flop_ratio                              training FLOPs, full over low rank: the ceiling of the speed-up, causal attention and
                                            head included, at 4,096 tokens a sequence or the model's positions
    payload_<layout>, .._backward    MiB    that the ranks reduce in a block: megatron 2Td; pairwise T(3d + 2kv + gf) forward and
                                            3Td + Tf backward; btp (5 + g)Tr; btp_dense_kv, K and V whole, T(r + 2kv + (2 + g)r)
    break_even_rank                         r at which btp reduces as much as full rank, 2d / (5 + g)
    kv_rank                                 r below which a factored K or V is smaller than the dense map, d·kv / (d + kv)
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from suite.measure.flops import linears, model_flops_per_token, parameters
from suite.report.costmodel import LowRank
from suite.workload import models

TOKENS, SEQ, SHARE = 16384, 4096, 4
MIB = 2**20
HEADER = ("model", "hidden", "ffn", "layers", "rank", "parameters_full", "parameters_low_rank", "parameter_ratio", "flop_ratio",
          "payload_megatron", "payload_pairwise", "payload_pairwise_backward", "payload_btp", "payload_btp_dense_kv",
          "break_even_rank", "kv_rank", "unit", "kind")


def payloads(card: Mapping[str, Any]) -> dict[str, float]:
    """MiB of activations a block and way, as above."""
    d, f, kv = card["hidden"], card["ffn"], card["kv_heads"] * card["hidden"] // card["heads"]
    r, g = d // SHARE, 2 if card["gated"] else 1
    elements = {"megatron": 2 * d, "pairwise": 3 * d + 2 * kv + g * f, "pairwise_backward": 3 * d + f, "btp": (5 + g) * r,
                "btp_dense_kv": r + 2 * kv + (2 + g) * r}
    return {f"payload_{name}": 2 * TOKENS * n / MIB for name, n in elements.items()}


def rows() -> list[dict[str, Any]]:
    """One row a model card, in the order of models.yaml."""
    found = []
    for name, card in models().items():
        d, kv = card["hidden"], card["kv_heads"] * card["hidden"] // card["heads"]
        rank, maps = d // SHARE, linears(card)
        full = parameters(card)
        low = full + card["layers"] * sum(rank * (i + o) - i * o for i, o in maps.values())
        seq = min(SEQ, card.get("positions", SEQ))
        flops = [model_flops_per_token(card, seq, factor=factor) for factor in (None, LowRank(rank))]
        found.append({
            "model": name, "hidden": d, "ffn": card["ffn"], "layers": card["layers"], "rank": rank,
            "parameters_full": full, "parameters_low_rank": low, "parameter_ratio": full / low, "flop_ratio": flops[0] / flops[1],
            **payloads(card), "break_even_rank": 2 * d / (5 + (2 if card["gated"] else 1)), "kv_rank": d * kv / (d + kv),
            "unit": "MiB", "kind": "modelled"})
    return found
