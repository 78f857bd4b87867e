"""A recorded step: inputs copied, gradients given back, messages counted at every replay; on a GPU the same losses as eager."""
import pytest
import torch

from suite.case import Case
from suite.comm.counter import Counter
from suite.mesh import Mesh
from suite.recorded import EAGER, Recorded
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


GRAPHED = {"model": "gpt-tiny", "device": "cuda", "graph": True, "measure": "speed", "mesh": {"tp": 2}, "comm": "taco"}


@pytest.mark.parametrize("change,line", [
    ({"device": "cpu"}, "graph: needs device: cuda"),
    ({"measure": "loss"}, "graph: needs device: cuda, measure: speed or ab"),
    ({"link": "gloo"}, "graph: link: gloo passes host memory"),
    ({"comm": {"name": "taco", "rounding": "stochastic"}}, "graph: taco with rounding: stochastic would draw the same noise"),
    ({"precision": "nvfp4"}, "graph: nvfp4 with rounding: stochastic"),
    ({"precision": {"name": "tetrajet", "rounding": "nearest"}}, "graph: tetrajet with out: .* chooses channels"),
])
def test_a_step_that_cannot_be_recorded_is_refused(change, line):
    assert Case.model_validate(GRAPHED).graph
    with pytest.raises(ValueError, match=line):
        Case.model_validate(GRAPHED | change)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_a_replayed_step_is_the_eager_one(precision):
    """Losses and norms of eight steps, five of them replayed; sums of embedding gradients come in any order."""
    row = {"model": "gpt-tiny", "device": "cuda", "measure": "speed", "precision": precision, "steps": 8,
           "data": {"text": "random", "seq": 128, "batch": 8, "micro": 4}}
    found = []
    for graph in (False, True):
        trainer = Trainer(Case.model_validate(row | {"graph": graph}), Mesh.from_env(tp=1, device="cuda"))
        found.append([[float(value) for value in trainer.step(step)] for step in range(8)])
    assert found[1] == [pytest.approx(row, rel=1e-3) for row in found[0]]
