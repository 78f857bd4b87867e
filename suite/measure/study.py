"""Cases that measure a piece instead of a training run: a codec, a collective, a layer, a quantiser, two variants of a step."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from suite.case import Case
from suite.measure import block, captured, collective, interleaved, quantize
from suite.mesh import Mesh


def study(case: Case, mesh: Mesh, outcome: Any, trained: Callable[[Case], tuple[Any, Callable[[], Any]]],
          trainer: Callable[[Case], Any]) -> None:
    """Fills the outcome. trained: a case -> (the wire of the model it trains, a step of it), for what is captured there;
    trainer: a case -> its model under training."""
    if case.measure == "codec":
        captured.study(case, mesh, trained, outcome)
    elif case.measure == "ab":
        interleaved.study(case, outcome, trainer)
    elif case.measure == "block":
        block.study(case, mesh, outcome)
    elif case.measure == "quantize":
        quantize.study(case, mesh, outcome)
    else:
        collective.study(case, mesh, outcome)
