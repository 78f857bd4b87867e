"""Workloads: a YAML file in `workloads/` -> cases, validated, expanded, identified and ordered by value.

    title: What the figure is called
    question: What the workload answers
    shared: &gpu {device: cuda}           # optional: a place for YAML anchors, read by nobody
    sizes:
      small:                              # no GPU, minutes
        - {model: [gpt-tiny, qwen-tiny], mesh: {tp: [2, 4]}, comm: [bf16, int8], seed: [0, 1, 2], value: 10}
      short: []                           # one or two GPUs, hours
      full: []                            # the paper's

A list anywhere in a row is a sweep: the row stands for the product of its lists. `value` orders cases (more valuable
first). A row's `name` may hold fields in braces: `hf-{model}-{data.micro}`. Every error names file, row and key.
"""
from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from suite.case import Case

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "workloads"
SIZES = ("small", "short", "full")


class WorkloadError(ValueError):
    """One line a fault: file, row, key, what is wrong."""


@dataclass(frozen=True)
class Expanded:
    """A case with where it came from."""

    case: Case
    workload: str
    size: str
    value: float = 0.0

    @property
    def id(self) -> str:
        return self.case.id


@dataclass(frozen=True)
class Workload:
    name: str
    title: str
    question: str
    rows: list[Expanded] = field(default_factory=list)  # most valuable first

    def cases(self, size: str | None = None) -> list[Expanded]:
        return [row for row in self.rows if size is None or row.size == size]


def names(folder: Path = FOLDER) -> list[str]:
    """Workloads in the folder; models.yaml is no workload."""
    return sorted(path.stem for path in folder.glob("*.yaml") if path.stem != "models")


@lru_cache
def models(path: Path = FOLDER / "models.yaml") -> dict[str, dict[str, Any]]:
    """The model cards: name -> shape, with the family's defaults filled in."""
    text = _read(path)
    families = text.get("families", {})
    cards: dict[str, dict[str, Any]] = {}
    for name, card in text.get("models", {}).items():
        if card.get("family") not in families:
            raise WorkloadError(f"{path.name}: {name}: family: unknown family {card.get('family')!r}; known: {', '.join(families)}")
        cards[name] = {"name": name, **families[card["family"]], **card}
    return cards


def load(name: str, folder: Path = FOLDER) -> Workload:
    """Reads and expands one workload. Raises WorkloadError."""
    path = folder / f"{name}.yaml"
    if not path.exists():
        raise WorkloadError(f"no workload {name!r}; known: {', '.join(names(folder))}")
    text = _read(path)
    unknown = set(text) - {"title", "question", "shared", "sizes"}
    if unknown:
        raise WorkloadError(f"{path.name}: unknown key {sorted(unknown)[0]!r}; known: title, question, shared, sizes")
    sizes = text.get("sizes")
    if not isinstance(sizes, dict) or not set(sizes) <= set(SIZES):
        raise WorkloadError(f"{path.name}: sizes: expected a map of {', '.join(SIZES)}")
    rows: dict[tuple[str, str], Expanded] = {}
    for size in SIZES:
        for number, row in enumerate(sizes.get(size) or [], 1):
            where = f"{path.name}: {size} row {number}"
            if not isinstance(row, dict):
                raise WorkloadError(f"{where}: expected a map, got {row!r}")
            row = dict(row)
            value = row.pop("value", 0)
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise WorkloadError(f"{where}: value: expected a number, got {value!r}")
            for point in _product(row):
                case = _case(point, where)
                seen = rows.get((size, case.id))
                if seen and seen.case != case:
                    raise WorkloadError(f"{where}: name: two different cases are called {case.id!r}")
                if not seen or seen.value < value:
                    rows[size, case.id] = Expanded(case, name, size, float(value))
    ordered = sorted(rows.values(), key=lambda row: (SIZES.index(row.size), -row.value, row.id))
    return Workload(name, str(text.get("title", name)), str(text.get("question", "")), ordered)


def load_all(folder: Path = FOLDER) -> dict[str, Workload]:
    """All workloads. Raises WorkloadError, also where one id stands for two different cases."""
    workloads = {name: load(name, folder) for name in names(folder)}
    seen: dict[str, Expanded] = {}
    for row in itertools.chain.from_iterable(w.rows for w in workloads.values()):
        other = seen.setdefault(row.id, row)
        if other.case != row.case:
            raise WorkloadError(f"{row.workload}.yaml and {other.workload}.yaml call different cases {row.id!r}")
    return workloads


def find(case_id: str, folder: Path = FOLDER) -> Expanded:
    """The case of that id. Raises WorkloadError with the nearest ids."""
    return find_all([case_id], folder)[0]


def find_all(case_ids: Iterable[str], folder: Path = FOLDER) -> list[Expanded]:
    """The cases of these ids; the workloads are read once. Raises as `find`."""
    import difflib

    rows = {row.id: row for w in load_all(folder).values() for row in w.rows}
    for case_id in (case_ids := list(case_ids)):
        if case_id not in rows:
            near = difflib.get_close_matches(case_id, rows, 3, 0.4)
            raise WorkloadError(f"no case {case_id!r}; " + (f"near: {', '.join(near)}" if near else "see `triaxis cases`"))
    return [rows[case_id] for case_id in case_ids]


def _read(path: Path) -> dict[str, Any]:
    try:
        text = yaml.safe_load(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise WorkloadError(f"{path.name}: not UTF-8 (byte {error.start})") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f": line {mark.line + 1}" if mark else ""
        raise WorkloadError(f"{path.name}{where}: {getattr(error, 'problem', error)}") from None
    if not isinstance(text, dict):
        raise WorkloadError(f"{path.name}: expected a map")
    return text


def _product(row: Any) -> list[Any]:
    """Every way to take one element from each list in the row."""
    if isinstance(row, list):
        return [point for element in row for point in _product(element)]
    if isinstance(row, dict):
        return [dict(zip(row, point)) for point in itertools.product(*(_product(v) for v in row.values()))]
    return [row]


def _case(point: dict[str, Any], where: str) -> Case:
    if not isinstance(point.get("model"), str):
        raise WorkloadError(f"{where}: model: expected a name, got {point.get('model')!r}")
    if point["model"] not in models():
        raise WorkloadError(f"{where}: model: unknown model {point['model']!r}; known: {', '.join(models())}")
    name = point.pop("name", None) if isinstance(point.get("name"), str) else None
    try:
        case = Case.model_validate(point)
        if name is not None:
            case = Case.model_validate({**point, "name": _fill(name, case.row(), where)})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "row"
        message = first["msg"].removeprefix("Value error, ")
        given = "" if first["type"] in ("value_error", "extra_forbidden") else f", got {first.get('input')!r}"
        raise WorkloadError(f"{where}: {key}: {message}{given}") from None
    reason = refused(case)
    if reason:
        raise WorkloadError(f"{where}: {reason}")
    return case


def _fill(name: str, row: dict[str, Any], where: str) -> str:
    def value(match: re.Match) -> str:
        here: Any = row
        for part in match[1].split("."):
            if not isinstance(here, dict) or part not in here:
                raise WorkloadError(f"{where}: name: no field {match[1]!r}")
            here = here[part]
        return str(here["name"] if isinstance(here, dict) and "name" in here else here)

    filled = re.sub(r"\{([\w.]+)\}", value, name)
    if not re.fullmatch(r"[\w.=+-]+", filled):
        raise WorkloadError(f"{where}: name: {filled!r} has characters outside letters, digits and _ . = + -")
    return filled


def refused(case: Case) -> str | None:
    """Why no process should be started for the case, as `key: reason`; None where it can run."""
    card, tp = models()[case.model], case.mesh.tp
    if case.mesh.pp > 1:
        return "mesh.pp: pipeline stages are not built yet"
    if card["heads"] % tp:
        return f"mesh.tp: {tp} does not divide {card['heads']} heads of {case.model}"
    if card["kv_heads"] % tp and tp % card["kv_heads"]:
        return f"mesh.tp: {tp} and {card['kv_heads']} K/V heads of {case.model} do not divide one another"
    if card["ffn"] % tp or card["hidden"] % tp:
        return f"mesh.tp: {tp} does not divide hidden {card['hidden']} and feed-forward {card['ffn']} of {case.model}"
    if card["position"] == "learned" and case.data.seq > card["positions"]:
        return f"data.seq: {case.data.seq} is longer than the {card['positions']} positions of {case.model}"
    return None
