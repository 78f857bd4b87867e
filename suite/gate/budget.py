"""Compile-time budgets: what every kernel takes on every architecture, against the committed kernels/budget.json.

    {"triton": VERSION, "calls": {entry: {launches ..}}, "sm_90": {entry: {registers ..}}, ...}

Worse is: more spills, float64 or local memory, shared memory, traffic, launches or passes; fewer warps resident; a smaller share
of wide accesses; registers or instructions by more than a tenth; what compiled no longer does. The rest that differs is
`changed`. The compiler is deterministic, the assembler of sm_100 where its addresses are (`kernels.sass.steady`): where they cannot
be, digests of code are left empty and not compared. Another Triton gives other code: `rebaseline`. Code that the assembler got
wrong (`kernels.sass.stale`) is a fault, whatever the file says.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from kernels.sass import steady
from suite.gate.finding import BETTER, CHANGED, FAULT, FINE, MISSING, NEW, REBASELINE, WORSE, Finding
from suite.record import publish
from suite.workload import ROOT

PATH = ROOT / "kernels" / "budget.json"
MORE = {"spills": 0.0, "double": 0.0, "local": 0.0, "shared": 0.0, "traffic": 0.0, "registers": 0.1, "instructions": 0.1,
        "launches": 0.0, "launched": 0.0, "passes": 0.0, "passed": 0.0}  # quantity -> share by which it may grow
LESS = ("occupancy",)
CALLS = "calls"
Budget = dict[str, Any]
_digests = True  # of a worker process: whether the same source gives the same instructions


def version() -> str:
    """Triton's version, and the assembler's file where another than Triton's own is chosen."""
    own = importlib.metadata.version("triton")
    return own + (" with another ptxas" if any(name.startswith("TRITON_PTXAS") for name in os.environ) else "")


def _begin() -> None:
    """In each worker process."""
    global _digests
    _digests = steady()


def _compiled(task: tuple[str, str, int, int]) -> tuple[dict[str, Any], bytes | None]:
    """In a process of its own: one launch of a named entry, but for the counts of instructions, and its machine code."""
    from suite.gate.resources import compiled, launches

    registry, name, arch, index = task
    entry = next(e for e in _entries(registry) if e.name == name)
    row, code = compiled(launches(entry)[index], arch)
    return row if _digests or code is None else row | {"code": ""}, code


def _counted(task: tuple[int, Sequence[bytes]]) -> list[dict[str, int]]:
    """In a process of its own: the counts of many kernels of one architecture."""
    from kernels.sass import disassembled
    from suite.gate.resources import counted

    arch, codes = task
    return [counted(lines) for lines in disassembled(codes, arch)]


def _entries(registry: str) -> Sequence[Any]:
    from importlib import import_module

    return import_module(registry).ENTRIES


def collect(registry: str = "kernels.registry", workers: int | None = None, architectures: Sequence[int] | None = None) -> Budget:
    """Compiles what the registry lists, equal code once, and counts each entry's calls. A call that throws gives a `fault`."""
    from kernels.launch import ARCHITECTURES
    from suite.gate.calls import calls
    from suite.gate.resources import identity, launches, merged

    entries, wanted, tasks = _entries(registry), {}, {}
    found: Budget = {"triton": version(), CALLS: {}}
    for entry in entries:
        try:
            found[CALLS][entry.name] = calls(entry)
            kernels = launches(entry)
        except Exception as error:  # a fault of the kernel's host side is a result, whatever it is
            found[CALLS][entry.name] = {"fault": f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"}
            continue
        for arch in architectures or ARCHITECTURES:
            wanted[entry.name, arch] = [identity(launch, arch) for launch in kernels]
            for index, key in enumerate(wanted[entry.name, arch]):
                tasks.setdefault(key, (registry, entry.name, arch, index))
    workers = workers or len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_begin) as pool:
        made = dict(zip(tasks, pool.map(_compiled, tasks.values())))
        groups = [(arch, [key for key in made if tasks[key][2] == arch and made[key][1] is not None])
                  for arch in architectures or ARCHITECTURES]
        counts = pool.map(_counted, [(arch, [made[key][1] for key in keys]) for arch, keys in groups])
        rows = {key: row for key, (row, _) in made.items()}
        for (_, keys), group in zip(groups, counts):
            rows |= {key: rows[key] | row for key, row in zip(keys, group)}
    for (name, arch), keys in sorted(wanted.items(), key=lambda item: (item[0][1], item[0][0])):
        found.setdefault(f"sm_{arch}", {})[name] = merged([rows[key] for key in keys])
    return found


def load(path: Path = PATH) -> Budget:
    """Raises ValueError, in one line, for a file that is missing, empty or no budget."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path.name}: no budget yet; `triaxis gate budget --update` writes it") from None
    except ValueError as error:
        raise ValueError(f"{path.name}: not a budget: {error}") from None
    rows = [v for k, v in found.items() if k != "triton"] if isinstance(found, dict) else []
    if not rows or "triton" not in found or not all(isinstance(r, dict) and r and all(map(_row, r.values())) for r in rows):
        raise ValueError(f"{path.name}: not a budget: it needs triton, calls and architectures with rows of numbers")
    return found


def _row(row: Any) -> bool:
    """Whether a row holds finite numbers, a digest, or a compiler's refusal."""
    return isinstance(row, dict) and bool(row) and all(
        isinstance(v, str) or (type(v) in (int, float) and 0 <= v < float("inf")) for v in row.values())


def save(budget: Budget, path: Path = PATH) -> None:
    """One row a line, so that a review sees which kernel changed. Raises ValueError for a call that faults, or without digests."""
    faults = [f"{name}: {row['fault']}" for name, row in budget[CALLS].items() if "fault" in row]
    if faults:
        raise ValueError(f"not written, a call faults: {faults[0]}")
    if any(row.get("code") == "" for rows in budget.values() if isinstance(rows, dict) for row in rows.values()):
        raise ValueError("not written: this system places a program's memory at random, and the assembler's order of "
                         "instructions depends on it; another container, or none, lets it be turned off")
    blocks = []
    for key, rows in budget.items():
        if isinstance(rows, dict):
            body = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(rows.items()))
            blocks.append(f" {json.dumps(key)}: {{\n{body}\n }}")
        else:
            blocks.append(f" {json.dumps(key)}: {json.dumps(rows)}")
    publish(path, "{\n" + ",\n".join(blocks) + "\n}\n")


def compare(old: Budget, new: Budget) -> list[Finding]:
    """One finding an entry and architecture. A row of the old budget that the new one lacks is `missing`."""
    if old["triton"] != new["triton"]:
        text = f"the budget is of {old['triton']}, this is {new['triton']}; `triaxis gate budget --update`, no regression is meant"
        return [Finding("triton", REBASELINE, text)]
    found = []
    for place in [key for key in old if key != "triton"] + [key for key in new if key not in old]:
        before, after = old.get(place, {}), new.get(place, {})
        fresh = {name: row for name, row in after.items() if name not in before}
        for name, row in before.items():
            label = name if place == CALLS else f"{name} {place}"
            if name in after:
                found.append(_compared(label, row, after[name]))
            else:
                found.append(Finding(label, MISSING, _renamed(row, fresh)))
        for name, row in fresh.items():
            label = name if place == CALLS else f"{name} {place}"
            text = row.get("fault") or row.get("refused")
            found.append(Finding(label, FAULT if "fault" in row else NEW, text or "not in the budget; add it by --update"))
    return found


def _renamed(row: Mapping[str, Any], fresh: Mapping[str, Mapping[str, Any]]) -> str:
    names = [name for name, other in fresh.items() if row.get("code") and other.get("code") == row["code"]]
    return f"deleted, or renamed: {names[0]} has the same code" if names else "deleted or renamed"


def _compared(label: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Finding:
    if "fault" in new:
        return Finding(label, FAULT, new["fault"])
    if "refused" in old or "refused" in new:
        if "refused" in old and "refused" in new:
            return Finding(label, FINE)
        return Finding(label, *((WORSE, f"no longer compiles: {new['refused']}") if "refused" in new else (BETTER, "compiles now")))
    worse, better, changed = [], [], []
    for name in [*MORE, *LESS]:
        if name not in old and name not in new:
            continue
        if name not in old or name not in new:
            return Finding(label, FAULT, f"{name} is only on one side; write the budget anew by --update")
        _sort(name, old[name], new[name], worse, better, changed)
    if "wide" in old and old["wide"] * max(new["global"], 1) > new["wide"] * max(old["global"], 1):
        worse.append(f"wide {old['wide']} of {old['global']} -> {new['wide']} of {new['global']} accesses")
    if worse:
        return Finding(label, WORSE, ", ".join(worse))
    if better or changed:
        return Finding(label, BETTER if better and not changed else CHANGED, ", ".join(better + changed))
    known = old.get("code") and new.get("code")
    if known and old["code"] != new["code"]:
        return Finding(label, CHANGED, "other instructions, the same budget")
    return Finding(label, FINE)


def _sort(name: str, old: float, new: float, worse: list[str], better: list[str], changed: list[str]) -> None:
    if old == new:
        return
    text = f"{name} {old:g} -> {new:g}"
    if name in LESS:
        (worse if new < old else better).append(text)
    elif new > old * (1 + MORE[name]):
        worse.append(text)
    else:
        (better if new < old else changed).append(text)


def gate(path: Path = PATH, update: bool = False, collected: Callable[[], Budget] = collect) -> list[Finding]:
    """Compares with the file, or writes it; `--update` over a budget says what it changes."""
    new = collected()
    if not update:
        return compare(load(path), new)
    try:
        findings = compare(load(path), new)
    except ValueError:
        findings = [Finding("budget", NEW, f"{sum(len(v) for v in new.values() if isinstance(v, dict))} rows")]
    save(new, path)
    return findings
