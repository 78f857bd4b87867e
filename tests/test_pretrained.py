"""Hugging Face checkpoints: read as transformers wrote them, by slices, and refused in one clear line."""
from __future__ import annotations

import json
import math
import re
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from suite import pretrained
from suite.factor.dense import Dense
from suite.layout.megatron import Megatron
from suite.layout.megatron_sp import MegatronSP
from suite.model import Decoder
from suite.precision.float32 import build as float32
from suite.pretrained import PretrainedError, hf_config, hf_state, load_into, tensors
from suite.workload import models

TINY = ("gpt-tiny", "qwen-tiny", "llama-tiny", "olmo2-tiny")
VOCAB, SEQ = 300, 16


def card_of(name: str) -> dict:
    return models()[name] | {"layers": 2}


def decoder(card, index: int = 0, size: int = 1, layout=Megatron) -> Decoder:
    place = SimpleNamespace(index=index, size=size)  # of the wire only the place in the group is asked
    made = layout(card=card, factor=Dense(), precision=float32(), tp=place)
    return Decoder(card, made, vocab=VOCAB, seq=SEQ, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """name -> (folder as save_pretrained wrote it, the transformers model)."""
    transformers = pytest.importorskip("transformers")
    made = {}
    for name in TINY:
        torch.manual_seed(3)
        model = transformers.AutoModelForCausalLM.from_config(hf_config(card_of(name), VOCAB, SEQ), attn_implementation="eager")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder, max_shard_size="400KB" if name in ("gpt-tiny", "olmo2-tiny") else "1GB")
        made[name] = folder, model.eval()
    return made


@pytest.fixture
def copy(written, tmp_path):
    """name -> a copy of its folder that a test may damage."""
    return lambda name: shutil.copytree(written[name][0], tmp_path / name)


def refusal(path, name: str = "qwen-tiny", vocab: int = VOCAB, **card) -> str:
    with pytest.raises(PretrainedError) as caught:
        load_into(decoder(card_of("qwen-tiny")).weights, path, card_of(name) | card, vocab)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", TINY)
def test_a_saved_checkpoint_gives_its_logits(name, written, monkeypatch):
    folder, peer = written[name]
    assert (folder / "model.safetensors.index.json").exists() == (name in ("gpt-tiny", "olmo2-tiny"))
    model = decoder(card_of(name))
    ids = torch.randint(VOCAB, (2, SEQ))
    with torch.no_grad():
        want = peer(input_ids=ids).logits
        monkeypatch.setitem(sys.modules, "transformers", None)
        load_into(model.weights, folder, model.card, VOCAB)
        got = model.logits(ids).view(2, SEQ, -1)
    assert (got[..., :VOCAB] - want).norm() <= 1e-5 * want.norm()
    assert not model.weights.local("embed.weight")[VOCAB:].any()


@pytest.mark.parametrize("layout", [Megatron, MegatronSP])
@pytest.mark.parametrize("name", TINY)
def test_each_rank_reads_its_slices_alone(name, layout, written, monkeypatch):
    folder = written[name][0]
    whole = decoder(card_of(name))
    load_into(whole.weights, folder, whole.card, VOCAB)
    seen: list[int] = []
    read = pretrained._Files.read

    def spy(self, key, index):
        got = read(self, key, index)
        seen.append(got.numel())
        return got

    monkeypatch.setattr(pretrained._Files, "read", spy)
    for index in range(4):
        shard = decoder(card_of(name), index, 4, layout)
        seen.clear()
        load_into(shard.weights, folder, shard.card, VOCAB)
        for key, member in shard.weights.members.items():
            assert torch.equal(shard.weights.local(key), member.spec.local(whole.weights.local(key), index, 4)), key
        local = sum(math.prod(shard.weights.local(key).shape) for key in shard.weights.members)
        # a slice wholly in the padding reads one row, for its dtype
        assert sum(seen) <= local + 2 * shard.card["hidden"]


@pytest.mark.parametrize("name", TINY)
def test_names_there_and_back(name, written):
    folder, peer = written[name]
    card = card_of(name)
    ours = {key: read() for key, read in tensors(folder, card, VOCAB)}
    assert ours.keys() == decoder(card).weights.members.keys()
    back = hf_state(ours, card, VOCAB)
    stored = dict(peer.named_parameters())
    assert back.keys() == stored.keys()
    for key, value in stored.items():
        assert torch.equal(back[key], value), key


def test_a_slice_of_a_fused_transposed_tensor(written):
    card = card_of("gpt-tiny")
    reads = dict(tensors(written["gpt-tiny"][0], card, VOCAB))
    fused = written["gpt-tiny"][1].transformer.h[1].attn.c_attn
    assert torch.equal(reads["layers.1.attention.v.weight"](1, 32, 16), fused.weight[32:48, 256:384].t())
    assert torch.equal(reads["layers.1.attention.k.bias"](0, 8, 4), fused.bias[136:140])
    assert not reads["embed.weight"](0, 320, 64).any() and reads["embed.weight"](0, 320, 64).shape == (64, 128)


def test_one_file_without_prefix_buffers_and_dtype(copy, tmp_path):
    folder = copy("llama-tiny")
    state = {key.removeprefix("model."): value.bfloat16() for key, value in load_file(folder / "model.safetensors").items()}
    state["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16)
    save_file(state, tmp_path / "bare.safetensors")
    reads = dict(tensors(tmp_path / "bare.safetensors", card_of("llama-tiny"), VOCAB))
    assert reads["norm.weight"]().dtype == reads["embed.weight"](0, 290, 20).dtype == torch.bfloat16
    assert torch.equal(reads["embed.weight"](0, 290, 20)[:10], state["embed_tokens.weight"][290:])


def test_a_few_rows_past_the_tokens_are_left_out(written):
    reads = dict(tensors(written["qwen-tiny"][0], card_of("qwen-tiny"), 200))
    got = reads["embed.weight"]()
    assert torch.equal(got[:200], written["qwen-tiny"][1].model.embed_tokens.weight[:200]) and got.shape[0] == 256
    assert not got[200:].any()


@pytest.mark.parametrize("vocab", [100, 301])
def test_another_vocabulary(vocab, written):
    folder = written["qwen-tiny"][0]
    message = refusal(folder, vocab=vocab)
    assert message == f"{folder.name}: model.embed_tokens.weight has shape [300, 128], qwen-tiny needs [{vocab}, 128]"


def test_a_missing_tensor(copy):
    folder = copy("qwen-tiny")
    state = load_file(folder / "model.safetensors")
    del state["model.layers.1.self_attn.k_proj.bias"]
    save_file(state, folder / "model.safetensors")
    assert refusal(folder) == "qwen-tiny: no tensor model.layers.1.self_attn.k_proj.bias, which qwen-tiny needs"


def test_another_shape_names_both(copy):
    folder = copy("gpt-tiny")
    (folder / "config.json").unlink()
    message = refusal(folder, "gpt-tiny", hidden=64, heads=2, kv_heads=2)
    assert message == "gpt-tiny: transformer.wte.weight has shape [300, 128], gpt-tiny needs [300, 64]"
    message = refusal(folder, "gpt-tiny", ffn=256)
    assert message == "gpt-tiny: transformer.h.0.mlp.c_fc.weight has shape [128, 512], gpt-tiny needs [128, 256]"


def test_a_tensor_too_many(copy):
    message = refusal(copy("qwen-tiny"), layers=1)
    assert re.fullmatch(r"qwen-tiny: holds model\.layers\.1\.\S+, which qwen-tiny does not have", message)


@pytest.mark.parametrize("keep", [0, 5, 300, -1])
def test_a_truncated_file(keep, copy):
    file = copy("qwen-tiny") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert refusal(file.parent).startswith(f"{file}: truncated or no safetensors file: ")


def test_what_is_no_checkpoint(tmp_path, copy):
    assert refusal(tmp_path / "nowhere") == f"{tmp_path / 'nowhere'}: no such file or folder"
    (tmp_path / "empty").mkdir()
    assert refusal(tmp_path / "empty").startswith(f"{tmp_path / 'empty'}: not a checkpoint: neither model.safetensors nor ")
    (tmp_path / "text").write_text("To be, or not to be, that is the question")
    assert refusal(tmp_path / "text").startswith(f"{tmp_path / 'text'}: truncated or no safetensors file: ")
    folder = copy("olmo2-tiny")
    index = folder / "model.safetensors.index.json"
    lost = folder / sorted(json.loads(index.read_text())["weight_map"].values())[-1]
    lost.unlink()
    assert refusal(folder, "olmo2-tiny") == f"{lost}: no such file, but model.safetensors.index.json names it"
    index.write_text("{")
    assert refusal(folder, "olmo2-tiny").startswith(f"{index}: not JSON: ")
    index.write_text("{}")
    assert refusal(folder, "olmo2-tiny") == f"{index}: weight_map: expected a map of tensors to files"


@pytest.mark.parametrize("name, change, words", [
    ("qwen-tiny", {"heads": 8}, "num_attention_heads is 4, qwen-tiny has 8"),
    ("qwen-tiny", {"theta": 5e5}, "rope_theta is 1000000.0, qwen-tiny has 500000.0"),
    ("qwen-tiny", {"eps": 1e-5}, "rms_norm_eps is 1e-06, qwen-tiny has 1e-05"),
    ("qwen-tiny", {"tied": False}, "tie_word_embeddings is True, qwen-tiny has False"),
    ("gpt-tiny", {"heads": 8}, "n_head is 4, gpt-tiny has 8"),
    ("llama-tiny", {"family": "olmo2"}, "model_type is 'llama', llama-tiny has 'olmo2'")])
def test_a_configuration_that_shapes_do_not_show(name, change, words, written):
    folder = written[name][0]
    assert refusal(folder, name, **change) == f"{folder / 'config.json'}: {words}"


def test_rope_scaling_is_refused(copy):
    folder = copy("llama-tiny")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["rope_type"] = "yarn"
    (folder / "config.json").write_text(json.dumps(config))
    assert refusal(folder, "llama-tiny") == f"{folder / 'config.json'}: rope scaling 'yarn' is not built"


def test_more_tokens_than_positions():
    with pytest.raises(PretrainedError, match="gpt-tiny: 513 tokens a sequence, but 512 positions"):
        hf_config(models()["gpt-tiny"], VOCAB, 513)
