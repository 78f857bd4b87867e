"""Variants of a step in turn, and one layer taken apart: what is timed is what was asked, and numbers add up."""
from types import SimpleNamespace

import pytest
import torch
from ranks import run_ranks

from suite import plan
from suite.case import Case, Comm
from suite.measure import block, interleaved
from suite.mesh import Mesh
from suite.model import OPEN, Decoder
from suite.record import CaseFailed, Metric, Record, write
from suite.report import figures, panels, studies
from suite.report.source import entries
from suite.workload import Expanded

SHAPE = {"data": {"text": "random", "seq": 32, "batch": 4}, "precision": "float32", "comm": "fp32", "steps": 2}


def test_the_other_variant_has_default_options():
    case = Case(model="llama-tiny", factor="svd", layout={"name": "btp", "grouped": False, "norm": "sync"}, measure="ab", name="n")
    other = interleaved.default_of(case)
    assert not other.layout.off_default("layout") and other.name is None
    assert other.factor == case.factor and other.data == case.data
    coded = interleaved.default_of(Case(model="gpt-tiny", mesh={"tp": 2}, layout="megatron-sp", comm="taco", measure="ab"))
    assert coded.comm == Comm() and coded.layout.name == "megatron-sp" and coded.measure == "speed"
    with pytest.raises(ValueError, match=r"needs mesh\.tp of at least 2 and mesh\.dp 1"):
        Case(model="gpt-tiny", mesh={"tp": 2, "dp": 2}, comm="taco", measure="ab")
    with pytest.raises(ValueError, match="a codec or an option of the layout off its default"):
        Case(model="llama-tiny", factor="svd", layout="btp", measure="ab")
    with pytest.raises(ValueError, match="steps of at least 2"):
        Case(model="llama-tiny", factor="svd", layout={"name": "btp", "norm": "sync"}, measure="ab", steps=1)


class Stepper:
    """A trainer that only says who stepped."""

    device = torch.device("cpu")

    def __init__(self, name: str, loss: float, order: list):
        self.name, self.loss, self.order = name, loss, order

    def step(self, number: int):
        self.order.append((self.name, number))
        return torch.tensor(self.loss), None

    def barrier(self) -> None:
        pass


def test_blocks_take_turns_and_unlike_losses_are_not_timed():
    case = Case(model="llama-tiny", factor="svd", layout={"name": "btp", "norm": "sync"}, measure="ab", steps=2)
    order, outcome = [], SimpleNamespace(metrics=[], phases={})
    interleaved.study(case, outcome, lambda c: Stepper(c.layout.options["norm"], 2.0, order))
    first = interleaved.WARM
    assert order[:2 * first] == [(name, n) for name in ("sync", "online") for n in range(first)]
    assert order[2 * first:2 * first + 2] == [("sync", 1), ("online", 1)], "each once more"
    pairs = order[2 * first + 2:]
    assert [name for name, _ in pairs] == ["online"] * 3 + ["sync"] * 3 + ["sync"] * 3 + ["online"] * 3
    assert [n for _, n in pairs] == 2 * [first, first + 1, first + 2] + 2 * [first + 3, first + 4, first + 5]
    assert {m.name for m in outcome.metrics} == {"step_time", "default_step_time", "default_over_row", "memory_saved",
                                                 "default_over_row_upper_bound", "default_over_row_lower_bound",
                                                 "checkpoint_mb_per_ms"}
    with pytest.raises(CaseFailed, match=r"losses of step 0: 2\.0000 and, with default options, 3\.0000: no result"):
        interleaved.study(case, outcome, lambda c: Stepper("", 2.0 + (c.layout.options["norm"] == "online"), order))


class Stale(Stepper):
    """Its loss is that of the step, but from one on that of another: as of a graph that replays an old batch."""

    def __init__(self, since: int, value: float) -> None:
        super().__init__("", 2.0, [])
        self.since, self.value = since, value

    def step(self, number: int):
        super().step(number)
        late = len(self.order) > self.since
        return torch.tensor(self.value if late else 2.0 + 0.01 * number), None


@pytest.mark.parametrize("since,value,line", [
    (interleaved.WARM, 2.03, "the row: the same step gave 2.010000 and 2.030000"),
    (interleaved.WARM + 1, float("nan"), "losses of step 4: nan and"),
    (interleaved.WARM + 6, 3.0, "losses of step 9: 3.0000 and"),
])
def test_a_replayed_batch_and_a_nan_in_a_timed_step_are_no_result(since, value, line):
    case = Case(model="llama-tiny", factor="svd", layout={"name": "btp", "norm": "sync"}, measure="ab", steps=2)
    with pytest.raises(CaseFailed, match=line):
        interleaved.study(case, SimpleNamespace(metrics=[], phases={}), lambda c: Stale(
            since if c.layout.options["norm"] == "sync" else 1000, value))


def test_a_ceiling_is_what_communication_leaves_to_win():
    ratio = [Metric("default_over_row", 1.25, "x")]
    most, reached = interleaved.ceiling(ratio, [Metric("comm_share", 50.0, "%")], 2.0)
    assert most.value == pytest.approx(1 / 0.75) and reached.value == pytest.approx(75.0)
    assert interleaved.ceiling(ratio, [Metric("comm_share", 50.0, "%")], 0.5)[1].reason == "the row sends no fewer bytes"


def test_the_ratio_is_of_pairs_and_memory_is_paid_in_time():
    found = {m.name: m for m in interleaved.metrics([(0.5, 0.4), (0.6, 0.48)], [(1e9, 4e9), (1.5e9, 4e9)])}
    assert found["default_over_row"].value == pytest.approx(0.8) == found["default_over_row_upper_bound"].value
    assert found["step_time"].value == pytest.approx(550) and found["default_step_time"].value == pytest.approx(440)
    assert found["memory_saved"].value == pytest.approx(2500)
    assert found["checkpoint_mb_per_ms"].value == pytest.approx(2500 / 110)
    quicker = {m.name: m for m in interleaved.metrics([(0.4, 0.5)] * 2, [(1e9, 4e9)] * 2)}
    assert quicker["checkpoint_mb_per_ms"].reason == "the row's step is not longer"
    larger = {m.name: m for m in interleaved.metrics([(0.6, 0.5)] * 2, [(5e9, 4e9)] * 2)}
    assert larger["checkpoint_mb_per_ms"].reason == "the row saves no memory" and larger["memory_saved"].value < 0


def apart(mesh, row, counting):
    outcome = SimpleNamespace(metrics=[], phases={})
    clock, block.timed = block.timed, calls if counting else block.timed
    try:
        block.study(Case(**row), mesh, outcome)
    finally:
        block.timed = clock
    return {m.name: m for m in outcome.metrics}


def calls(runs, device, repeats, barrier=None):
    """A clock that shows a second and one more for each message."""
    counter = barrier.__self__.counter if barrier else None
    found = {}
    for name, run in runs.items():
        if counter:
            counter.reset()
        run()
        found[name] = [1.0 + (sum(row.calls for row in counter.snapshot()) if counter else 0)] * repeats
    return found


def payloads(layout: str, factor: str) -> tuple[float, float]:
    """Elements a token of llama-tiny's block, forward and backward: boost.md 2.4; BTP's float32 statistics beside."""
    d, f, r = 128, 352, 32
    return {"megatron": (2 * d, 2 * d), "pairwise": (5 * d + 2 * f, 3 * d + f), "btp": (7 * r + 2, 7 * r)}[layout]


@pytest.mark.ranks
@pytest.mark.parametrize("layout,factor", [("btp", "cola"), ("pairwise", "cola"), ("megatron", "dense")])
def test_a_layer_is_taken_apart(layout, factor):
    row = {"model": "llama-tiny", "layout": layout, "factor": factor, "mesh": {"tp": 2}, "measure": "block", **SHAPE}
    found, other = run_ranks(apart, 2, row, False)
    timed = [m for m in found.values() if m.name.endswith("_ms") or m.name.startswith("gemm_ms")]
    assert len(timed) == 8 and all(m.value > 0 and m.n == 2 for m in timed)
    for name, elements in zip(("block_payload", "block_payload_backward"), payloads(layout, factor)):
        assert found[name].value == elements * 128 * 4 / 2**20 and found[name].kind == "counted"
    assert found["gemm_hfu_attn"].reason == "no GPU"
    own = layout == "btp"
    assert all((found[f"{name}_share"].value is not None) == own for name in block.PASSES)
    assert "scale_share" not in other
    forward, backward, norm = {"btp": (6, 4, 1), "pairwise": (7, 4, 0), "megatron": (2, 2, 0)}[layout]
    counted, n = run_ranks(apart, 2, row, True)[0], block.CHAIN
    for name, messages in (("block_ms", n * forward), ("block_train_ms", n * (forward + backward)), ("block_compute_ms", 0)):
        assert counted[name].value == 1e3 * (1 + messages) / n, name
    for name, messages in (("block_comm_ms", forward), ("block_comm_backward_ms", backward), ("norm_ms", norm), ("gemm_ms_mlp", 0)):
        assert counted[name].value == 1e3 * (1 + messages), name


@pytest.mark.parametrize("compile", [False, True])
def test_the_layer_that_is_taken_apart_is_the_first(compile, monkeypatch):
    seen, inside = set(), Decoder.block
    monkeypatch.setattr(Decoder, "block", lambda self, p, x, rope, layer, *rest: seen.add(str(layer)) or inside(
        self, p, x, rope, layer, *rest))
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    precision = {"name": "tetrajet", "out_start": 0, "out_steps": 1}  # scores inputs by the number of their layer
    with torch.compiler.config.patch(dynamic_sources="L['theirs']"):
        apart(Mesh(), {"model": "gpt-tiny", "measure": "block", "compile": compile, **SHAPE, "precision": precision}, True)
        assert torch.compiler.config.dynamic_sources == "L['theirs']" + (f",{OPEN}" if compile else "")
    assert seen == {"0"}


def muted(mesh):
    case = Case(model="llama-tiny", layout="megatron-sp", mesh={"tp": 2}, measure="block", **SHAPE)
    made = block.assemble(case, mesh, 256, {**block.models()["llama-tiny"], "layers": 1})
    mute, x, seen = block.Mute(made.tp), torch.ones(4, 2), []
    before = made.tp.counter.snapshot()
    mute.during(lambda: seen.extend(made.tp.run(op, x, exact=x)[0].shape for op in ("all_reduce", "all_gather", "reduce_scatter")))
    assert [tuple(s) for s in seen] == [(4, 2), (8, 2), (2, 2)] and made.tp.counter.snapshot() == before
    return made.tp.run("all_reduce", x)[0].tolist()


@pytest.mark.ranks
def test_a_muted_wire_sends_nothing_and_speaks_again():
    assert run_ranks(muted, 2)[0] == [[2.0, 2.0]] * 4


def test_a_layer_is_drawn_from_both_its_parts(tmp_path):
    """A record without one of them is no bar; the number on a bar is their sum."""
    library, _ = figures._library()
    for layout, numbers in (("btp", (2.0, 1.5)), ("pairwise", (3.0, 4.0)), ("pairwise-heads", (5.0, None))):
        case = Case(model="llama-tiny", layout=layout, factor="cola", mesh={"tp": 2}, measure="block")
        metrics = [Metric(name, value, "ms", n=5, reason=None if value else "not here")
                   for name, value in zip(("block_compute_ms", "block_comm_ms"), numbers)]
        write(Record(case.id, case.row(), "ok", None, "key", "cpu2", metrics=metrics), tmp_path)
    found, ax = entries(tmp_path, {}), library().add_subplot()
    style = panels.Style({e.method: "0.5" for e in found})
    assert studies.layer(ax, found, style) and not studies.layer(ax, [], style)
    assert [t.get_text() for t in ax.texts if t.get_text().replace(".", "").isdigit()] == ["3.5", "7"]


def test_the_plan_knows_what_they_take():
    """A pair of blocks is six steps; a layer is a small part of its model; both own the machine."""
    given = {"model": "llama-7b", "factor": "cola", "mesh": {"tp": 2}, "device": "cuda", "data": {"seq": 4096, "batch": 4}}
    turns = Case(**given, layout={"name": "btp", "norm": "sync"}, measure="ab", steps=12)
    steps = Case(**given, layout="btp", measure="speed", steps=72)
    apart = Case(**given, layout="btp", measure="block", steps=20)
    assert plan.seconds(turns) == plan.seconds(steps)
    assert plan.FIXED["cuda"] < plan.seconds(apart) < plan.seconds(turns)
    for case in (turns, apart):
        assert plan.single(Expanded(case, "boost", "short")).exclusive
