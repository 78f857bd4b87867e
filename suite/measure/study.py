"""Cases that measure a codec, a collective or a quantiser instead of a training run."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from suite.case import Case
from suite.measure import captured, collective, quantize
from suite.mesh import Mesh


def study(case: Case, mesh: Mesh, outcome: Any, trained: Callable[[Case], tuple[Any, Callable[[], Any]]]) -> None:
    """Fills the outcome. trained: a case -> (the wire of the model it trains, a step of it), for what is captured there."""
    if case.measure == "codec":
        captured.study(case, mesh, trained, outcome)
    elif case.measure == "quantize":
        quantize.study(case, mesh, outcome)
    else:
        collective.study(case, mesh, outcome)
