"""Digests: which code and which values a record stands for. Imports no torch.

    digest(case) = sha256 of {expanded row, model card, {module: sha256 of its syntax tree}}

The modules are the static import closure, inside the suite and the kernels, of what a rank runs (`suite.rank`, the
executor) and of the entry file of each axis value that the case names. A syntax tree is taken without docstrings,
comments and positions. So a comment, an empty line, a reordered YAML key, a plot or a commit changes nothing; another
codec's file changes only the cases that name that codec.

Left out on purpose: `suite.case` and `suite.workload`, whose outcome (row and card) is hashed itself, `suite.record`, whose
form has its own number (`SCHEMA`), and what only carries messages between ranks and runner; else one new codec in the schema,
or another wording on the screen, would rerun every case.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import sys
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from suite.case import Case
from suite.seams import module_of
from suite.workload import ROOT, models

PACKAGES = ("suite", "kernels")
LEFT_OUT = frozenset({"suite.case", "suite.workload", "suite.record", "suite.digest", "suite.events", "suite.processes"})
EXECUTOR = "suite.train:execute"


class DigestError(ValueError):
    """A module that a case names and that is not there, or is no Python: one line."""


class Tree:
    """Python modules under some folders as files; nothing is imported. Answers are kept for the life of the object."""

    def __init__(self, root: Path = ROOT, folders: Iterable[Path] | None = None) -> None:
        others = folders if folders is not None else [Path.cwd(), *(Path(p) for p in sys.path if p)]
        self.folders = [root, *others]
        self._files: dict[str, Path | None] = {}
        self._parsed: dict[str, tuple[str, frozenset[str]]] = {}
        self._closures: dict[tuple[tuple[str, ...], frozenset[str]], dict[str, str]] = {}

    def file(self, module: str) -> Path | None:
        """The file of a module, None where there is none (a builtin, a namespace, not installed)."""
        if module not in self._files:
            stem = Path(*module.split("."))
            places = (folder / form for folder in self.folders for form in (stem.with_suffix(".py"), stem / "__init__.py"))
            self._files[module] = next((path for path in places if path.is_file()), None)
        return self._files[module]

    def closure(self, roots: Iterable[str], leave_out: frozenset[str] = LEFT_OUT) -> dict[str, str]:
        """Module -> digest, for the roots and all they import inside their own packages. Raises DigestError."""
        key = tuple(sorted(set(roots))), leave_out
        if key not in self._closures:
            self._closures[key] = self._closure(*key)
        return self._closures[key]

    def _closure(self, roots: tuple[str, ...], leave_out: frozenset[str]) -> dict[str, str]:
        packages = {*PACKAGES, *(root.partition(".")[0] for root in roots)}
        found: dict[str, str] = {}
        waiting = list(roots)
        while waiting:
            module = waiting.pop()
            if module in found or module in leave_out or module.partition(".")[0] not in packages:
                continue
            if self.file(module) is None:
                if module in roots:
                    raise DigestError(f"no module {module!r}")
                continue  # an attribute of a package, already covered by the package itself
            found[module], imports = self._read(module)
            waiting += imports
            if "." in module:
                waiting.append(module.rpartition(".")[0])
        return dict(sorted(found.items()))

    def digest(self, roots: Iterable[str]) -> str:
        """One digest over everything the roots import, the schema too: for rules that read records."""
        return _sha(self.closure(roots, frozenset()))

    def _read(self, module: str) -> tuple[str, frozenset[str]]:
        if module not in self._parsed:
            path = self.file(module)
            try:
                tree = ast.parse(path.read_bytes())
            except SyntaxError as error:
                raise DigestError(f"{path.name}: line {error.lineno}: {error.msg}") from None
            imports = frozenset(_imports(tree, module, package=path.name == "__init__.py"))
            _strip_docstrings(tree)
            self._parsed[module] = hashlib.sha256(ast.dump(tree).encode()).hexdigest(), imports
        return self._parsed[module]


def digest(case: Case, tree: Tree | None = None) -> str:
    """Hex digest of a case and of the code that runs it. Raises DigestError."""
    tree = tree or _here()
    named = {"factor": [case.factor], "layout": [case.layout], "precision": [case.precision], "comm": []}
    for group in (case.comm.tp, case.comm.dp, case.comm.pp):
        named["comm"] += [group.forward, group.backward]
    roots = ["suite.rank", executor().partition(":")[0]]
    roots += sorted({module_of(axis, choice.name) for axis, choices in named.items() for choice in choices})
    return _sha({"case": case.row(), "card": models()[case.model], "modules": tree.closure(roots)})


def executor() -> str:
    """`package.module:function` that a rank calls for each case; TRIAXIS_EXECUTOR names another."""
    return os.environ.get("TRIAXIS_EXECUTOR") or EXECUTOR


@lru_cache
def _here() -> Tree:
    return Tree()


def _sha(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, allow_nan=False).encode()).hexdigest()


def _imports(tree: ast.Module, module: str, package: bool) -> set[str]:
    """Modules named by import statements anywhere in the file, but not those for type checkers only."""
    found: set[str] = set()
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            waiting += node.orelse
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = module.split(".") if package else module.split(".")[:-1]
                here = here[: len(here) - (node.level - 1)]
                base = ".".join([*here, base] if base else here)
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
        waiting += ast.iter_child_nodes(node)
    return found


def _strip_docstrings(tree: ast.Module) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
                node.body = node.body[1:]
