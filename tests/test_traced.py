"""What torch.compile sees of a first layer on a GPU, traced without one: each layout, factor and precision of workloads.

Tensors are fake CUDA ones, which need a torch that was built with CUDA but no device. Tracing ends before the compiler, which would
make the backward pass: it finds what this release of torch cannot put into one graph, in branches that CPU tests never take.
"""
from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from suite.assemble import assemble
from suite.case import Case
from suite.mesh import Group, Mesh
from suite.model import FIRST, OPEN
from suite.workload import load_all, models

DEVICE = torch.device("cuda:0")


WHOLE = "the block is one graph"


def stop(graph, inputs):
    raise RuntimeError(WHOLE)


class Pretended(Mesh):
    """This rank of a mesh whose others do not run."""

    def group(self, name):
        return Group(ranks=tuple(range({"tp": self.tp, "dp": self.dp}.get(name, 1))))

    def copies(self, n):
        return Group(ranks=tuple(range(n)))


def blocks() -> Iterator:
    """One case of each kind of block that workloads run on a GPU."""
    seen = set()
    for workload in load_all().values():
        for row in workload.rows:
            case = row.case
            kind = (models()[case.model]["family"], str(case.factor), str(case.layout), str(case.precision), case.mesh.tp > 1)
            if case.device == "cuda" and case.implementation == "triaxis" and kind not in seen:
                seen.add(kind)
                yield pytest.param(case, id=row.id)


def fault(case: Case) -> str:
    """Why the first layer is not one graph, empty where it is."""
    card = {**models()[case.model], "layers": 1}
    with FakeTensorMode(allow_non_fake_inputs=True):
        made = assemble(case.model_copy(update={"compile": False}), Pretended(tp=case.mesh.tp, dp=case.mesh.dp, device=DEVICE), 256,
                        card)
        model, tp = made.model, case.mesh.tp
        tokens, width = min(case.micro, 2) * case.data.seq, card["hidden"]
        shape = {"btp": (tokens, width // tp), "megatron-sp": (tokens // tp, width)}.get(case.layout.name, (tokens, width))
        x = torch.empty(shape, dtype=model.layout.precision.residual, device=DEVICE).requires_grad_()
        torch.compiler.reset()
        try:
            with torch.compiler.config.patch(dynamic_sources=OPEN):
                block = torch.compile(model.numbered, fullgraph=True, backend=stop)
                block(model.blocks[0], x, model.rope, FIRST, model.noise, {})
        except Exception as error:
            return "" if WHOLE in str(error) else str(error)
    return "nothing was compiled"


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="needs a torch built with CUDA")
@pytest.mark.parametrize("case", [*blocks()])
def test_a_block_on_a_gpu_is_one_graph(case):
    assert fault(case) == ""


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="needs a torch built with CUDA")
def test_what_breaks_a_graph_is_seen(monkeypatch):
    from suite.layout import lowrank

    def branching(self, h, *rest):
        return h if h.sum() > 0 else -h  # on a value, which a graph does not have

    monkeypatch.setattr(lowrank.LowRankLayout, "up", branching)
    case = Case(model="llama-tiny", factor="cola", layout="btp", mesh={"tp": 2}, device="cuda")
    assert "branching" in fault(case)
