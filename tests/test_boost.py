"""BOOST: layouts of low-rank maps equal the unsplit model, send what the paper's formulas say, and recompute without sending."""
import pytest
import torch
from parity import case_of, counts
from parity import everyone as everyone_of
from parity import train as train_of

from suite.assemble import assemble
from suite.case import Case
from suite.mesh import Mesh
from suite.record import CaseFailed
from suite.workload import models

FAMILIES = ["gpt-tiny", "qwen-tiny", "llama-tiny"]
SYNC, SINGLES, LETTER = {"name": "btp", "norm": "sync"}, {"name": "btp", "grouped": False}, {"name": "btp", "prescale": "always"}
OVERLAP = {"name": "btp", "overlap": True}
STEPS, LAYERS = 3, 2  # one layer below another

pytestmark = pytest.mark.ranks


def train(*case, **more):
    return train_of(*case, layers=LAYERS, **more)


def everyone(case: Case, steps: int):
    return everyone_of(case, steps, LAYERS)


def truth(model: str, factor, precision: str = "float64"):
    """One process, each map written as its factor says, whole norms."""
    return train(model, "megatron", 1, precision, STEPS, factor=factor)


BOUNDS = {"losses": 1e-10, "first gradients": 1e-9, "weights and gradients": 1e-9}


def equal(model: str, factor, layout, tp: int) -> bool:
    """Whether a split model trains as one process does, in float64 within BOUNDS, and each of its factors learns."""
    alone, split = truth(model, factor), train(model, layout, tp, "float64", STEPS, factor=factor)
    losses = max(abs(a - b) for a, b in zip(alone.losses, split.losses, strict=True))
    found = dict(zip(BOUNDS, (losses, alone.furthest(split, "first"), alone.furthest(split))))
    beyond = {name: value for name, value in found.items() if not value < BOUNDS[name]}
    assert not beyond, beyond
    still = [name for name, g in alone.first.items() if name.endswith((".a", ".b")) and not g.norm() > 0]
    assert not still, f"learns nothing: {still}"
    return True


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("layout", ["btp", "pairwise", "pairwise-heads"])
@pytest.mark.parametrize("model", FAMILIES)
def test_layouts_equal_one_process(model, layout, tp):
    assert equal(model, "cola", layout, tp)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("layout", [SYNC, SINGLES, LETTER, OVERLAP, {"name": "pairwise", "grouped": False}])
@pytest.mark.parametrize("model", ["gpt-tiny", "qwen-tiny"])
def test_norm_modes_and_grouping_equal_one_process(model, layout, tp):
    assert equal(model, "cola", layout, tp)


@pytest.mark.parametrize("layout", ["btp", "pairwise", "pairwise-heads"])
@pytest.mark.parametrize("factor", ["svd", "lax", {"name": "cola", "gate": "activated"}, {"name": "cola", "rank": 48}])
def test_factors_equal_one_process(factor, layout):
    assert equal("qwen-tiny", factor, layout, 2)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("layout", ["btp", SINGLES, "pairwise", "pairwise-heads"])
def test_dense_keys_and_values_equal_one_process(layout, tp):
    """tp 4 holds each of two K/V heads twice."""
    assert equal("qwen-tiny", {"name": "cola", "kv": "dense"}, layout, tp)


@pytest.mark.parametrize("model,layout,factor", [("gpt-tiny", "megatron", "dense"), ("qwen-tiny", "megatron", "dense"),
                                                 ("qwen-tiny", "pairwise", "cola"), ("qwen-tiny", "pairwise-heads", "cola"),
                                                 ("qwen-tiny", "pairwise-heads", {"name": "cola", "kv": "dense"})])
def test_overlapped_sums_equal_one_process_and_send_the_same(model, layout, factor):
    overlapped = {"name": layout, "overlap": True}
    assert equal(model, factor, overlapped, 2)
    assert sent(model, overlapped, 2, factor) == sent(model, layout, 2, factor)


def test_pairwise_keeps_olmos_norms():
    assert equal("olmo2-tiny", "cola", "pairwise", 2)


@pytest.mark.parametrize("layout", ["btp", SYNC, "pairwise", "pairwise-heads"])
def test_recompute_is_exact_and_sends_nothing_forward(layout):
    """Segments are bit for bit the same training with the same messages; whole layers send every forward message twice."""
    row = layout if isinstance(layout, dict) else {"name": layout}
    kept, segment, layer = (train("gpt-tiny", {**row, "recompute": how}, 2, "float64", STEPS, factor="cola")
                            for how in ("none", "segment", "layer"))
    assert segment.losses == kept.losses == layer.losses
    assert kept.furthest(segment) == kept.furthest(layer) == 0.0
    assert counts(segment) == counts(kept)
    for key, (calls, _) in counts(kept).items():
        ends = {"reduce_scatter": 1, "all_gather": 1}.get(key[1], 0) if row["name"] == "btp" else int(key[1] == "all_reduce")
        inside = key[0] == "forward" and key[2] in ("activations", "statistic")
        ends = ends if key[2] == "activations" else 0
        assert counts(layer)[key][0] == (2 * calls - ends if inside else calls), key


def test_latents_cross_layers_where_whole_layers_are_recomputed():
    kept, layer = (train("gpt-tiny", {"name": "btp", "recompute": how}, 2, "float64", STEPS, factor="lax")
                   for how in ("none", "layer"))
    assert layer.losses == kept.losses and kept.furthest(layer) == 0.0
    plain = train("gpt-tiny", "btp", 2, "float64", STEPS, factor="svd")
    assert abs(plain.losses[0] - kept.losses[0]) > 1e-6, "nothing crossed"


@pytest.mark.parametrize("layout", ["btp", "pairwise", "pairwise-heads"])
def test_replicated_parameters_stay_bit_equal(layout):
    ranks = everyone(case_of("gpt-tiny", layout, 4, "float64", factor="cola"), STEPS)
    assert ranks[0].replicated
    assert all(rank.replicated == ranks[0].replicated and rank.losses == ranks[0].losses for rank in ranks)


def formula(model: str, layout: str, tp: int, *, sync: bool = False, grouped: bool = True, dense: bool = False) -> dict:
    """(way, op, purpose) -> (calls, elements), DESIGN 7a and boost.md 2.4 written out."""
    card = models()[model]
    case = case_of(model, "megatron", tp, "float32")
    tokens, n, d, f = case.data.batch * case.data.seq, LAYERS, card["hidden"], card["ffn"]
    r, g, kv = d // 4, 2 if card["gated"] else 1, card["kv_heads"] * d // card["heads"]
    found = {("forward", "max", "loss"): (1, tokens), ("forward", "all_reduce", "loss"): (1, 2 * tokens)}

    def add(way: str, op: str, calls: int, elements: int, purpose: str = "activations") -> None:
        before = found.get((way, op, purpose), (0, 0))
        found[way, op, purpose] = before[0] + calls, before[1] + elements

    shared = 0
    if layout == "btp":
        c = 2 if card["norm"] == "layernorm" else 1
        wide = tokens * (r + 2 * kv if dense else 3 * r) + tokens * (2 + g) * r
        for way in ("forward", "backward"):
            extra = 1 if dense and way == "backward" else 0  # dense K and V beside q's latent
            add(way, "all_reduce", n * (4 + extra if grouped else 5 + g), n * wide)
        shifts = 0 if c == 1 or sync else 2 * (3 + g) * r
        add("forward", "all_reduce", 2 * n, n * (2 * c * tokens + shifts), "statistic")
        if sync:
            add("backward", "all_reduce", 2 * n, n * 2 * c * tokens, "statistic")
        for way, first, last in (("forward", "reduce_scatter", "all_gather"), ("backward", "all_gather", "reduce_scatter")):
            add(way, first, 1, tokens * d)
            add(way, last, 1, tokens * d)
        add("step", "all_reduce", 1, c * d, "gradients")
        if card["kv_heads"] < tp and not dense:
            shared = 2 * n * (d // card["heads"]) * r
    else:
        for way in ("forward", "backward"):
            add(way, "all_reduce", 1, tokens * d)  # an end
        whole = layout == "pairwise"
        if whole:
            add("forward", "all_reduce", 4 * n, n * tokens * (2 * d + 2 * kv))
            add("backward", "all_reduce", 2 * n, n * tokens * 2 * d)  # dn, dz
        else:
            few = card["kv_heads"] < tp
            scattered = d + (0 if few else 2 * kv)
            add("forward", "reduce_scatter", n * (1 if few else 3), n * tokens * scattered)
            add("backward", "all_gather", n * (1 if few else 3), n * tokens * scattered)
            add("forward", "all_gather", n, n * tokens * d)
            add("backward", "reduce_scatter", n, n * tokens * d)
            add("forward", "all_reduce", n * (3 if few else 1), n * tokens * (d + (2 * kv if few else 0)))
            add("backward", "all_reduce", n * (3 if few else 1), n * tokens * (d + (2 * kv if few else 0)))
        add("forward", "all_reduce", (g + 1) * n, n * tokens * (g * f + d))
        add("backward", "all_reduce", 2 * n, n * tokens * (d + f))
    if card["kv_heads"] < tp and layout != "pairwise":
        shared += 2 * n * (d // card["heads"]) * int(card["bias"]["qkv"])
    if shared:
        add("step", "all_reduce", 1, shared, "gradients")
    return found


def sent(model: str, layout, tp: int, factor="cola") -> dict:
    found = counts(train(model, layout, tp, "float64", STEPS, factor=factor))
    found.pop(("step", "all_reduce", "norm"))
    return found


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("layout", ["btp", "pairwise", "pairwise-heads"])
@pytest.mark.parametrize("model", FAMILIES)
def test_counts_equal_the_formulas(model, layout, tp):
    assert sent(model, layout, tp) == formula(model, layout, tp)


def test_counts_of_norm_modes_grouping_and_dense_keys():
    for model in ("gpt-tiny", "qwen-tiny"):
        assert sent(model, SYNC, 2) == formula(model, "btp", 2, sync=True)
        assert sent(model, SINGLES, 2) == formula(model, "btp", 2, grouped=False)
        assert sent(model, OVERLAP, 2) == formula(model, "btp", 2)
    for tp in (2, 4):
        assert sent("qwen-tiny", "btp", tp, {"name": "cola", "kv": "dense"}) == formula("qwen-tiny", "btp", tp, dense=True)


@pytest.mark.parametrize("model,layout,factor,words", [
    ("olmo2-tiny", "btp", "cola", "norms behind a sublayer"),
    ("olmo2-tiny", "pairwise-heads", "cola", "whole heads"),
    ("llama-tiny", "btp", "dense", "needs a low-rank factor"),
    ("llama-tiny", "pairwise", "dense", "needs a low-rank factor"),
    ("llama-tiny", {"name": "btp", "recompute": "segment"}, "lax", "no latent that crosses"),
    ("llama-tiny", {"name": "megatron", "recompute": "segment"}, "lax", "no latent that crosses"),
])
def test_what_cannot_be_is_refused(model, layout, factor, words):
    with pytest.raises(CaseFailed, match=words):
        assemble(Case(model=model, layout=layout, factor=factor), Mesh(), 256)


def test_widths_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="rank: 129 is larger than hidden 128"):
        assemble(Case(model="llama-tiny", layout="btp", factor={"name": "svd", "rank": 129}), Mesh(), 256)
    with pytest.raises(ValueError, match="neither a fraction"):
        assemble(Case(model="llama-tiny", layout="btp", factor={"name": "svd", "rank": 32.5}), Mesh(), 256)
    with pytest.raises(ValueError, match="norm: local changes the model"):
        Case(model="llama-tiny", layout={"name": "btp", "norm": "local"}, factor="cola")
    Case(model="llama-tiny", layout={"name": "btp", "norm": "local"}, factor="cola", measure="speed")


def refused(mesh, row: dict) -> str:
    with pytest.raises(CaseFailed) as found:
        assemble(Case(**row), mesh, 256)
    return str(found.value)


@pytest.mark.parametrize("layout,factor,words", [
    ("megatron", "cola", "are not split over 2 ranks"),
    ("megatron-sp", "svd", "are not split over 2 ranks"),
    ("pairwise", {"name": "cola", "rank": 33}, "2 ranks do not divide the width 33"),
])
def test_what_cannot_be_split_is_refused(layout, factor, words):
    from ranks import run_ranks

    row = {"model": "llama-tiny", "layout": layout, "factor": factor, "mesh": {"tp": 2}}
    assert all(words in text for text in run_ranks(refused, 2, row))


def test_a_local_norm_is_another_model():
    """What the timing-only mode may do: the very reason why it is refused elsewhere."""
    case = case_of("llama-tiny", {"name": "btp", "norm": "local"}, 2, "float64", factor="cola", measure="speed")
    local = everyone(case, STEPS)[0]
    assert abs(local.losses[-1] - truth("llama-tiny", "cola").losses[-1]) > 1e-6


@pytest.mark.parametrize("codec", ["taco", "int8", "bf16"])
def test_the_statistic_stays_exact_under_a_codec(codec):
    """float32 [T] a norm, uncompressed, behind the codes where bytes cross; the product alone is compressed."""
    trained = train("llama-tiny", "btp", 2, "float32", 3, comm=codec, factor="cola")
    rows = [row for row in trained.traffic if row.purpose == "statistic"]
    assert {(row.codec, row.dtype) for row in rows} == {("exact", "float32")}
    assert sum(row.elements for row in rows) == 2 * LAYERS * 4 * 32  # norms, layers, tokens
    exact = train("llama-tiny", "btp", 2, "float32", 3, factor="cola")
    assert max(abs(a - b) for a, b in zip(trained.losses, exact.losses)) < 2e-2
    assert trained.losses != exact.losses


@pytest.mark.parametrize("precision", ["fp8", "nvfp4", {"name": "tetrajet", "out": 0.1, "out_start": 1, "out_steps": 1, "osci": 0}],
                         ids=["fp8", "nvfp4", "tetrajet"])
def test_all_three_axes_at_once(precision):
    """Quantised products of a low-rank model under BTP, compressed at the bottleneck: it learns what full precision learns, the
    shards are scaled before they are quantised, and ranks stay alike."""
    ranks = everyone(case_of("llama-tiny", "btp", 2, precision, "taco", factor="cola"), STEPS)
    exact = truth("llama-tiny", "cola", "float32")
    assert max(abs(a - b) for a, b in zip(ranks[0].losses, exact.losses)) < 0.03
    assert ranks[0].losses != exact.losses and ranks[0].losses == ranks[1].losses and ranks[0].replicated == ranks[1].replicated
    statistic = [row for row in ranks[0].traffic if row.purpose == "statistic"]
    assert {(row.codec, row.dtype) for row in statistic} == {("exact", "float32")}
    assert {row.codec for row in ranks[0].traffic if row.purpose == "activations"} == {"taco"}
    assert all(g.isfinite().all() and g.norm() > 0 for name, g in ranks[0].first.items() if name.endswith((".a", ".b")))
    prescaled = [assemble(Case(model="llama-tiny", layout="btp", factor="cola", precision=one), Mesh(), 256).model.layout.prescale
                 for one in (precision, "bf16")]
    assert prescaled == [True, False]


@pytest.mark.parametrize("layout", ["btp", "pairwise", "pairwise-heads"])
def test_executed_flops_are_what_torch_counts(layout):
    from torch.utils.flop_counter import FlopCounterMode

    tokens, seq, vocab = 64, 32, 256
    card = models()["llama-tiny"]
    case = Case(model="llama-tiny", precision="float32", layout={"name": layout, "grouped": False}, factor="cola",
                data={"seq": seq})
    model = assemble(case, Mesh(), vocab).model
    ids = torch.arange(tokens).view(-1, seq) % vocab
    with FlopCounterMode(display=False) as counter:
        model.loss(ids, ids).backward()
    products = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "mm" in str(op))
    assert products == model.layout.executed_flops(tokens, seq, vocab) - 3 * card["layers"] * 2 * tokens * seq * card["hidden"]
