"""Digests: which code and which values a record stands for. Imports no torch.

    digest(case) = sha256 of {expanded row, model card, {module: sha256 of its syntax tree},
                              {torch, triton, another implementation than ours: version},
                              {data.text, data.tokenizer, init: content of the file or folder that each names}}

The modules are the static import closure, inside the suite and the kernels, of what a rank runs (`suite.rank`, the
executor) and of the entry file of each axis value that the case names. A syntax tree is taken without docstrings,
comments and positions, in a form that Python 3.11 to 3.13 agree on (`written`). So a comment, an empty line, a reordered YAML
key, a plot, a commit or another Python changes nothing; another codec's file changes only the cases that name that codec.

The content of a file is its sha256; of a checkpoint it is each file's name and size, the header of a safetensors file (names,
shapes, dtypes) and the sha256 of a JSON file: weights are too large to be read for a digest. What is no file here (a built-in
corpus or tokenizer, a data set by name, a path that is not there) counts as `missing`.

Left out on purpose: `suite.case`, `suite.options` and `suite.workload`, whose outcome (row and card) is hashed itself,
`suite.record`, whose form has its own number (`SCHEMA`), and what only carries messages between ranks and runner; else one new
codec in the schema, or another wording on the screen, would rerun every case.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import json
import os
import re
import stat
import sys
from collections.abc import Callable, Iterable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from suite.case import Case
from suite.seams import module_of
from suite.workload import ROOT, models

PACKAGES = ("suite", "kernels")
LEFT_OUT = frozenset({"suite.case", "suite.options", "suite.workload", "suite.record", "suite.digest", "suite.events",
                      "suite.processes"})
EXECUTOR = "suite.train:execute"
LIBRARIES = ("torch", "triton")  # whose release moves losses and times
MISSING = "missing"
HEADER = 100_000_000  # bytes: the largest header that safetensors itself reads
# Of a syntax tree: what position implies, what only type checkers read, and the `u` of u"".
UNWRITTEN = frozenset({"ctx", "type_comment", "type_ignores", "kind"})


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
            self._parsed[module] = hashlib.sha256(written(tree).encode()).hexdigest(), imports
        return self._parsed[module]


def digest(case: Case, tree: Tree | None = None) -> str:
    """Hex digest of a case, of the code that runs it and of the files it reads. Raises DigestError."""
    tree = tree or _here()
    named = {"factor": [case.factor], "layout": [case.layout], "precision": [case.precision], "comm": []}
    for group in (case.comm.tp, case.comm.dp, case.comm.pp):
        named["comm"] += [group.forward, group.backward]
    roots = ["suite.rank", executor().partition(":")[0]]
    roots += sorted({module_of(axis, choice.name) for axis, choices in named.items() for choice in choices})
    return _sha(
        {
            "case": case.row(),
            "card": models()[case.model],
            "modules": tree.closure(roots),
            "libraries": {name: _version(name) for name in {*LIBRARIES, case.implementation} - {"triaxis"}},
            "files": _files(case),
        }
    )


def executor() -> str:
    """`package.module:function` that a rank calls for each case; TRIAXIS_EXECUTOR names another."""
    return os.environ.get("TRIAXIS_EXECUTOR") or EXECUTOR


def written(node: Any) -> str:
    """A syntax tree as text, the same from any Python: ASCII, fields by name, without empty ones.

    Pythons differ in which fields a node has, in whether they show empty ones, and in how they cut the text of an f-string:
    neighbouring pieces are joined.
    """
    if isinstance(node, list):
        return f"[{', '.join(map(written, node))}]"
    if not isinstance(node, ast.AST):
        return ascii(node)
    fields = {name: getattr(node, name, None) for name in sorted(node._fields) if name not in UNWRITTEN}
    if isinstance(node, ast.JoinedStr):
        fields["values"] = _joined(node.values)
    shown = (f"{name}={written(value)}" for name, value in fields.items() if value is not None and value != [])
    return f"{type(node).__name__}({', '.join(shown)})"


def _joined(pieces: Iterable[ast.expr]) -> list[Any]:
    joined: list[Any] = []
    for piece in pieces:
        value = piece.value if isinstance(piece, ast.Constant) else piece
        if isinstance(value, str) and joined and isinstance(joined[-1], str):
            joined[-1] += value
        elif value != "":
            joined.append(value)
    return joined


@lru_cache
def _here() -> Tree:
    return Tree()


@lru_cache
def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _files(case: Case) -> dict[str, Any]:
    """Field -> content of the file or folder that it names."""
    # hf:json:FILE@train reads a file too; its name ends where a split or a count begins.
    text = re.sub(r"^hf:\w+:([^@#]+).*", r"\1", case.data.text)
    found: dict[str, Any] = {"text": _content(Path(text), _sha_of)}
    if isinstance(case.data.tokenizer, str):
        found["tokenizer"] = _content(Path(case.data.tokenizer), _sha_of)
    if case.init is not None:
        found["init"] = _checkpoint(Path(case.init))
    return found


def _checkpoint(path: Path) -> Any:
    if not path.is_dir():
        return _content(path, _outline)
    return {one.name: _content(one, _outline) for one in sorted(path.iterdir()) if one.suffix in (".safetensors", ".json")}


def _content(path: Path, read: Callable[[Path, int, int], Any]) -> Any:
    try:
        path = path.expanduser()
        facts = path.stat()
        return read(path, facts.st_size, facts.st_mtime_ns) if stat.S_ISREG(facts.st_mode) else MISSING
    except (OSError, ValueError, RuntimeError):  # not there, a name that can be none, the home of nobody
        return MISSING


@cache
def _sha_of(path: Path, size: int, changed: int) -> str:
    """Size and time of change (ns) say when a file has to be read again."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@cache
def _outline(path: Path, size: int, changed: int) -> tuple[int, str]:
    if path.suffix == ".json":
        return size, _sha_of(path, size, changed)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return size, hashlib.sha256(file.read(min(length, HEADER))).hexdigest()


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
