"""A recorded step: inputs copied, gradients given back, messages counted at every replay; on a GPU the same losses as eager."""
import pytest
import torch

from suite.case import Case
from suite.comm.counter import Counter
from suite.mesh import Mesh
from suite.record import CaseFailed
from suite.recorded import EAGER, Recorded
from suite.seams import make
from suite.trainer import Trainer

ROW = {"group": "tp", "way": "forward", "op": "all_reduce", "codec": "bf16", "dtype": "bfloat16", "purpose": "activations",
       "kind": "modelled", "elements": 3, "payload_bytes": 6, "wire_bytes": 6.0}


class Played:
    """A graph on the CPU. What is recorded runs again at a replay, on the tensors that it was recorded with and into those that it
    gave; as a graph's, its gradient lies where it lay, and nothing is counted."""

    def __init__(self):
        self.leaf, self.counter = torch.tensor([2.0], requires_grad=True), Counter()

    def run(self, function):
        return function()

    def record(self, function):
        self.function, self.found = function, function()
        self.gradient = self.leaf.grad
        return self.found

    def replay(self):
        self.leaf.grad = None
        with self.counter.aside():
            for kept, new in zip(self.found, self.function()):
                kept.copy_(new)
        self.gradient.copy_(self.leaf.grad)
        self.leaf.grad = None


def played():
    """A recorded step of one weight, its gradient that of Σ (w x)², and a message in each."""
    graph = Played()

    def passes(inputs):
        loss = (graph.leaf * inputs[0]).square().sum()
        loss.backward()
        graph.counter.add(**ROW)
        graph.counter.message("all_reduce", 6, 2)
        return (loss.detach(),)

    return Recorded(passes, [graph.leaf], graph.counter, graph), graph.leaf, graph.counter


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
    ("precision", "bf16", True), ("precision", "fp8", True), ("precision", "nvfp4", False), ("precision", "tetrajet", False),
    ("precision", {"name": "tetrajet", "rounding": "nearest", "out": 0, "osci": 0}, False),  # its signs are drawn
    ("precision", {"name": "nvfp4", "rounding": "nearest"}, True),
], ids=str)
def test_what_draws_on_the_host_is_not_recorded(axis, value, can):
    case = Case(model="gpt-tiny", mesh={"tp": 2}, **{axis: value})
    choice = case.comm.tp.forward if axis == "comm" else case.precision
    assert make(axis, choice).recordable == can


def test_a_trainer_refuses_what_it_cannot_record():
    case = Case(model="gpt-tiny", precision="nvfp4", data={"seq": 16, "batch": 1}).model_copy(update={"graph": True})
    with pytest.raises(CaseFailed, match="graph: nvfp4: what it draws or decides on the host would be the same at every replay"):
        Trainer(case, Mesh())


GRAPHED = {"model": "gpt-tiny", "device": "cuda", "graph": True, "measure": "ab", "mesh": {"tp": 2}, "comm": "taco"}


@pytest.mark.parametrize("change,line", [
    ({"device": "cpu"}, "graph: needs device: cuda and measure: ab"),
    ({"measure": "loss"}, "graph: needs device: cuda and measure: ab"),
    ({"measure": "speed"}, "graph: needs device: cuda and measure: ab"),
    ({"link": "gloo"}, "graph: link: gloo passes host memory"),
])
def test_a_step_that_cannot_be_recorded_is_refused(change, line):
    assert Case.model_validate(GRAPHED).graph
    with pytest.raises(ValueError, match=line):
        Case.model_validate(GRAPHED | change)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_replayed_steps_are_the_eager_ones(precision):
    """Losses and norms of eight steps, five of them replayed, of two models in turn, whose graphs share their memory."""
    rows = [{"model": model, "device": "cuda", "measure": "speed", "precision": precision, "steps": 8,
             "data": {"text": "random", "seq": 128, "batch": 8, "micro": 4}} for model in ("gpt-tiny", "qwen-tiny")]
    found = []
    for graph in (False, True):
        cases = [Case.model_validate(row).model_copy(update={"graph": graph}) for row in rows]
        trainers = [Trainer(case, Mesh.from_env(device="cuda")) for case in cases]
        found.append([[float(value) for value in one.step(step)] for step in range(8) for one in trainers])
    # sums of embedding gradients come in any order
    assert found[1] == [pytest.approx(row, rel=1e-3) for row in found[0]]
