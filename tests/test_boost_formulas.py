"""Payloads, parameters and FLOPs of BOOST's five shapes, from the code on meta tensors, against the authors' published numbers."""
import contextlib
from types import SimpleNamespace

import pytest
import torch

from suite.comm import meet as meeting
from suite.measure import flops
from suite.model import Decoder, members
from suite.precision.bf16 import build as bf16
from suite.report import layouts
from suite.seams import load
from suite.workload import models

SIZES = ["1b", "3b", "7b", "13b", "30b"]
FORWARD = {"megatron": [128, 192, 256, 320, 512], "pairwise": [662, 992, 1328, 1664, 2656], "btp": [112, 168, 224, 280, 448]}  # MiB
BACKWARD = {"pairwise": [363, 544, 728, 912, 1456], "btp": [112, 168, 224, 280, 448]}
PARAMETERS = {"dense": [1.28, 3.27, 6.61, 12.85, 29.4], "cola": [0.54, 1.35, 2.69, 5.17, 11.8]}  # billions, embeddings tied
RATIO = [1.98, 2.12, 2.21, 2.28, 2.36]  # training FLOPs, full over low rank


class Meta:
    """Rank 0 of 4: every message is written down, and comes back in the shape that it would have."""

    id, size, index = 0, 4, 0

    def __init__(self):
        self.sent = {"forward": 0, "backward": 0}


@contextlib.contextmanager
def written_down(wire: Meta, monkeypatch):
    def send(x, exact, _, size, op, dim, layer, name, purpose, way):
        if op == "none":
            return x, exact
        shape = list(x.shape)
        shape[dim] = shape[dim] * size if op == "all_gather" else shape[dim] // size if op == "reduce_scatter" else shape[dim]
        if purpose == "activations":
            wire.sent[way] += x.nbytes
        return x.new_empty(shape), exact

    with monkeypatch.context() as patch:
        patch.setattr(meeting, "_send", send)
        yield


def block_payload(name: str, layout: str, monkeypatch, **options) -> dict[str, float]:
    """MiB that one block sends forward and backward for 16,384 tokens in bf16."""
    card, wire = {**models()[name], "layers": 1}, Meta()
    factor = load("factor", "dense" if layout == "megatron" else "cola")(card=card, **options)
    made = load("layout", layout)(card=card, factor=factor, precision=bf16(), tp=wire)
    model = Decoder(card, made, vocab=256, seq=2048, device=torch.device("meta"))
    width = card["hidden"] // (wire.size if layout == "btp" else 1)
    x = torch.empty(16384, width, dtype=torch.bfloat16, device="meta", requires_grad=True)
    with written_down(wire, monkeypatch):
        y, _ = model.block(model.blocks[0], x, model.rope, 0, model.noise, {})
        y.backward(torch.empty_like(y))
    return {way: sent / 2**20 for way, sent in wire.sent.items()}


@pytest.mark.parametrize("layout", list(FORWARD))
def test_payload_of_a_block(layout, monkeypatch):
    for n, size in enumerate(SIZES):
        found = block_payload(f"llama-{size}", layout, monkeypatch)
        assert found["forward"] == pytest.approx(FORWARD[layout][n], abs=0.5), size
        assert found["backward"] == pytest.approx(BACKWARD.get(layout, FORWARD[layout])[n], abs=0.5), size


@pytest.mark.parametrize("n", range(5))
def test_parameters_and_flops(n):
    card = models()[f"llama-{SIZES[n]}"]
    per_token = {}
    for factor in ("dense", "cola"):
        made = load("factor", factor)(card=card)
        found = members(card, card["vocab"], made, lambda name, shape: SimpleNamespace())
        count = sum(torch.Size(m.shape).numel() for m in found)
        assert count / 1e9 == pytest.approx(PARAMETERS[factor][n], abs=0.005 if n < 4 else 0.05), factor
        per_token[factor] = flops.model_flops_per_token(card, 4096, factor=made)
    assert per_token["dense"] / per_token["cola"] == pytest.approx(RATIO[n], abs=0.006)


@pytest.mark.parametrize("name", ["llama-7b", "qwen2.5-7b", "gpt-6.7b"])
def test_the_table_of_layouts_is_what_the_code_does(name, monkeypatch):
    """Grouped queries and GPT too: payloads of a block, parameters and FLOPs of the model."""
    row, card = next(row for row in layouts.rows() if row["model"] == name), models()[name]
    for layout in ("megatron", "pairwise", "btp"):
        found = block_payload(name, layout, monkeypatch)
        assert found["forward"] == row[f"payload_{layout}"], layout
        assert found["backward"] == row.get(f"payload_{layout}_backward", row[f"payload_{layout}"]), layout
    dense = block_payload(name, "btp", monkeypatch, kv="dense")
    assert dense["forward"] == dense["backward"] == row["payload_btp_dense_kv"]
    counts = {}
    for factor in ("dense", "cola"):
        made = load("factor", factor)(card=card)
        found = members({**card, "vocab": 0}, card["vocab"], made, lambda *_: SimpleNamespace())
        padding = -card["vocab"] % 128 * card["hidden"] * (1 if card["tied"] else 2)
        counts[factor] = sum(torch.Size(m.shape).numel() for m in found) - padding
    assert counts == {"dense": row["parameters_full"], "cola": row["parameters_low_rank"]}
    seq = min(4096, card.get("positions", 4096))
    full, low = (flops.model_flops_per_token(card, seq, factor=load("factor", one)(card=card)) for one in ("dense", "cola"))
    assert row["flop_ratio"] == full / low
    at = block_payload(name, "btp", monkeypatch, rank=int(row["break_even_rank"]))["forward"]
    above = block_payload(name, "btp", monkeypatch, rank=int(row["break_even_rank"]) + 1)["forward"]
    assert at <= row["payload_megatron"] < above
