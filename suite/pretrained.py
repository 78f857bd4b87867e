"""Hugging Face checkpoints (safetensors): their names and shapes <-> ours. Reads without transformers.

    ours                                 GPT-2 (below `transformer.`)       Qwen2, LLaMA, OLMo-2 (below `model.`)
    embed.weight             [V, D]      wte.weight                         embed_tokens.weight
    positions.weight         [S, D]      wpe.weight                         -
    layers.i.attention.norm              h.i.ln_1                           layers.i.input_layernorm
                                                                            OLMo-2: layers.i.post_attention_layernorm
    layers.i.attention.{q,k,v}           rows of h.i.attn.c_attn, in order  layers.i.self_attn.{q,k,v}_proj
    layers.i.attention.{q,k}_norm        -                                  layers.i.self_attn.{q,k}_norm
    layers.i.attention.o                 h.i.attn.c_proj                    layers.i.self_attn.o_proj
    layers.i.ffn.norm                    h.i.ln_2                           layers.i.post_attention_layernorm
                                                                            OLMo-2: layers.i.post_feedforward_layernorm
    layers.i.ffn.{gate,up,down}          h.i.mlp.{-,c_fc,c_proj}            layers.i.mlp.{gate,up,down}_proj
    norm                                 ln_f                               norm
    head.weight              [V, D]      (tied)                             lm_head.weight, not below `model.`

GPT-2 stores its matrices [in, out], all others and we [out, in]. Our vocabulary has rows up to `padded(vocab)`: zeros here.
A checkpoint may hold some rows more than the tokenizer has tokens (at most 1 %, or 128): they are left out. Files
of the bare decoder, without the prefix, load as well. Slices are read lazily: nothing is loaded that is not asked for.
"""
from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from suite.factor.dense import Dense
from suite.model import PAD, Card, members
from suite.seams import Spec
from suite.weights import Member, Weights

MODEL_TYPES = {"gpt": "gpt2", "qwen2.5": "qwen2", "llama": "llama", "olmo2": "olmo2"}
GPT2 = {"attention.norm": "ln_1", "attention.q": "attn.c_attn", "attention.k": "attn.c_attn", "attention.v": "attn.c_attn",
        "attention.o": "attn.c_proj", "ffn.norm": "ln_2", "ffn.up": "mlp.c_fc", "ffn.down": "mlp.c_proj",
        "embed": "wte", "positions": "wpe", "norm": "ln_f"}
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")  # stored by old releases, no parameters

Read = Callable[..., Tensor]  # (dim=0, start=0, length=None) -> the slice of the tensor in our orientation


class PretrainedError(ValueError):
    """One line: the file, the tensor or key, what is wrong."""


@dataclass(frozen=True)
class Place:
    """Where one of our tensors lies in a checkpoint."""

    name: str
    transposed: bool = False
    first: int = 0  # its first row in the stored tensor, which several of ours may share
    rows: int | None = None  # rows of the stored tensor where it is shared
    vocabulary: bool = False


def place(member: str, card: Card) -> Place:
    """Raises PretrainedError for a tensor that the family's checkpoints do not have (a factor other than dense)."""
    path, _, kind = member.rpartition(".")
    if path == "head":
        return Place("lm_head.weight", vocabulary=True)
    layer, at = "", path
    if path.startswith("layers."):
        _, layer, at = path.split(".", 2)
    if kind not in ("weight", "bias"):
        raise PretrainedError(f"{member}: Hugging Face's {MODEL_TYPES[card['family']]} has no such tensor")
    if card["family"] == "gpt":
        name = f"transformer.{f'h.{layer}.' if layer else ''}{GPT2[at]}.{kind}"
        shared = GPT2[at] == "attn.c_attn"
        first = ("q", "k", "v").index(at[-1]) * card["hidden"] if shared else 0
        matrix = bool(layer) and kind == "weight" and not at.endswith("norm")
        return Place(name, matrix, first, 3 * card["hidden"] if shared else None, at == "embed")
    norms = ("input_layernorm", "post_attention_layernorm") if card["place"] == "pre" else (
        "post_attention_layernorm", "post_feedforward_layernorm")
    sub, _, linear = at.partition(".")
    if not layer:
        name = {"embed": "embed_tokens"}.get(at, at)
    elif linear == "norm":
        name = norms[sub == "ffn"]
    else:
        name = f"{'self_attn' if sub == 'attention' else 'mlp'}.{linear}{'' if linear.endswith('_norm') else '_proj'}"
    return Place(f"model.{f'layers.{layer}.' if layer else ''}{name}.{kind}", vocabulary=at == "embed")


class _State:
    """Tensors in memory by their Hugging Face names."""

    origin = "state"

    def __init__(self, state: Mapping[str, Tensor]):
        self.state = state

    def names(self) -> set[str]:
        return set(self.state)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.state[name].shape)

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        return self.state[name][index]


class _Files:
    """One safetensors file, or a folder with model.safetensors or with shards and their index. Opening reads headers only."""

    def __init__(self, path: Path):
        self.origin = path.name
        index = path / "model.safetensors.index.json"
        if path.is_dir() and index.exists():
            shards = _json(index).get("weight_map")
            if not isinstance(shards, dict) or not shards:
                raise PretrainedError(f"{index}: weight_map: expected a map of tensors to files")
            files = sorted({path / str(file) for file in shards.values()})
        elif path.is_dir() and (path / "model.safetensors").exists():
            files = [path / "model.safetensors"]
        elif path.is_file():
            files = [path]
        elif path.is_dir():
            raise PretrainedError(f"{path}: not a checkpoint: neither model.safetensors nor model.safetensors.index.json in it")
        else:
            raise PretrainedError(f"{path}: no such file or folder")
        self.slices: dict[str, Any] = {}
        self.open = []
        for file in files:
            try:
                self.open.append(safe_open(file, framework="pt"))
                self.slices |= {name: self.open[-1].get_slice(name) for name in self.open[-1].keys()}  # noqa: SIM118
            except FileNotFoundError:
                raise PretrainedError(f"{file}: no such file, but {index.name} names it") from None
            except (SafetensorError, OSError) as error:
                raise PretrainedError(f"{file}: truncated or no safetensors file: {error}") from None
        self.config = path / "config.json" if path.is_dir() else path.with_name("config.json")

    def names(self) -> set[str]:
        return set(self.slices)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.slices[name].get_shape())

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        return self.slices[name][index]


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PretrainedError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise PretrainedError(f"{path}: expected a map")
    return value


def _check_config(path: Path, card: Card) -> None:
    """What shapes do not show (heads, theta, eps, activation) must be the card's; keys that are absent pass."""
    config = _json(path)
    rope = config.get("rope_parameters") or {}
    found = {"rope_theta": rope.get("rope_theta"), **{k: v for k, v in config.items() if v is not None}}
    gpt = card["family"] == "gpt"
    expected = {
        "model_type": (MODEL_TYPES[card["family"]],),
        "n_head" if gpt else "num_attention_heads": (card["heads"],),
        "num_key_value_heads": (card["kv_heads"],),
        "layer_norm_epsilon" if gpt else "rms_norm_eps": (card["eps"],),
        "rope_theta": (card.get("theta"),),
        "activation_function" if gpt else "hidden_act": {"gelu_tanh": ("gelu_new", "gelu_pytorch_tanh")}.get(
            card["activation"], (card["activation"],)),
        "tie_word_embeddings": (card["tied"],),
    }
    for key, values in expected.items():
        if found.get(key) is not None and found[key] not in values:
            raise PretrainedError(f"{path}: {key} is {found[key]!r}, {card['name']} has {values[0]!r}")
    scaling = config.get("rope_scaling") or {}  # files of before transformers 5
    kind = rope.get("rope_type") or scaling.get("rope_type") or scaling.get("type") or "default"
    if kind != "default":
        raise PretrainedError(f"{path}: rope scaling {kind!r} is not built")


def _find(store: _State | _Files, where: Place, card: Card) -> str:
    """The stored name, with or without the prefix of the decoder."""
    bare = where.name.partition(".")[2] if where.name.startswith(("transformer.", "model.")) else where.name
    for name in (where.name, bare):
        if name in store.names():
            return name
    raise PretrainedError(f"{store.origin}: no tensor {where.name}, which {card['name']} needs")


def _check_shape(store: _State | _Files, name: str, where: Place, member: Member, card: Card, vocab: int) -> None:
    stored = store.shape(name)
    needed = [where.rows or member.shape[0], *member.shape[1:]]
    if where.vocabulary:
        needed[0] = vocab
        if len(stored) == 2 and vocab <= stored[0] <= vocab + max(PAD, vocab // 100):
            needed[0] = stored[0]
    if where.transposed:
        needed.reverse()
    if list(stored) != needed:
        raise PretrainedError(f"{store.origin}: {name} has shape {list(stored)}, {card['name']} needs {needed}")


def _read(store: _State | _Files, name: str, where: Place, shape: tuple[int, ...], vocab: int, dim: int = 0, start: int = 0,
          length: int | None = None) -> Tensor:
    ranges = [slice(0, n) for n in shape]
    ranges[dim] = slice(start, shape[dim] if length is None else start + length)
    rows = ranges[0].stop - ranges[0].start
    here = rows
    if where.vocabulary:
        # of a slice past the vocabulary one row is read all the same: it gives the dtype
        here = min(max(vocab - ranges[0].start, 0), rows)
        ranges[0] = slice(ranges[0].start, ranges[0].start + here) if here else slice(0, 1)
    ranges[0] = slice(ranges[0].start + where.first, ranges[0].stop + where.first)
    got = store.read(name, tuple(reversed(ranges)) if where.transposed else tuple(ranges))
    got = got.t() if where.transposed else got
    return got if here == rows else torch.cat([got[:here], got.new_zeros(rows - here, *got.shape[1:])])


def tensors(source: Path | str | Mapping[str, Tensor], card: Card, vocab: int) -> Iterator[tuple[str, Read]]:
    """(our name, function that reads a slice) for every tensor of the model. `source`: a file, a folder, or tensors by
    their Hugging Face names (weights or gradients). All names and shapes are checked before the first is yielded.
    Raises PretrainedError: a tensor missing, of another shape or too many, a truncated file, another configuration."""
    store = _State(source) if isinstance(source, Mapping) else _Files(Path(source))
    if isinstance(store, _Files) and store.config.exists():
        _check_config(store.config, card)
    found: list[tuple[str, Read]] = []
    used = {"lm_head.weight"} if card["tied"] else set()
    for member in members(card, vocab, Dense(), lambda name, shape: Spec()):
        where = place(member.name, card)
        name = _find(store, where, card)
        _check_shape(store, name, where, member, card, vocab)
        used.add(name)
        found.append((member.name, partial(_read, store, name, where, member.shape, vocab)))
    for name in sorted(store.names() - used):
        if not name.endswith(BUFFERS):
            raise PretrainedError(f"{store.origin}: holds {name}, which {card['name']} does not have")
    return iter(found)


@torch.no_grad()
def load_into(weights: Weights, path: Path | str, card: Card, vocab: int) -> None:
    """Fills this rank's leaves from a checkpoint; of each tensor only the rank's slice is read. Raises PretrainedError."""
    reads = dict(tensors(path, card, vocab))
    for member in weights.members.values():
        if member.name not in reads:
            raise PretrainedError(f"{Path(path).name}: has dense maps; {member.name} is not in it")
        start, length = member.spec.span(member.shape, weights.index, weights.size)
        here = reads[member.name]() if member.spec.dim is None else reads[member.name](member.spec.dim, start, length)
        weights.local(member.name).copy_(here)


def hf_state(ours: Mapping[str, Tensor], card: Card, vocab: int) -> dict[str, Tensor]:
    """The reverse: our unsharded tensors -> Hugging Face's by name, without padding. Tied: no lm_head.weight."""
    pieces: dict[Place, list[Tensor]] = {}
    for name, value in ours.items():
        where = place(name, card)
        key = Place(where.name, where.transposed)
        pieces.setdefault(key, []).append(value[:vocab] if where.vocabulary else value)
    joined = {key: torch.cat(parts) if len(parts) > 1 else parts[0] for key, parts in pieces.items()}
    return {key.name: (value.t() if key.transposed else value).contiguous() for key, value in joined.items()}


def hf_config(card: Card, vocab: int, seq: int) -> Any:
    """The transformers configuration of a card: no dropout, no key-value cache. Needs transformers (extra `test`)."""
    import transformers

    if seq > card.get("positions", seq):
        raise PretrainedError(f"{card['name']}: {seq} tokens a sequence, but {card['positions']} positions")
    common = {"vocab_size": vocab, "initializer_range": card["init_std"], "tie_word_embeddings": card["tied"], "use_cache": False,
              "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    kind = MODEL_TYPES[card["family"]]
    if kind == "gpt2":
        return transformers.GPT2Config(
            n_positions=card["positions"], n_embd=card["hidden"], n_layer=card["layers"], n_head=card["heads"], n_inner=card["ffn"],
            activation_function="gelu_new", layer_norm_epsilon=card["eps"],
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **common)
    return transformers.AutoConfig.for_model(
        kind, hidden_size=card["hidden"], intermediate_size=card["ffn"], num_hidden_layers=card["layers"],
        num_attention_heads=card["heads"], num_key_value_heads=card["kv_heads"], hidden_act=card["activation"],
        max_position_embeddings=seq, rms_norm_eps=card["eps"],
        rope_parameters={"rope_type": "default", "rope_theta": card["theta"]}, **common)
