"""Digests change with what a run depends on, and with nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import project
import pytest

from suite import workload
from suite.case import Case
from suite.digest import DigestError, Tree, digest

BF16 = Case(model="gpt-tiny", mesh={"tp": 2})
INT8 = Case(model="gpt-tiny", mesh={"tp": 2}, comm="int8")


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
