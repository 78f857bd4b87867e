"""What crossed: `Traffic` rows filled at the seam and a ledger of the messages that the transport really sent.

payload P: bytes of the whole tensor in its form on the wire, padding included. Sent per rank of a group of p:
    all-gather, reduce-scatter, all-to-all    (p-1)/p * P
    all-reduce, max                           2 (p-1)/p * P      (two shots of a codec too; one shot: (p-1) * P)
`modelled` where the library moves it (ring-equivalent, whatever algorithm it picks), `counted` where we ship the bytes.
`calls` are calls of the seam; a statistic that rides in the message of another tensor has 0 calls of its own.
The ledger holds messages per operation of the library, so that an audit can compare both with what was really called.
"""
from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields

from suite.record import Kind, Traffic

SUMS = ("calls", "elements", "payload_bytes", "wire_bytes")  # the rest of a Traffic row is its key
_KEYS = tuple(f.name for f in fields(Traffic) if f.name not in SUMS)
RING = {"all_reduce": 2.0, "max": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0, "barrier": 0.0,
        "direct_all_gather": 1.0, "direct_all_to_all": 1.0}


def ring_bytes(op: str, payload: int, size: int) -> float:
    """Bytes that a rank sends for an operation over `size` ranks that carries `payload` bytes."""
    return RING[op] * (size - 1) / size * payload


class Counter:
    """Sums rows and messages since the last reset. One counter serves all wires of a process."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._rows: dict[tuple, list[float]] = defaultdict(lambda: [0, 0, 0, 0.0])
        self.messages: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0.0])  # op -> calls, payload bytes, sent bytes

    def add(self, *, group: str, way: str, op: str, codec: str, dtype: str, purpose: str, kind: Kind,
            elements: int, payload_bytes: int, wire_bytes: float, calls: int = 1) -> None:
        sums = self._rows[group, way, op, codec, dtype, purpose, kind]
        for i, value in enumerate((calls, elements, payload_bytes, wire_bytes)):
            sums[i] += value

    def message(self, op: str, payload: int, size: int) -> None:
        """One call of the library; said by the transport alone."""
        sums = self.messages[op]
        for i, value in enumerate((1, payload, ring_bytes(op, payload, size))):
            sums[i] += value

    @contextlib.contextmanager
    def aside(self) -> Iterator[Counter]:
        """What is counted meanwhile goes to the counter given instead, of messages that are recorded but not sent."""
        kept, other = (self._rows, self.messages), Counter()
        self._rows, self.messages = other._rows, other.messages
        try:
            yield other
        finally:
            self._rows, self.messages = kept

    def include(self, other: Counter) -> None:
        """Adds what another counter counted."""
        for mine, theirs in ((self._rows, other._rows), (self.messages, other.messages)):
            for key, sums in theirs.items():
                for i, value in enumerate(sums):
                    mine[key][i] += value

    def snapshot(self) -> list[Traffic]:
        """The rows so far, sorted by their key."""
        return [_row(key, sums) for key, sums in sorted(self._rows.items())]


def _row(key: tuple, sums: list[float]) -> Traffic:
    calls, elements, payload, sent = sums
    return Traffic(**dict(zip(_KEYS, key)), calls=int(calls), elements=int(elements), payload_bytes=int(payload), wire_bytes=sent)


def difference(after: list[Traffic], before: list[Traffic]) -> list[Traffic]:
    """What crossed between two snapshots of one counter; rows that did not grow are left out."""
    def split(rows: list[Traffic]) -> dict[tuple, list[float]]:
        return {tuple(getattr(r, k) for k in _KEYS): [getattr(r, k) for k in SUMS] for r in rows}

    old = split(before)
    grown = {key: [a - b for a, b in zip(sums, old.get(key, [0] * 4))] for key, sums in split(after).items()}
    return [_row(key, sums) for key, sums in sorted(grown.items()) if any(sums)]


def total(rows: list[Traffic], **where: str) -> Traffic:
    """The sum of the rows whose fields equal `where`; fields on which they differ read "*"."""
    chosen = [r for r in rows if all(getattr(r, k) == v for k, v in where.items())]
    key = []
    for name in _KEYS:
        values = {getattr(r, name) for r in chosen} or {where.get(name, "*")}
        key.append(values.pop() if len(values) == 1 else "*")
    return _row(tuple(key), [sum(getattr(r, k) for r in chosen) for k in SUMS])
