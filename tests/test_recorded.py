"""A recorded step: inputs copied, gradients given back, messages counted at every replay; on a GPU the same losses as eager."""
from contextlib import contextmanager, nullcontext
from weakref import ref

import pytest
import torch

from kernels.nvfp4_reference import drawn
from suite import recorded
from suite.case import Case
from suite.comm.counter import Counter
from suite.mesh import Mesh
from suite.precision.draws import Draw, Draws
from suite.precision.recipe import Recipe
from suite.record import CaseFailed
from suite.recorded import EAGER, CudaGraph, Recorded
from suite.seams import Key, make
from suite.train import execute
from suite.trainer import Trainer

ROW = {"group": "tp", "way": "forward", "op": "all_reduce", "codec": "bf16", "dtype": "bfloat16", "purpose": "activations",
       "kind": "modelled", "elements": 3, "payload_bytes": 6, "wire_bytes": 6.0}


class Played:
    """A graph on the CPU. What is recorded runs again at a replay, on the tensors that it was recorded with and into those that it
    gave; as a graph's, its gradients lie where they lay, and nothing is counted. around: what the host holds while it records, and
    a replay with it."""

    def __init__(self, leaves, counter, around=nullcontext):
        self.leaves, self.counter, self.around, self.replays = list(leaves), counter, around, 0

    def run(self, function):
        return function()

    def record(self, function):
        self.function, self.found = function, function()
        self.gradients = [leaf.grad for leaf in self.leaves]
        return self.found

    def replay(self):
        self.replays += 1
        for leaf in self.leaves:
            leaf.grad = None
        with self.counter.aside(), self.around():
            for kept, new in zip(self.found, self.function()):
                if kept is not None:
                    kept.copy_(new)
        for leaf, gradient in zip(self.leaves, self.gradients):
            if gradient is not None:
                gradient.copy_(leaf.grad)
            leaf.grad = None


def played():
    """A recorded step of one weight, its gradient that of Σ (w x)², and a message in each."""
    leaf = torch.tensor([2.0], requires_grad=True)
    graph = Played([leaf], Counter())

    def passes(inputs):
        loss = (leaf * inputs[0]).square().sum()
        loss.backward()
        graph.counter.add(**ROW)
        graph.counter.message("all_reduce", 6, 2)
        return (loss.detach(),)

    return Recorded(passes, [leaf], graph.counter, graph), leaf, graph.counter


def test_a_replay_takes_new_inputs_gives_gradients_and_counts():
    step, leaf, counter = played()
    for call in range(1, EAGER + 4):
        x = torch.tensor([float(call)])
        (loss,) = step([x])
        assert loss.item() == 4.0 * call**2 and leaf.grad.item() == 4.0 * call**2, call
        [row] = counter.snapshot()
        assert (row.calls, row.payload_bytes) == (call, 6 * call), "as many messages as steps, recording none"
        assert counter.messages["all_reduce"] == [call, 6 * call, 6.0 * call]
        leaf.grad = None


def test_messages_that_are_recorded_are_not_counted_as_sent():
    counter = Counter()
    counter.add(**ROW)
    with counter.aside() as other:
        counter.add(**ROW)
        counter.message("all_gather", 8, 2)
    assert [row.calls for row in counter.snapshot()] == [1] and not counter.messages
    counter.include(other)
    assert [row.calls for row in counter.snapshot()] == [2] and counter.messages["all_gather"] == [1, 8, 4.0]


def test_an_input_of_another_shape_and_a_failed_recording_leave_no_graph():
    step, leaf, _ = played()
    for _ in range(EAGER):
        step([torch.ones(3)])
        leaf.grad = None
    record, step.graph.record = step.graph.record, lambda function: 1 / 0
    with pytest.raises(ZeroDivisionError):
        step([torch.ones(3)])
    step.graph.record = record
    assert step([torch.full((3,), 2.0)])[0].item() == 48.0, "recorded now"
    with pytest.raises(ValueError, match=r"recorded step: input 0: torch.float32 \(1,\), recorded with torch.float32 \(3,\)"):
        step([torch.ones(1)])


@pytest.mark.parametrize("axis,value,can", [
    ("comm", "bf16", True), ("comm", "taco", True), ("comm", "int8-hadamard", True), ("comm", "tahquant", True),
    ("comm", {"name": "taco", "rounding": "stochastic"}, False),
    ("precision", "bf16", True), ("precision", "fp8", True), ("precision", "nvfp4", True), ("precision", "tetrajet", True),
], ids=str)
def test_codecs_that_draw_on_the_host_are_not_recorded(axis, value, can):
    case = Case(model="gpt-tiny", mesh={"tp": 2}, **{axis: value})
    choice = case.comm.tp.forward if axis == "comm" else case.precision
    assert make(axis, choice).recordable == can


def test_a_trainer_refuses_what_it_cannot_record(monkeypatch):
    case = Case(model="gpt-tiny", precision="nvfp4", data={"seq": 16, "batch": 1}).model_copy(update={"graph": True})
    monkeypatch.setattr(Recipe, "recordable", False)
    with pytest.raises(CaseFailed, match="graph: nvfp4: what it draws or decides on the host would be the same at every replay"):
        Trainer(case, Mesh())


# channels are chosen behind step 5; weights reset behind step 12
SCHEDULE = {"out_start": 4, "out_steps": 2, "osci_start": 8, "osci_period": 8, "osci_window": 4}
RUN = {"model": "gpt-tiny", "measure": "loss", "steps": 18, "optim": {"lr": 3e-3}, "data": {"seq": 32, "batch": 4, "micro": 2}}


def curve(row, monkeypatch, graph=True):
    """(losses and norms of a run as a graph that is played on the CPU, or as it is; how many graphs; how many replays)."""
    made = []

    def play(device):
        @contextmanager
        def around():
            """A replay's host: it names no step, and holds the rows that were recorded."""
            keys, trainer.keys = trainer.keys, [Key(0, 0, micro, 0) for micro in range(trainer.micro_batches)]
            with trainer.recorded.around(False):
                yield
            trainer.keys = keys

        made.append(Played(trainer.model.weights.leaves.values(), trainer.assembled.counter, around))
        return made[-1]

    monkeypatch.setattr("suite.trainer.CudaGraph", play)
    trainer = Trainer(Case.model_validate(RUN | row).model_copy(update={"graph": graph}), Mesh())
    found = [[float(value) for value in trainer.step(step)] for step in range(RUN["steps"])]
    return found, len(made), sum(one.replays for one in made), trainer


@pytest.mark.parametrize("precision,graphs,eager", [
    ("bf16", 1, 3), ({"name": "tetrajet", "out": 0, "osci": 0}, 1, 3 + 1), ("nvfp4", 1, 3 + 1), ("mxfp4", 1, 3 + 1),
    ({"name": "tetrajet"} | SCHEDULE, 2, 3 + 2 + 3 + 1),
], ids=str)
def test_recorded_steps_draw_and_choose_as_the_steps_do(precision, graphs, eager, monkeypatch):
    """Bit for bit; the last step of a quantised run is looked at by its probe and not recorded."""
    want, *_ = curve({"precision": precision}, monkeypatch, graph=False)
    found, count, replays, trainer = curve({"precision": precision}, monkeypatch)
    assert found == want and (count, replays) == (graphs, RUN["steps"] - eager)
    assert all(part.metrics() for part in trainer.parts)


def test_only_what_draws_has_a_row(monkeypatch):
    """Four operands of each product of tetrajet are drawn, none of fp8."""
    for precision, drawn_operands in (({"name": "tetrajet", "out": 0, "osci": 0}, 4), ("fp8", 0)):
        rows = []
        monkeypatch.setattr(Draws, "fill", lambda self, keys, rows=rows: rows.append(list(self.rows)))
        *_, trainer = curve({"precision": precision, "layout": "megatron"}, monkeypatch)
        products = {(draw.layer, draw.name) for _, draw in rows[-1]}
        assert len(rows[-1]) == trainer.micro_batches * drawn_operands * len(products)
        assert len(products) == (4 * trainer.card["layers"] if drawn_operands else 0)


def test_steps_that_are_not_replayed_are_not_timed(tmp_path):
    """The channels of a run of 20 steps are scored in all of them."""
    case = Case.model_validate(RUN | {"precision": "tetrajet", "measure": "speed", "steps": 20}).model_copy(update={"graph": True})
    with pytest.raises(CaseFailed, match="graph: step 4 of tetrajet is not replayed: it would be timed as the host issues it"):
        execute(case, Mesh(), progress=lambda *_: None, folder=tmp_path)


def test_graphs_of_a_device_share_a_stream_and_let_go_of_those_between(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(recorded, "_streams", {})
    device = torch.device("cuda:0")
    first, second = CudaGraph(device), CudaGraph(device)
    third, gone = CudaGraph(device), ref(second)
    del second
    assert gone() is None and third.owner is first and third.pool is first.pool and third.stream is first.stream
    stream = first.stream
    del first, third
    assert CudaGraph(device).stream is stream and CudaGraph(torch.device("cuda:1")).stream is not stream


def test_a_replay_that_drew_the_recorded_step_again_would_show(monkeypatch):
    precision = {"name": "tetrajet", "out": 0, "osci": 0}
    want, *_ = curve({"precision": precision}, monkeypatch, graph=False)
    fill, filled = Draws.fill, []
    monkeypatch.setattr(Draws, "fill", lambda self, keys: filled.append(fill(self, keys) if not filled else None))
    found, *_ = curve({"precision": precision}, monkeypatch)
    assert found[:4] == want[:4] and found[5:] != want[5:] and len(filled) > 5


def test_a_recompute_draws_the_same_row_and_too_many_rows_are_refused(monkeypatch):
    recipe = make("precision", Case(model="gpt-tiny", precision="tetrajet").precision)
    draws = Draws(recipe, torch.device("cpu"))
    one, other = (Draw(layer, "up", 3, "dx", False) for layer in (0, 1))
    with draws.read():
        assert recipe.draws is draws
        rows = [draws.row(*place).data_ptr() for place in ((0, one), (0, other), (1, one), (0, one))]
        assert rows[0] == rows[3] and len(set(rows)) == 3 and all(row % 16 == rows[0] % 16 for row in rows)
        draws.fill([Key(1, 2, 0, 0), Key(1, 2, 1, 0)])
        assert torch.equal(draws.table[2:3], drawn([one.keys((1, 2, 1, 0))]))
        monkeypatch.setattr("suite.precision.draws.ROWS", 3)
        with pytest.raises(CaseFailed, match="graph: tetrajet: a step draws more than 3 times"):
            draws.row(2, one)
    assert recipe.draws is None
    with draws.read([Key(1, 3, 0, 0)]):
        assert torch.equal(draws.row(0, one)[None], drawn([one.keys((1, 3, 0, 0))])), "written as it comes, where a step runs"


GRAPHED = {"model": "gpt-tiny", "device": "cuda", "graph": True, "measure": "ab", "mesh": {"tp": 2}, "comm": "taco"}


@pytest.mark.parametrize("change,line", [
    ({"device": "cpu"}, "graph: needs device: cuda and measure: ab or loss or speed"),
    ({"measure": "collective"}, "graph: needs device: cuda and measure: ab or loss or speed"),
    ({"implementation": "transformers", "measure": "loss", "mesh": {}, "comm": "bf16"}, "graph: needs implementation: triaxis"),
    ({"link": "gloo"}, "graph: link: gloo passes host memory"),
])
def test_a_step_that_cannot_be_recorded_is_refused(change, line):
    assert Case.model_validate(GRAPHED).graph
    with pytest.raises(ValueError, match=line):
        Case.model_validate(GRAPHED | change)


BASE = {"name": "tetrajet", "out": 0, "osci": 0}


@pytest.mark.gpu
@pytest.mark.parametrize("precision, compile", [("bf16", False), ("fp8", False), ("nvfp4", False), ("mxfp4", False), (BASE, False),
                                                ("bf16", True), (BASE, True)], ids=str)
def test_replayed_steps_are_the_eager_ones(precision, compile):
    """Losses and norms of eight steps, five of them replayed, of two models in turn, whose graphs share their memory."""
    torch.compiler.reset()
    rows = [{"model": model, "device": "cuda", "measure": "speed", "precision": precision, "steps": 8, "compile": compile,
             "data": {"text": "random", "seq": 128, "batch": 8, "micro": 4}} for model in ("gpt-tiny", "qwen-tiny")]
    found = []
    for graph in (False, True):
        cases = [Case.model_validate(row).model_copy(update={"graph": graph}) for row in rows]
        trainers = [Trainer(case, Mesh.from_env(device="cuda")) for case in cases]
        found.append([[float(value) for value in one.step(step)] for step in range(8) for one in trainers])
    # sums of embedding gradients come in any order
    assert found[1] == [pytest.approx(row, rel=1e-3) for row in found[0]]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "nvfp4", {"name": "tetrajet"} | SCHEDULE], ids=str)
def test_a_recorded_run_has_the_losses_of_the_run(precision, tmp_path):
    """Bit for bit, through both phases of the channels and a reset of weights."""
    row = RUN | {"device": "cuda", "precision": precision, "data": {"text": "random", "seq": 128, "batch": 8, "micro": 4}}
    found = [losses(Case.model_validate(row | change), Mesh.from_env(device="cuda"), tmp_path)
             for change in ({}, {"graph": True}, {"graph": True, "save": 10}, {"graph": True, "save": 10})]
    assert len(found[0]) == RUN["steps"] and found[1] == found[0]
    assert found[2] == found[0] and found[3] == found[0], "the last one goes on from behind the choice of channels"


def losses(case, mesh, folder):
    """(loss, gradient norm) of each step."""
    outcome = execute(case, mesh, progress=lambda *_: None, folder=folder)
    return [(one["loss"], one["grad_norm"]) for one in outcome.losses]


def test_a_resumed_run_has_the_losses_of_the_run(tmp_path, monkeypatch):
    """What the test on a GPU compares, without a graph."""
    row = RUN | {"precision": {"name": "tetrajet"} | SCHEDULE}
    want = losses(Case.model_validate(row), Mesh(), tmp_path)
    case, steps, step = Case.model_validate(row | {"save": 10}), [], Trainer.step
    monkeypatch.setattr(Trainer, "step", lambda self, number: steps.append(number) or step(self, number))
    assert losses(case, Mesh(), tmp_path) == want and losses(case, Mesh(), tmp_path) == want
    assert steps == [*range(RUN["steps"]), *range(10, RUN["steps"])]
