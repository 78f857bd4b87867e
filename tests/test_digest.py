"""Digests change with what a run depends on, and with nothing else."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import project
import pytest

from suite import digest as digests
from suite import workload
from suite.case import Case
from suite.digest import DigestError, Tree, digest, written

BF16 = Case(model="gpt-tiny", mesh={"tp": 2})
INT8 = Case(model="gpt-tiny", mesh={"tp": 2}, comm="int8")


# One of everything in which syntax trees of Python 3.11, 3.12 and 3.13 differ, or might.
SNIPPET = r'''
from __future__ import annotations

import os as system
from typing import Generic, TypeVar

T = TypeVar("T", bound="A | None")
TEXT = f"a{1!r:>{2}}{'b'}" f"{{c}}{T=}{3:}" "d" u"é\U0001F600" rf"\d{4:.{5}f}x"
NUMBERS = (1, 1.0, True, None, ..., 1e-3, 0x10, 2j, b"\xff", -1, {**{}, "k": [*()]})


@property
@system.cache(maxsize=None)
class A(Generic[T], metaclass=type):
    """A docstring."""

    x: int = 3
    y: list[T | None]

    @staticmethod
    async def f(a: int, /, b: str = "", *args: int, c: bool = None, d, **more: T) -> dict[str, T]:
        async with a as b, b:
            return [await i async for i in c if i]
        lambda *, k=1: (yield)


def g(x):
    global T
    match x:
        case {"a": 1, **rest} if rest:
            pass
        case [1, -2, *others] | (A(x=3) as others):
            del x[1:2, ::3]
        case None | True | "s":
            raise ValueError(f"{x:%Y-%m-%d}\n{x!s}") from None
        case _:
            x @= (y := 2)
    try:
        assert 0 < x <= 3, "why"
    except* (OSError, ValueError) as error:
        nonlocal_ = error if x else not x
    finally:
        while x: break
        else: x = (yield from x)
'''


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return project.build(tmp_path, {})


def both(copy: Path) -> tuple[str, str]:
    tree = Tree(copy, [])
    return digest(BF16, tree), digest(INT8, tree)


def edit(copy: Path, module: str, text: str) -> None:
    path = copy / "suite" / f"{module}.py"
    path.write_text(path.read_text() + text)


def test_comments_docstrings_and_blank_lines_change_nothing(copy):
    before = both(copy)
    path = copy / "suite" / "train.py"
    path.write_text(
        '"""A docstring."""\n\n# a comment\n'
        + path.read_text().replace("    victim = ", '    """What it does."""\n    # why\n\n    victim = ')
    )
    assert both(copy) == before


def test_code_changes_every_case_and_a_codec_only_its_own(copy):
    bf16, int8 = both(copy)
    edit(copy, "comm/int8", "\nSCALE = 126\n")
    assert both(copy)[0] == bf16
    assert both(copy)[1] != int8
    edit(copy, "train", "\nx = 1\n")
    assert both(copy)[0] != bf16


@pytest.mark.parametrize(
    "module", ["report/figures", "cli", "plan", "pipeline", "doctor", "run", "attempt", "show", "case", "record"]
)
def test_what_moves_no_number_changes_nothing(copy, module):
    before = both(copy)
    edit(copy, module, "\nx = 1\n")
    assert both(copy) == before


@pytest.mark.parametrize(
    "row", [{"steps": 51}, {"seed": 1}, {"model": "qwen-tiny"}, {"comm": {"name": "int8", "group": 64}}, {"optim": {"lr": 1e-3}}]
)
def test_any_field_of_the_row_changes_the_digest(copy, row):
    tree = Tree(copy, [])
    assert digest(Case.model_validate({**INT8.row(), **row}), tree) != digest(INT8, tree)


def test_imports_for_type_checkers_and_attributes_are_no_dependencies(copy):
    (copy / "suite" / "comm" / "bf16.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from suite.comm import int8\n"
        "else:\n    from ..measure import clock\n"
        "def build():\n    from . import shared\n"
    )
    (copy / "suite" / "comm" / "shared.py").write_text("x = 1\n")
    (copy / "suite" / "measure" / "clock.py").write_text("x = 1\n")
    found = set(Tree(copy, []).closure(["suite.comm.bf16"]))
    assert {"suite.comm.shared", "suite.measure.clock"} <= found
    assert "suite.comm.int8" not in found


def test_an_executor_and_a_value_from_outside_are_followed(copy, monkeypatch):
    (copy / "mine").mkdir()
    (copy / "mine" / "codec.py").write_text("from mine.table import T\n")
    (copy / "mine" / "table.py").write_text("T = 1\n")
    case = Case(model="gpt-tiny", mesh={"tp": 2}, comm="mine.codec:Codec")
    before = digest(case, Tree(copy, []))
    (copy / "mine" / "table.py").write_text("T = 2\n")
    assert digest(case, Tree(copy, [])) != before
    default = digest(BF16, Tree(copy, []))
    monkeypatch.setenv("TRIAXIS_EXECUTOR", "mine.table:run")
    assert digest(BF16, Tree(copy, [])) != default


def test_missing_and_broken_modules_are_named(copy):
    with pytest.raises(DigestError, match=r"no module 'nowhere\.codec'"):
        digest(Case(model="gpt-tiny", mesh={"tp": 2}, comm="nowhere.codec:C"), Tree(copy, []))
    (copy / "suite" / "comm" / "int8.py").write_text("a = 1\nb = (\n")
    with pytest.raises(DigestError, match=r"int8\.py: line 2"):
        digest(INT8, Tree(copy, []))


def test_order_of_yaml_keys_changes_nothing(tmp_path):
    rows = [{"model": "gpt-tiny", "mesh": {"tp": 2}, "steps": 3}, {"steps": 3, "mesh": {"tp": 2}, "model": "gpt-tiny"}]
    found = set()
    for number, row in enumerate(rows):
        (tmp_path / f"w{number}.yaml").write_text("# a comment\n" + json.dumps({"sizes": {"small": [row]}}))
        found |= {digest(one.case) for one in workload.load(f"w{number}", tmp_path).rows}
    assert len(found) == 1


def test_hash_seed_changes_nothing():
    program = (
        "from suite import workload; from suite.digest import digest\n"
        "print([digest(row.case) for one in workload.load_all().values() for row in one.rows[:8]])"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=project.ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1 and len(said.pop()) > 64


def test_the_real_tree_follows_the_trainer_and_no_report():
    found = set(Tree(project.ROOT, []).closure(["suite.rank", "suite.train"]))
    assert {"suite.rank", "suite.train", "suite.mesh", "suite.link"} <= found
    for apart in ("suite.report", "suite.cli", "suite.plan", "suite.gate", "suite.run", "suite.pipeline"):
        assert not [name for name in found if name == apart or name.startswith(f"{apart}.")]


def test_a_syntax_tree_is_written_alike_by_every_python():
    """The stored digest was made by 3.11, 3.12 and 3.13."""
    text = written(ast.parse(SNIPPET))
    found = hashlib.sha256(text.encode()).hexdigest()
    assert text.isascii() and found == "ce77be58233d1eb8e133ee3f5fdb9dcc12b42f3a572464337b332a3fa46f71cf"
    assert written(ast.parse("f'{a}' f'b' 'c'")) == written(ast.parse("f'{a}bc'"))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("x = 1", "x = True"),
        ("x = 1", "x = 1.0"),
        ("x = 'a'", "x = b'a'"),
        ("x = None", "x = ..."),
        ("f(a, *b)", "f(a, b)"),
        ("{**a, b: c}", "{a: b, **c}"),
        ("f'{a}b'", "f'{a!r}b'"),
        ("f'{a:b}'", "f'{a}b'"),
        ("def f(a, b=1): return", "def f(a=1, b=1): return"),
        ("def f(*, a, b=1): return", "def f(*, a=1, b): return"),
        ("match a:\n case None: b", "match a:\n case True: b"),
        ("from . import a", "from .. import a"),
        ("@a\ndef f(): b", "def f():\n b"),
        ("x: int", "x: str"),
        ("[a, b]", "(a, b)"),
    ],
)
def test_what_differs_is_written_differently(one, other):
    assert written(ast.parse(one)) != written(ast.parse(other))


def test_another_torch_or_triton_changes_every_case_and_another_transformers_its_own(copy, monkeypatch):
    theirs = BF16.model_copy(update={"implementation": "transformers"})
    tree = Tree(copy, [])
    versions = {"torch": "2.13.0", "triton": "3.7.1", "transformers": "5.24.0"}
    monkeypatch.setattr(digests, "_version", versions.get)
    now = [digest(case, tree) for case in (BF16, theirs)]
    for name, changed in (("torch", [True, True]), ("triton", [True, True]), ("transformers", [False, True])):
        monkeypatch.setattr(digests, "_version", {**versions, name: "0"}.get)
        assert [digest(case, tree) != known for case, known in zip((BF16, theirs), now)] == changed


def test_versions_come_from_the_installed_distribution():
    assert digests._version("torch") == importlib.metadata.version("torch") and digests._version("no-such-thing") is None


def changes(case: Case, edits: list) -> list[bool]:
    """Whether the digest changed with each edit."""
    tree = Tree(project.ROOT, [])
    found = [digest(case, tree)]
    for edit in edits:
        edit()
        found.append(digest(case, tree))
    return [one != other for one, other in itertools.pairwise(found)]


@pytest.mark.parametrize("field", ["text", "tokenizer", "hf"])
def test_an_edited_text_or_tokenizer_changes_its_cases(tmp_path, field):
    path = tmp_path / "mine.json"
    row = {"tokenizer": str(path)} if field == "tokenizer" else {"text": f"hf:json:{path}@train#9" if field == "hf" else str(path)}

    def same_content_later() -> None:
        path.write_text("two")
        os.utime(path, (1, 1))

    edits = [lambda: path.write_text("one"), lambda: path.write_text("two"), same_content_later, path.unlink]
    assert changes(Case(model="gpt-tiny", mesh={"tp": 2}, data=row), edits) == [True, True, False, True]


def test_an_edited_checkpoint_changes_the_cases_that_start_from_it(tmp_path):
    folder = tmp_path / "start"
    weights = folder / "model.safetensors"

    def header(text: bytes, size: int = 64) -> None:
        folder.mkdir(exist_ok=True)
        weights.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))

    edits = [
        lambda: header(b'{"a": 1}'),
        lambda: header(b'{"b": 1}'),
        lambda: header(b'{"b": 1}', 65),
        lambda: (folder / "config.json").write_text("1"),
        lambda: (folder / "config.json").write_text("2"),
        lambda: (folder / "notes.txt").write_text("a note"),
        lambda: weights.write_bytes(b"cut"),
    ]
    expected = [True, True, True, True, True, False, True]
    assert changes(BF16.model_copy(update={"init": str(folder)}), edits) == expected
    assert changes(BF16.model_copy(update={"init": str(weights)}), [lambda: header(b"{}"), weights.unlink]) == [True, True]


def test_1500_digests_read_a_file_once(tmp_path, monkeypatch):
    path = tmp_path / "long.txt"
    path.write_bytes(b"x" * 30_000_000)
    cases = [Case(model="gpt-tiny", data={"text": str(path)}, seed=seed) for seed in range(1500)]
    tree = Tree(project.ROOT, [])
    digest(cases[0], tree)
    monkeypatch.setattr(hashlib, "file_digest", lambda *_: pytest.fail("read again"))
    began = time.process_time()
    assert len({digest(case, tree) for case in cases}) == 1500
    assert time.process_time() - began < 3.0
