"""`implementation: transformers`: the same loss as ours, the numerics asked for, flash attention kept, and its workload."""
from __future__ import annotations

import sys
from functools import partial

import pytest
import torch

from suite import peer as peers
from suite.assemble import assemble
from suite.case import Case
from suite.mesh import Mesh
from suite.peer import PeerError
from suite.pretrained import hf_state
from suite.workload import load, models

pytest.importorskip("transformers")
VOCAB, CPU = 1000, torch.device("cpu")


def case_of(model: str = "qwen-tiny", **more) -> Case:
    usual = {"precision": "float32", "implementation": "transformers", "data": {"seq": 16, "batch": 2}}
    return Case(model=model, **usual | more)


def build(case: Case) -> peers.Peer:
    return peers.build(case, models()[case.model], VOCAB, CPU)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(VOCAB, (2, 17), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@pytest.mark.parametrize("name", ["gpt-tiny", "qwen-tiny", "llama-tiny", "olmo2-tiny"])
def test_same_weights_give_our_loss(name):
    case = case_of(name, seed=4)
    ours = assemble(case, Mesh(), VOCAB).model
    theirs = build(case)
    state = hf_state({k: ours.weights.local(k) for k in ours.weights.members}, ours.card, VOCAB)
    theirs.module.load_state_dict(state, strict=False)
    got, want = theirs.loss(*batch()), ours.loss(*batch())
    assert got.item() == pytest.approx(want.item(), rel=1e-6)
    got.backward()
    want.backward()
    norms = [sum(p.grad.double().square().sum() for p in parameters).sqrt().item()
             for parameters in (theirs.parameters(), ours.weights.leaves.values())]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    padding = (1024 - VOCAB) * ours.card["hidden"] * (1 if ours.card["tied"] else 2)
    assert sum(p.numel() for p in theirs.parameters()) == ours.weights.count() - padding


@pytest.mark.parametrize("params", ["float32", "bfloat16"])
def test_numerics_of_weights_and_products(params):
    model = build(case_of(precision={"name": "bf16", "params": params}))
    assert {p.dtype for p in model.parameters()} == {getattr(torch, params)}
    assert {b.dtype for b in model.module.buffers()} == {torch.float32}  # the rates of RoPE
    seen = set()
    for module in model.module.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda module, given, out: seen.add(out.dtype))
    loss = model.loss(*batch())
    loss.backward()
    assert seen == {torch.bfloat16}
    assert loss.dtype == torch.float32
    assert all(p.grad.dtype == p.dtype for p in model.parameters())


@pytest.mark.parametrize("name", ["gpt-tiny", "qwen-tiny"])
def test_compiled_attention_is_causal_without_a_mask_in_one_graph(name, monkeypatch):
    calls = []

    def backend(graph, inputs):
        calls.append([node.kwargs for node in graph.graph.nodes if "scaled_dot_product_attention" in str(node.target)])
        return graph.forward

    torch._dynamo.reset()
    plain = build(case_of(name)).loss(*batch())
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend, fullgraph=True))
    compiled = build(case_of(name, compile=True)).loss(*batch())
    assert compiled.item() == pytest.approx(plain.item(), rel=1e-6)
    assert [len(attentions) for attentions in calls] == [4]
    assert all(k["is_causal"] is True and k.get("attn_mask") is None for k in calls[0])


def test_the_seed_draws_the_weights_and_nothing_else():
    def sample(seed: int) -> torch.Tensor:
        return build(case_of(seed=seed)).parameters()[1].detach()

    torch.manual_seed(9)
    want = torch.rand(3)
    torch.manual_seed(9)
    first = sample(0)
    assert torch.equal(torch.rand(3), want)
    assert torch.equal(first, sample(0)) and not torch.equal(first, sample(1))


@pytest.mark.parametrize("more, words", [
    ({"precision": "tests.test_peer:Other"}, "precision: tests.test_peer:Other has no counterpart in transformers"),
    ({"factor": "tests.test_peer:Other"}, "factor: tests.test_peer:Other has no counterpart in transformers"),
    ({"layout": {"name": "megatron", "recompute": "segment"}},
     "layout: {'recompute': 'segment'} has no counterpart in transformers"),
    ({"init": "somewhere"}, "init: a checkpoint is read by implementation triaxis only")])
def test_what_transformers_does_not_cover(more, words, monkeypatch):
    monkeypatch.setitem(sys.modules, "tests.test_peer", sys.modules[__name__])
    with pytest.raises(PeerError) as caught:
        build(case_of(**more))
    assert str(caught.value) == words


class Other:
    """A value from outside the suite."""


def test_without_transformers_one_line_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(PeerError, match="implementation: transformers is not installed; it comes with the extra `test`"):
        build(case_of())


def test_baseline_pairs_differ_in_the_implementation_alone():
    workload = load("baseline")
    for size in ("small", "short"):
        rows = {}
        for case in (row.case for row in workload.cases(size) if row.case.mesh.ranks == 1 and "-tp1-" not in row.id):
            row = case.row()
            side = row.pop("implementation")
            assert row.pop("name").endswith(side)
            assert case.measure == "speed" and case.compile == (size == "short")
            rows.setdefault(str(row), set()).add(side)
        assert all(sides == {"triaxis", "transformers"} for sides in rows.values())
        assert len(rows) == {"small": 2, "short": 10}[size]


def test_baseline_covers_the_six_sizes_at_their_micro_batches():
    cases = [row.case for row in load("baseline").cases("short")]
    alone = {c.model: c.micro for c in cases if c.mesh.tp == 1 and c.implementation == "transformers"
             and c.precision.options["params"] == "bfloat16"}
    assert alone == {"gpt-350m": 8, "gpt-1.3b": 8, "gpt-6.7b": 2, "qwen2.5-0.5b": 8, "qwen2.5-1.5b": 4, "qwen2.5-7b": 2}
    assert {c.data.seq for c in cases} == {2048} and {c.data.text for c in cases} == {"random"}
    for model in ("gpt-6.7b", "qwen2.5-7b"):
        group = {c.id: c for c in cases if c.model == model and "-tp" in c.id}
        assert {(c.mesh.tp, c.layout.name) for c in group.values()} == {(1, "megatron"), (2, "megatron"), (2, "megatron-sp")}
        assert {c.data.batch for c in group.values()} == {4}
        assert {c.link for c in group.values() if c.mesh.tp == 2} == {"p2p"}
