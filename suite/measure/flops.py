"""FLOPs of a model, dense peaks of GPUs, and their ratio. Imports no torch.

For a card of `suite.workload.models()`: L layers, D hidden, E attention width (heads x head size), s sequence, V vocabulary.

    N_matmul              every matrix that a token is multiplied with: the layers' linear maps and the head V·D (also where it
                          is tied to the embedding); not the embedding lookup, learned positions, norms or biases
    forward per token     2·N_matmul + 2·L·s·E       QKᵀ and AV cost 4·s·E a layer, of which causal attention needs half
    training per token    3 x forward = 6·N_matmul + 6·L·s·E
    MFU                   model FLOP/s per GPU / dense peak of the product's dtype
    HFU                   the same with executed FLOPs (replicated and recomputed work included)

A factor other than dense brings its own FLOPs (`Factor.flops`), so low-rank models count their factors. V is the real
vocabulary: rows padded for tensor parallelism are no model FLOPs.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from suite.machine import Machine, short_name
from suite.record import Metric

Card = Mapping[str, Any]
PAD = 128  # rows of a padded embedding are a multiple of this

# Dense TFLOP/s by short GPU name: no structured sparsity, tensor cores with float32 accumulation; `fp32` without them.
# Where the source prints only sparse values, half of them.
TABLE: tuple[tuple[str, dict[str, float]], ...] = (
    # A100 datasheet; A800 differs in NVLink only
    ("a100-40g a100-80g a100-40g-pcie a100-80g-pcie a800-40g a800-80g a800-40g-pcie a800-80g-pcie",
     {"bf16": 312.0, "tf32": 156.0, "fp32": 19.5}),
    ("a30", {"bf16": 165.0, "tf32": 82.0, "fp32": 10.3}),  # A30 datasheet
    ("a10", {"bf16": 125.0, "tf32": 62.5, "fp32": 31.2}),  # A10 datasheet
    ("a40", {"bf16": 149.7, "tf32": 74.8, "fp32": 37.4}),  # A40 datasheet
    ("rtx-3090", {"bf16": 71.0, "tf32": 35.6, "fp32": 35.6}),  # GA102 whitepaper, appendix A
    # H100, GH200 and H200 datasheets (SXM and NVL), H100 PCIe of the first one; H800 differs in NVLink and float64 only
    ("h100 h800 gh200 h200", {"fp8": 1979.0, "bf16": 989.5, "tf32": 494.5, "fp32": 67.0}),
    ("h100-pcie h800-pcie", {"fp8": 1513.0, "bf16": 756.5, "tf32": 378.0, "fp32": 51.0}),
    ("h100-nvl h800-nvl h200-nvl", {"fp8": 1670.5, "bf16": 835.5, "tf32": 417.5, "fp32": 60.0}),
    ("h20 h20-3e", {"fp8": 296.0, "bf16": 148.0, "tf32": 74.0, "fp32": 44.0}),  # H20 datasheet, prints dense values
    ("l4", {"fp8": 242.5, "bf16": 121.0, "tf32": 60.0, "fp32": 30.3}),  # L4 datasheet
    ("l40", {"fp8": 362.0, "bf16": 181.05, "tf32": 90.5, "fp32": 90.5}),  # L40 datasheet
    ("l40s", {"fp8": 733.0, "bf16": 362.05, "tf32": 183.0, "fp32": 91.6}),  # L40S datasheet
    ("rtx-4090", {"fp8": 330.3, "bf16": 165.2, "tf32": 82.6, "fp32": 82.6}),  # Ada whitepaper, appendix A
    ("rtx6000ada", {"fp8": 728.5, "bf16": 364.25, "tf32": 182.1, "fp32": 91.1}),  # RTX 6000 Ada datasheet
    # HGX B200 and GB200 NVL72 datasheet, one GPU; Blackwell Ultra: architecture brief, one GPU of HGX B300 and GB300 NVL72
    ("b200", {"fp4": 9000.0, "fp8": 4500.0, "bf16": 2250.0, "tf32": 1100.0, "fp32": 75.0}),
    ("gb200", {"fp4": 10000.0, "fp8": 5000.0, "bf16": 2500.0, "tf32": 1250.0, "fp32": 80.0}),
    ("b300", {"fp4": 14000.0, "fp8": 4500.0, "bf16": 2250.0, "tf32": 1100.0}),
    ("gb300", {"fp4": 15000.0, "fp8": 5000.0, "bf16": 2500.0, "tf32": 1250.0, "fp32": 80.0}),
    ("rtx-5090", {"fp4": 1676.0, "fp8": 419.0, "bf16": 209.5, "tf32": 104.8, "fp32": 104.8}),  # RTX Blackwell whitepaper
    ("rtxpro6000-workstation", {"fp4": 2015.2, "fp8": 1007.6, "bf16": 503.8, "tf32": 251.9, "fp32": 126.0}),  # RTX PRO whitepaper
)
PEAKS = {name: row for names, row in TABLE for name in names.split()}
SAME = {"bfloat16": "bf16", "fp16": "bf16", "float16": "bf16", "float32": "fp32", "nvfp4": "fp4", "mxfp4": "fp4"}
WIDE = ("bf16", "tf32", "fp32")  # dtypes of products that are not quantised


class Factor(Protocol):
    def flops(self, site: tuple[int, str], d_in: int, d_out: int, tokens: int) -> int: ...


def peak(gpu: str, dtype: str) -> tuple[float | None, str | None]:
    """(dense peak in TFLOP/s, None) or (None, why not) of an NVML product name or short name."""
    short = short_name(gpu)
    if " MIG " in gpu:
        return None, f"{gpu}: a MIG slice has no published peak"
    if short not in PEAKS:
        return None, f"no dense peak known for {gpu or 'this device'}"
    kind = SAME.get(dtype, dtype)
    if kind not in PEAKS[short]:
        return None, f"{gpu} has no published {kind} peak"
    return PEAKS[short][kind], None


def linears(card: Card) -> dict[str, tuple[int, int]]:
    """A layer's linear maps: `sublayer.map` -> (d_in, d_out)."""
    d, f, width, kv = card["hidden"], card["ffn"], _attention_width(card), _kv_width(card)
    maps = {"attention.q": (d, width), "attention.k": (d, kv), "attention.v": (d, kv), "attention.o": (width, d)}
    if card["gated"]:
        maps["ffn.gate"] = (d, f)
    return {**maps, "ffn.up": (d, f), "ffn.down": (f, d)}


def block_parameters(card: Card) -> int:
    """Weights of all layers' linear maps, dense, without biases."""
    return card["layers"] * sum(d_in * d_out for d_in, d_out in linears(card).values())


def parameters(card: Card, vocab: int | None = None, padded: bool = False) -> int:
    """Exact parameter count of the dense model: a tied embedding once, an untied head on top, positions, biases and norms
    (LayerNorm has two vectors, RMSNorm one; QK-norm one over all heads of Q and one over all of K).

    vocab: rows of the embedding, the card's where None; padded: rounded up to a multiple of 128, as it lies in memory.
    """
    d, bias = card["hidden"], card["bias"]
    rows = card["vocab"] if vocab is None else vocab
    rows = -(-rows // PAD) * PAD if padded else rows
    norm = d * (2 if card["norm"] == "layernorm" else 1)
    maps = linears(card)
    biases = sum(maps[f"attention.{name}"][1] for name in "qkv") * bool(bias["qkv"]) + maps["attention.o"][1] * bool(bias["out"])
    biases += sum(d_out for name, (_, d_out) in maps.items() if name.startswith("ffn.")) * bool(bias["ffn"])
    qk_norms = (_attention_width(card) + _kv_width(card)) * bool(card["qk_norm"])
    embedding = rows * d * (1 if card["tied"] else 2)
    positions = card["positions"] * d if card["position"] == "learned" else 0
    return embedding + positions + block_parameters(card) + card["layers"] * (2 * norm + biases + qk_norms) + norm


def forward_flops(card: Card, tokens: int, seq: int, vocab: int | None = None, factor: Factor | None = None) -> int:
    """Model FLOPs of one forward pass over `tokens` tokens in sequences of `seq`."""
    rows = card["vocab"] if vocab is None else vocab
    if factor is None:
        blocks = 2 * tokens * block_parameters(card)
    else:
        blocks = sum(factor.flops((layer, name), d_in, d_out, tokens)
                     for layer in range(card["layers"]) for name, (d_in, d_out) in linears(card).items())
    return blocks + 2 * tokens * rows * card["hidden"] + 2 * tokens * card["layers"] * seq * _attention_width(card)


def model_flops_per_token(card: Card, seq: int, vocab: int | None = None, factor: Factor | None = None) -> int:
    """Forward and backward FLOPs a token: 6·N_matmul + 6·L·seq·E."""
    return 3 * forward_flops(card, 1, seq, vocab, factor)


def utilization(tflops: float, executed: float, device: Any, dtype: str) -> list[Metric]:
    """`mfu` and `hfu` in %, and the `dense_peak` they are of.

    tflops: model TFLOP/s per GPU; executed: executed over model FLOPs, 1 where nothing is replicated or recomputed;
    device: torch's, or an NVML product name; dtype: of the products. Quantised products have no MFU: their model TFLOP/s
    stand alone. Raises ValueError over 100 %: the peak or the FLOPs are wrong.
    """
    gpu = device if isinstance(device, str) else _product(device)
    top, reason = peak(gpu, dtype) if gpu else (None, "no GPU")
    if gpu and SAME.get(dtype, dtype) not in WIDE:
        top, reason = None, f"no utilization of products in {dtype}: model TFLOP/s only"
    if top is None:
        return [Metric("mfu", None, "%", reason=reason), Metric("hfu", None, "%", reason=reason),
                Metric("dense_peak", None, "TFLOP/s", "paper", reason=reason)]
    shares = {"mfu": 100 * tflops / top, "hfu": 100 * tflops * executed / top}
    for name, share in shares.items():
        if not 0 <= share <= 100:
            raise ValueError(f"{name}: {share:.1f} % of the dense {dtype} peak of {gpu}, {top} TFLOP/s: wrong FLOPs, time or peak")
    return [*(Metric(name, share, "%") for name, share in shares.items()), Metric("dense_peak", top, "TFLOP/s", "paper")]


def _product(device: Any) -> str | None:
    gpus = Machine.here().gpus
    number = device.index or 0
    return None if device.type != "cuda" else gpus[number].name if number < len(gpus) else "a GPU that NVML does not show"


def _attention_width(card: Card) -> int:
    return card["heads"] * card.get("head_dim", card["hidden"] // card["heads"])


def _kv_width(card: Card) -> int:
    return card["kv_heads"] * card.get("head_dim", card["hidden"] // card["heads"])
