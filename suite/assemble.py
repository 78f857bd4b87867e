"""A case and a mesh -> the model on this rank with its wires: the one place where the three axes are put together."""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from suite.case import Case, Ways
from suite.comm.counter import Counter
from suite.comm.wire import Wire
from suite.gradients import Gradients
from suite.mesh import Group, Mesh
from suite.model import Decoder
from suite.record import CaseFailed
from suite.seams import Layout, Part, make
from suite.weights import Weights
from suite.workload import models


@dataclass
class Assembled:
    model: Decoder
    gradients: Gradients
    counter: Counter
    tp: Wire
    dp: Wire
    parts: list[Part]  # of the precision, the layout and the codecs, in this order


def _parts(values: Iterable[Any], weights: Weights, layout: Layout) -> list[Part]:
    """What the values of the axes keep beside weights. Names tell parts apart in checkpoints."""
    found = [part for value in values for part in getattr(value, "parts", lambda *_: ())(weights, layout)]
    names = [part.name for part in found]
    if len(set(names)) != len(names):
        raise ValueError(f"parts: two are called alike: {', '.join(sorted(names))}")
    return found


def _wire(name: str, group: Group, ways: Ways, counter: Counter) -> Wire:
    forward = make("comm", ways.forward)
    backward = forward if ways.backward == ways.forward else make("comm", ways.backward)
    return Wire(name, group, {"forward": forward, "backward": backward}, counter)


def assemble(case: Case, mesh: Mesh, vocab: int, card: Mapping[str, Any] | None = None) -> Assembled:
    """vocab: size of the tokenizer's vocabulary; card: the case's model unless given. Weights are allocated and drawn from the
    case's seed."""
    card = card or models()[case.model]
    tokens = case.micro * case.data.seq
    counter = Counter()
    tp = _wire("tp", mesh.group("tp"), case.comm.tp, counter)
    dp = _wire("dp", mesh.group("dp"), case.comm.dp, counter)
    layout = make("layout", case.layout, card=card, factor=make("factor", case.factor, card=card),
                  precision=make("precision", case.precision), tp=tp)
    reason = layout.refuse(tokens)
    if reason:
        raise CaseFailed(f"layout {case.layout.name}: {reason}")
    model = Decoder(card, layout, vocab=vocab, seq=case.data.seq, device=mesh.device, compile=bool(case.compile))
    model.weights.initialise(case.seed)
    copies = {n: _wire("tp", mesh.copies(n), case.comm.tp, counter) for n in sorted({n for _, n in model.weights.copied()})}
    codecs = {id(codec): codec for one in (tp, dp) for codec in one.codecs.values()}
    parts = _parts((layout.precision, layout, *codecs.values()), model.weights, layout)
    for part in parts:
        getattr(part, "begin", lambda *_: None)(case, dp)
        model.attach(part.buffers())
    return Assembled(model, Gradients(model.weights, tp, dp, copies), counter, tp, dp, parts)
