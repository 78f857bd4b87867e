"""The decoder against transformers (the oracle), parameter counts, the drawing of weights, recomputation, compilation."""
from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from kernels.philox import fold, normal, philox
from suite.assemble import assemble
from suite.case import Case
from suite.factor.dense import Dense
from suite.layout.megatron import Megatron
from suite.mesh import Mesh
from suite.model import Decoder, members, padded
from suite.precision.float32 import build as float32
from suite.pretrained import hf_config, hf_state, tensors
from suite.seams import Spec
from suite.workload import models

TINY = ("gpt-tiny", "qwen-tiny", "llama-tiny", "olmo2-tiny")
SEQ, BATCH = 24, 2


def decoder(name: str, vocab: int, *, compile: bool = False, recompute: str = "none", **more) -> Decoder:
    case = Case(model=name, precision="float32", layout={"name": "megatron", "recompute": recompute}, compile=compile,
                data={"seq": SEQ, "batch": BATCH}, **more)
    model = assemble(case, Mesh(), vocab).model
    scramble(model)
    return model


@torch.no_grad()
def scramble(model: Decoder) -> None:
    """Every tensor random, gains and biases too, so that a missing or swapped one shows; padded rows of the vocabulary large."""
    for number, name in enumerate(model.weights.members):
        here = model.weights.local(name)
        draw = torch.randn(here.shape, generator=torch.Generator().manual_seed(number))
        gain = model.weights.members[name].std is None
        here.copy_(1 + 0.3 * draw if gain else draw * (0.09 if here.ndim == 2 else 0.3))
        if name in ("embed.weight", "head.weight"):
            here[model.vocab:] = 5.0


def batch(vocab: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(vocab, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(7))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def gradients(model: Decoder, vocab: int) -> tuple[Tensor, dict[str, Tensor]]:
    for leaf in model.weights.leaves.values():
        leaf.grad = None
    loss = model.loss(*batch(vocab))
    loss.backward()
    return loss.detach(), {name: model.weights.gradient(name).clone() for name in model.weights.members}


def oracle(model: Decoder, vocab: int):
    transformers = pytest.importorskip("transformers")
    peer = transformers.AutoModelForCausalLM.from_config(hf_config(model.card, vocab, SEQ), attn_implementation="eager").float()
    ours = {name: model.weights.local(name).detach() for name in model.weights.members}
    state = peer.load_state_dict(hf_state(ours, model.card, vocab), strict=False)
    assert not state.unexpected_keys
    assert set(state.missing_keys) <= ({"lm_head.weight"} if model.card["tied"] else set())
    return peer


def check_close(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    """Per tensor: norm of the difference <= tolerance · max(norm, 1e-3 · norm of all)."""
    assert got.keys() == want.keys()
    total = math.sqrt(sum(t.double().square().sum().item() for t in want.values()))
    for name, value in want.items():
        off = (got[name].double() - value.double()).norm().item()
        assert off <= tolerance * max(value.double().norm().item(), 1e-3 * total), f"{name}: off by {off}"


@pytest.mark.parametrize("vocab", [1024, 1000])
@pytest.mark.parametrize("name", TINY)
def test_logits_loss_and_gradients_equal_transformers(name, vocab):
    model = decoder(name, vocab)
    peer = oracle(model, vocab)
    ids, targets = batch(vocab)
    theirs = peer(input_ids=ids, labels=targets, shift_labels=targets)
    theirs.loss.backward()
    with torch.no_grad():
        logits = model.logits(ids).view(BATCH, SEQ, -1)[..., :vocab]
    check_close({"logits": logits}, {"logits": theirs.logits.detach()})

    loss, ours = gradients(model, vocab)
    assert loss.item() == pytest.approx(theirs.loss.item(), rel=1e-6)
    stored = {key: p.grad for key, p in peer.named_parameters()}
    assert all(grad is not None for grad in stored.values())
    check_close(ours, {key: read() for key, read in tensors(stored, model.card, vocab)})


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_gqa_and_tied_embeddings_of_one_family(tied, kv_heads, monkeypatch):
    card = models()["qwen-tiny"] | {"kv_heads": kv_heads, "tied": tied}
    monkeypatch.setitem(models(), "qwen-tiny", card)
    model = decoder("qwen-tiny", 1000)
    peer = oracle(model, 1000)
    ids, targets = batch(1000)
    theirs = peer(input_ids=ids, labels=targets, shift_labels=targets).loss
    theirs.backward()
    loss, ours = gradients(model, 1000)
    assert loss.item() == pytest.approx(theirs.item(), rel=1e-6)
    assert ("head.weight" in ours) != tied
    check_close(ours, {key: read() for key, read in tensors({k: p.grad for k, p in peer.named_parameters()}, card, 1000)})


@pytest.mark.parametrize("name", TINY)
def test_padded_rows_have_no_gradient_and_do_not_move_the_loss(name):
    model = decoder(name, 1000)
    loss, ours = gradients(model, 1000)
    head = "embed.weight" if model.card["tied"] else "head.weight"
    assert len(ours[head]) == padded(1000) == 1024
    assert not ours[head][1000:].any()
    with torch.no_grad():
        model.weights.local(head)[1000:] = -3.0
    assert torch.equal(gradients(model, 1000)[0], loss)


def sizes(card, positions: int | None = None) -> dict[str, int]:
    """Elements by tensor, at the card's vocabulary unpadded."""
    card = card | ({"positions": positions} if positions else {})
    vocab = card["vocab"]
    return {m.name: math.prod((vocab, *m.shape[1:]) if m.shape[0] == padded(vocab) and m.name in ("embed.weight", "head.weight")
                              else m.shape) for m in members(card, vocab, Dense(), lambda name, shape: Spec())}


def count(name: str, **more) -> int:
    return sum(sizes(models()[name], **more).values())


@pytest.mark.parametrize("name, published", [
    ("qwen2.5-0.5b", 494_032_768), ("qwen2.5-1.5b", 1_543_714_304), ("qwen2.5-3b", 3_085_938_688),
    ("qwen2.5-7b", 7_615_616_512), ("qwen2.5-14b", 14_770_033_664)])
def test_parameters_of_qwen(name, published):
    assert count(name) == published


def test_parameters_of_gpt2_at_its_own_positions():
    assert count("gpt-125m", positions=1024) == 124_439_808  # gpt2
    assert count("gpt-350m", positions=1024) == 354_823_168  # gpt2-medium


@pytest.mark.parametrize("name, billions", [("gpt-125m", 0.125), ("gpt-350m", 0.356), ("gpt-1.3b", 1.32), ("gpt-2.7b", 2.65),
                                            ("gpt-6.7b", 6.66), ("gpt-13b", 12.85)])
def test_parameters_of_gpt_by_the_published_formula(name, billions):
    """12 L h² (1 + 13/(12 h) + (V + s)/(12 L h)), Narayanan et al. 2021, eq. 2, which leaves out the last norm's 2 h."""
    card = models()[name]
    layers, h = card["layers"], card["hidden"]
    assert count(name) == 12 * layers * h * h + 13 * layers * h + (card["vocab"] + card["positions"]) * h + 2 * h
    assert count(name) / 1e9 == pytest.approx(billions, rel=5e-3)


@pytest.mark.parametrize("name, billions", [("llama-1b", 1.28), ("llama-3b", 3.27), ("llama-7b", 6.61), ("llama-13b", 12.85),
                                            ("llama-30b", 29.4)])
def test_parameters_of_llama_shapes_tied(name, billions):
    """BOOST, table of sizes: full rank, embeddings tied."""
    assert round(count(name) / 1e9, 1 if billions > 20 else 2) == billions


@pytest.mark.parametrize("name, millions", [("olmo2-70m", 21.0), ("olmo2-150m", 70.8), ("olmo2-370m", 268)])
def test_block_linear_parameters_of_olmo2(name, millions):
    """TetraJet-v2's sizes: the weights of the blocks' linear maps."""
    linear = sum(n for key, n in sizes(models()[name]).items() if key.startswith("layers.") and "norm" not in key)
    assert round(linear / 1e6, 0 if millions > 100 else 1) == millions


@pytest.mark.parametrize("counter, high, key, words", [
    (0, 0, 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (-1, -1, 0xFFFFFFFFFFFFFFFF, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (0x85A308D3243F6A88 - (1 << 64), 0x0370734413198A2E, 0x299F31D0A4093822, "d16cfe09 94fdcceb 5001e420 24126ea1")])
def test_philox_known_answers(counter, high, key, words):
    """The three philox4x32-10 vectors of Random123's kat_vectors."""
    got = philox(torch.tensor([counter]), key, high)
    assert [f"{word:08x}" for word in got[:, 0].tolist()] == words.split()


@pytest.mark.parametrize("shape, dim, parts", [((12, 8), 0, 4), ((12, 8), 1, 2), ((5, 6), 1, 3), ((30,), 0, 5)])
def test_shards_draw_what_the_whole_draws(shape, dim, parts):
    whole = normal(shape, fold(3, "layers.0.ffn.up.weight"))
    length = shape[dim] // parts
    pieces = [normal(shape, fold(3, "layers.0.ffn.up.weight"), dim=dim, start=i * length, length=length) for i in range(parts)]
    assert torch.equal(torch.cat(pieces, dim), whole)
    assert not torch.equal(normal(shape, fold(4, "layers.0.ffn.up.weight")), whole)


def test_draws_are_standard_normal():
    draw = normal((1000, 1000), 11).double()
    assert abs(draw.mean().item()) < 4e-3
    assert draw.std().item() == pytest.approx(1.0, abs=3e-3)
    assert draw.square().mean().item() + 2 == pytest.approx(draw.pow(4).mean().item(), abs=0.05)


@pytest.mark.parametrize("name", ["gpt-tiny", "qwen-tiny", "olmo2-tiny"])
def test_initial_weights_of_ranks_are_slices_of_the_whole(name):
    def model(index: int, size: int) -> Decoder:
        place = SimpleNamespace(index=index, size=size)  # of the wire only the place in the group is asked
        layout = Megatron(card=models()[name], factor=Dense(), precision=float32(), tp=place)
        made = Decoder(models()[name], layout, vocab=1000, seq=SEQ, device=torch.device("cpu"))
        made.weights.initialise(5)
        return made

    whole = model(0, 1)
    for index in range(4):
        shard = model(index, 4)
        for key, member in shard.weights.members.items():
            want = member.spec.local(whole.weights.local(key), index, 4)
            assert torch.equal(shard.weights.local(key), want), key
    stds = {key: whole.weights.local(key).std().item() for key in ("layers.0.ffn.up.weight", "layers.0.ffn.down.weight")}
    assert stds["layers.0.ffn.up.weight"] == pytest.approx(0.02, rel=0.05)
    small = 0.02 / math.sqrt(8) if name == "gpt-tiny" else 0.02
    assert stds["layers.0.ffn.down.weight"] == pytest.approx(small, rel=0.05)


@pytest.mark.parametrize("name", TINY)
def test_recomputation_changes_no_bit(name):
    kept, again = (gradients(decoder(name, 1000, recompute=r), 1000) for r in ("none", "segment"))
    assert torch.equal(kept[0], again[0])
    for key, value in kept[1].items():
        assert torch.equal(value, again[1][key]), key


def test_compiled_block_equals_eager_and_serves_all_layers():
    """Of each model: the shapes of a second one are no variables."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for graphs, name in enumerate(("gpt-tiny", "qwen-tiny"), 1):
        loss, want = gradients(decoder(name, 1000), 1000)
        compiled_loss, got = gradients(decoder(name, 1000, compile=True), 1000)
        assert compiled_loss.item() == pytest.approx(loss.item(), rel=1e-6)
        check_close(got, want)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


@pytest.mark.parametrize("name", ["gpt-tiny", "qwen-tiny", "olmo2-tiny"])
def test_executed_flops_are_what_torch_counts(name):
    """Matrix products of one step by torch's own counter, kept and recomputed; not attention, which it counts without mask."""
    from torch.utils.flop_counter import FlopCounterMode

    tokens, seq, vocab = 64, 32, 256
    attention = models()[name]["layers"] * 2 * tokens * seq * models()[name]["hidden"]
    for recompute, passes in (("none", 3), ("segment", 4)):
        case = Case(model=name, precision="float32", layout={"name": "megatron", "recompute": recompute}, data={"seq": seq})
        model = assemble(case, Mesh(), vocab).model
        ids = torch.arange(tokens).view(-1, seq) % vocab
        with FlopCounterMode(display=False) as counter:
            model.loss(ids, ids).backward()
        products = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "mm" in str(op))
        assert products == model.layout.executed_flops(tokens, seq, vocab) - passes * attention
