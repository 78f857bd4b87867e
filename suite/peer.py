"""`implementation: transformers`: the same model, batch and numerics as Hugging Face's users run them, for comparison.

    loss = model(input_ids=ids, labels=targets)         its own head, float32 logits and cross-entropy

Random weights from its own configuration (nothing is downloaded), in the case's numerics: weights in the precision's
`master` dtype, products in its `compute` dtype (torch.autocast where the two differ). `compile: true` is torch.compile of
the whole model. The training loop drives it as it drives ours: same data, optimizer, clipping, accumulation and clock.

Two things are done for it that an experienced user would do, for a slow baseline flatters whatever is compared with it
(seen with transformers 5.24, torch 2.13):
 - Under torch.compile its causal mask is built in full (torch before 2.14 folds `torch.compiler.is_exporting()` to True),
   which shuts out flash attention. Through its public attention interface the mask is left out: attention is told
   `is_causal` instead, as it does without compilation.
 - GPT-2's class name matches no loss, so that a warning breaks its graph before the cross-entropy: the loss is named.
"""
from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from suite.case import Case
from suite.factor.dense import build as dense
from suite.model import Card
from suite.precision.plain import Plain
from suite.pretrained import hf_config
from suite.seams import load, make

ATTENTION = "sdpa_is_causal"


class PeerError(ValueError):
    """One line: what of the case transformers cannot run."""


class Peer:
    """module: a causal language model; compute: dtype of its products."""

    def __init__(self, module: torch.nn.Module, compute: torch.dtype, compile: bool):
        self.module, self.compute = module, compute
        self._call: Any = torch.compile(module) if compile else module

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        """ids, targets int64 [B, S], targets already one token ahead -> mean cross-entropy, a scalar."""
        weights = next(self.module.parameters())
        mixed = weights.dtype != self.compute
        with torch.autocast(weights.device.type, self.compute) if mixed else contextlib.nullcontext():
            return self._call(input_ids=ids, labels=targets, shift_labels=targets).loss

    def parameters(self) -> list[torch.nn.Parameter]:
        """Every parameter once (tied ones too)."""
        return list(self.module.parameters())


def _attention() -> str:
    """Registers scaled_dot_product_attention without a mask; its name."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(ATTENTION, sdpa_attention_forward)
    AttentionMaskInterface.register(ATTENTION, _no_mask)
    return ATTENTION


def _no_mask(*args: Any, **kwargs: Any) -> None:
    return None


def build(case: Case, card: Card, vocab: int, device: torch.device) -> Peer:
    """The model on the device, drawn from the case's seed. Raises PeerError for a case that transformers does not cover."""
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise PeerError("implementation: transformers is not installed; it comes with the extra `test`") from None
    precision = make("precision", case.precision)
    if not isinstance(precision, Plain):
        raise PeerError(f"precision: {case.precision.name} has no counterpart in transformers")
    if load("factor", case.factor.name) is not dense:
        raise PeerError(f"factor: {case.factor.name} has no counterpart in transformers")
    if case.layout.off_default("layout"):
        raise PeerError(f"layout: {case.layout.off_default('layout')} has no counterpart in transformers")
    if case.init is not None:
        raise PeerError("init: a checkpoint is read by implementation triaxis only")
    config = hf_config(card, vocab, case.data.seq)
    # the generator is put back: what else draws from it must not depend on the implementation
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.device(device):
        torch.manual_seed(case.seed)
        module = AutoModelForCausalLM.from_config(config, dtype=precision.master, attn_implementation=_attention())
    module.loss_type = "ForCausalLM"
    return Peer(module.train(), precision.compute, bool(case.compile))
