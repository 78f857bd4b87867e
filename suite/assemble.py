"""A case and a mesh -> the model on this rank with its wires: the one place where the three axes are put together."""
from __future__ import annotations

from dataclasses import dataclass

from suite.case import Case, Ways
from suite.comm.counter import Counter
from suite.comm.wire import Wire
from suite.gradients import Gradients
from suite.mesh import Group, Mesh
from suite.model import Decoder
from suite.seams import make
from suite.workload import models


@dataclass
class Assembled:
    model: Decoder
    gradients: Gradients
    counter: Counter
    tp: Wire
    dp: Wire


def _wire(name: str, group: Group, ways: Ways, counter: Counter) -> Wire:
    return Wire(name, group, {way: make("comm", getattr(ways, way)) for way in ("forward", "backward")}, counter)


def assemble(case: Case, mesh: Mesh, vocab: int) -> Assembled:
    """vocab: size of the tokenizer's vocabulary. Weights are allocated and drawn from the case's seed."""
    card = models()[case.model]
    counter = Counter()
    tp = _wire("tp", mesh.group("tp"), case.comm.tp, counter)
    dp = _wire("dp", mesh.group("dp"), case.comm.dp, counter)
    layout = make("layout", case.layout, card=card, factor=make("factor", case.factor),
                  precision=make("precision", case.precision), tp=tp)
    model = Decoder(card, layout, vocab=vocab, seq=case.data.seq, device=mesh.device, compile=bool(case.compile))
    model.weights.initialise(case.seed)
    copies = {n: _wire("tp", mesh.copies(n), case.comm.tp, counter) for n in sorted({n for _, n in model.weights.copied()})}
    return Assembled(model, Gradients(model.weights, tp, dp, copies), counter, tp, dp)
