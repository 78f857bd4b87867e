"""Layouts never change the function: TP 2 and 4 against one process, per tensor (DESIGN 4), and what crosses is counted."""
import pytest
from parity import VOCAB, case_of, counts
from parity import everyone as everyone_of
from parity import train as train_of

from suite.model import padded
from suite.workload import models

FAMILIES = ["gpt-tiny", "qwen-tiny", "llama-tiny", "olmo2-tiny"]
LAYOUTS = ["megatron", "megatron-sp"]
STEPS, LAYERS = 20, 2  # one layer below another
SEGMENT = {"megatron": {"name": "megatron", "recompute": "segment"}, "megatron-sp": {"name": "megatron-sp", "recompute": "segment"}}

pytestmark = pytest.mark.ranks


def train(*case, **more):
    return train_of(*case, layers=LAYERS, **more)


def everyone(case, steps):
    return everyone_of(case, steps, LAYERS)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", FAMILIES)
def test_float64_equals_one_process(model, layout, tp):
    """Loss within 1e-9 over 20 steps, gradients of the last step within 1e-9 per tensor."""
    alone = train(model, "megatron", 1, "float64", STEPS)
    split = train(model, layout, tp, "float64", STEPS)
    assert max(abs(a - b) for a, b in zip(alone.losses, split.losses)) < 1e-9
    assert alone.furthest(split) < 1e-9
    assert alone.losses[-1] < alone.losses[0] - 0.2, "the model does not learn, so equality would say little"


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", FAMILIES)
def test_float32_equals_one_process(model, layout, tp):
    """Gradients of step 1 within 1e-5 per tensor, loss within 1e-6 relative over 20 steps."""
    alone = train(model, "megatron", 1, "float32", STEPS)
    split = train(model, layout, tp, "float32", STEPS)
    assert alone.furthest(split, "first") < 1e-5
    assert max(abs(a - b) / abs(a) for a, b in zip(alone.losses, split.losses)) < 1e-6


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", FAMILIES)
def test_replicated_parameters_stay_bit_equal(model, layout):
    ranks = everyone(case_of(model, layout, 4, "float32"), STEPS)
    assert ranks[0].replicated
    assert all(rank.replicated == ranks[0].replicated for rank in ranks)
    assert all(rank.losses == ranks[0].losses for rank in ranks)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", FAMILIES)
def test_recompute_is_exact_and_holds_no_forward_collective(model, layout):
    """Bit for bit the same training, and the same messages: recomputing sends nothing."""
    kept = train(model, layout, 2, "float64", 3)
    again = train(model, SEGMENT[layout], 2, "float64", 3)
    assert again.losses == kept.losses
    assert kept.furthest(again) == 0.0
    assert counts(again) == counts(kept)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_replicas_and_shards_together(layout):
    """dp 2 x tp 2 equals one process on the same global batch."""
    alone = train("qwen-tiny", "megatron", 1, "float64", 5)
    comm = dict.fromkeys(("tp", "dp"), "fp64")
    ranks = everyone(case_of("qwen-tiny", layout, 2, "float64", comm, dp=2), 5)
    mean = [(a + b) / 2 for a, b in zip(ranks[0].losses, ranks[2].losses)]
    assert max(abs(a - b) for a, b in zip(alone.losses, mean)) < 1e-9
    assert alone.furthest(ranks[0]) < 1e-9


def expected(model: str, layout: str, tp: int) -> dict[tuple[str, str, str], tuple[int, int]]:
    """(way, op, purpose) -> (calls, elements) of one step of one micro-batch, from DESIGN 7a written out."""
    card = models()[model]
    case = case_of(model, layout, tp, "float32")
    tokens = case.data.batch * case.data.seq
    layers, whole = LAYERS, tokens * card["hidden"]
    ends = 2 * layers + 1
    found = {("forward", "max", "loss"): (1, tokens), ("forward", "all_reduce", "loss"): (1, 2 * tokens)}
    if layout == "megatron":
        found["forward", "all_reduce", "activations"] = ends, ends * whole  # embedding, then twice a layer
        found["backward", "all_reduce", "activations"] = ends, ends * whole  # twice a layer, then head
    else:
        for way in ("forward", "backward"):
            for op in ("all_gather", "reduce_scatter"):
                found[way, op, "activations"] = ends, ends * whole
    if card["qk_norm"]:
        for way in ("forward", "backward"):
            found[way, "all_reduce", "statistic"] = layers, layers * 2 * tokens
    d, head = card["hidden"], card["hidden"] // card["heads"]
    step = 0
    calls = 0
    if layout == "megatron-sp":
        norms = (2 * layers + 1) * d * (2 if card["norm"] == "layernorm" else 1)
        biases = layers * d * (int(card["bias"]["out"]) + int(card["bias"]["ffn"]))
        step, calls = norms + biases + (card["positions"] * d if card["position"] == "learned" else 0), 1
    if card["kv_heads"] < tp:  # K and V of one head a rank, weight and bias
        step, calls = step + 2 * layers * head * (d + int(card["bias"]["qkv"])), calls + 1
    if step:
        found["step", "all_reduce", "gradients"] = calls, step
    found["step", "all_reduce", "norm"] = 1, 1
    return found


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", FAMILIES)
def test_counts_equal_the_formulas(model, layout, tp):
    counted = counts(train(model, layout, tp, "float32", STEPS))
    counted.pop(("step", "all_reduce", "norm"), None)
    wanted = expected(model, layout, tp)
    wanted.pop(("step", "all_reduce", "norm"))
    assert counted == wanted


def test_the_vocabulary_is_padded_in_these_tests():
    assert padded(VOCAB) > VOCAB
