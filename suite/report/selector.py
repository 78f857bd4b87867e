"""Selectors: which records answer a claim, and which two of them are compared.

    model=gpt-6.7b comm=taco tp=2|4 link=p2p

Keys are the case columns of the tables, `comm` (both directions), `machine`, `origin`, or a dotted field of the case
(`data.micro=8`). Alternatives are joined by `|`; `*` and `?` match as in file names. A numerator is paired with the
denominator that agrees with it in every field of the case except those that only one selector names, or both differently.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property

from suite.case import Case
from suite.report.source import Entry, columns, leaves, text

COMM = ("comm.tp.forward", "comm.tp.backward")
FIELDS = {  # column -> the fields of the case behind it
    "comm": COMM, "comm_forward": COMM[:1], "comm_backward": COMM[1:], "dp": ("mesh.dp",), "pp": ("mesh.pp",), "tp": ("mesh.tp",),
    "text": ("data.text",), "seq": ("data.seq",), "batch": ("data.batch",), "case": (), "workload": (), "size": (), "machine": (),
    "origin": (),
}
LEAVES = frozenset(leaves(Case(model="any").row()))


def fits(pattern: str, value: str) -> bool:
    """Whether one of the pattern's alternatives is the value."""
    return any(fnmatchcase(value, p) for p in pattern.split("|"))


@dataclass(frozen=True)
class Selector:
    """Parsed by `parse`. `terms`: key -> pattern with its alternatives."""

    terms: Mapping[str, str]

    def matches(self, entry: Entry) -> bool:
        values = {**entry.flat, **{k: text(v) for k, v in columns(entry).items()}}
        for key, pattern in self.terms.items():
            if key == "comm":
                found = any(all(fnmatchcase(values[k], p) for k in COMM) for p in pattern.split("|"))
            else:
                found = any(fits(pattern, v) for v in (values[key].split("+") if key == "workload" else [values[key]]))
            if not found:
                return False
        return True

    @cached_property
    def fields(self) -> dict[str, str]:
        return {field: pattern for key, pattern in self.terms.items() for field in FIELDS.get(key, (key,))}


def parse(given: str) -> Selector:
    """Raises ValueError (one line) for an unknown key, a term without a value or a key given twice."""
    terms: dict[str, str] = {}
    for word in given.split():
        key, _, pattern = word.partition("=")
        if key not in LEAVES and key not in FIELDS:
            raise ValueError(f"unknown key {key!r}")
        if not pattern or key in terms:
            raise ValueError(f"{word!r}: expected key=value, each key once")
        terms[key] = pattern
    if not terms:
        raise ValueError("no key=value in it")
    return Selector(terms)


def free(numerator: Selector, denominator: Selector) -> frozenset[str]:
    """Fields of the case in which a pair may differ."""
    mine, other = numerator.fields, denominator.fields
    return frozenset(k for k in mine.keys() | other.keys() if mine.get(k) != other.get(k))


def pairs(top: Sequence[Entry], bottom: Sequence[Entry], may_differ: frozenset[str]) -> list[tuple[Entry, Entry]]:
    """Each numerator with its denominator; those without one are left out, see `alone`. Raises ValueError where two would fit."""
    def fixed(entry: Entry) -> tuple[tuple[str, str], ...]:
        return tuple((k, v) for k, v in sorted(entry.flat.items()) if k not in may_differ)

    found = []
    partners: dict[tuple, list[Entry]] = {}
    for entry in bottom:
        partners.setdefault(fixed(entry), []).append(entry)
    for entry in top:
        fits = [e for e in partners.get(fixed(entry), []) if e.id != entry.id]
        if len(fits) > 1:
            raise ValueError(f"{entry.id} fits two denominators, {fits[0].id} and {fits[1].id}: name more keys")
        found += [(entry, other) for other in fits]
    return found


def alone(top: Sequence[Entry], bottom: Sequence[Entry], found: Sequence[tuple[Entry, Entry]]) -> list[str]:
    """Why each entry that is in none of the pairs found is in none: what a comparison must count as lost."""
    paired = {e.id for pair in found for e in pair}
    return [f"{e.id}: no {missing} here" for side, missing in ((top, "denominator"), (bottom, "numerator"))
            for e in side if e.id not in paired]
