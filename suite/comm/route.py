"""How a byte codec's messages cross: options that every one of them has beside its own.

    min_bytes    messages smaller than that in bf16 cross uncompressed; "auto": each size as it was
                 fastest here (suite/comm/choice.py)
    algorithm    of an all-reduce: one-shot, two-shot; auto: one shot between two ranks and for small messages
    depth        slices of an all-reduce, so that codec and wire overlap: a codec that takes a few percent of the wire's
                 time has nothing to hide, so 1
    direct       read the peers' memory where the link allows (suite/comm/direct.py), else the library's byte collectives
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ALGORITHMS = ("auto", "one-shot", "two-shot")
DEPTHS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Route:
    """See the module docstring. Raises ValueError naming the option that does not fit."""

    min_bytes: int | Literal["auto"] = 0
    algorithm: str = "auto"
    depth: int = 1
    direct: bool = True

    def __post_init__(self) -> None:
        if self.min_bytes != "auto" and (not isinstance(self.min_bytes, int) or self.min_bytes < 0):
            raise ValueError(f"comm: min_bytes {self.min_bytes}: expected at least 0, or auto")
        if self.algorithm not in ALGORITHMS:
            raise ValueError(f"comm: algorithm {self.algorithm!r}: expected one of {', '.join(ALGORITHMS)}")
        if self.depth not in DEPTHS:
            raise ValueError(f"comm: depth {self.depth}: expected one of {', '.join(map(str, DEPTHS))}")


PLAIN = Route()
