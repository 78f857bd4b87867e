"""What keeps the suite's parts apart, read from its source: axes known by their own folders only, torch where it is needed,
collectives in one place, short files, a top level without surprises.
"""
from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from suite.options import AXES
from suite.workload import ROOT

SOURCES = sorted(path for folder in ("suite", "kernels") for path in (ROOT / folder).rglob("*.py"))
SCHEMA = (Path("suite/options.py"), Path("suite/case.py"))  # know every value of every axis
TOP = {"Snakefile", "pyproject.toml", "README.md", "LICENSE", "workloads", "suite", "kernels", "results", "tests"}
MADE = {"*.egg-info", "build", "__pycache__"}  # by installing and running
LINES = 400
FREE_OF_TORCH = ["suite.case", "suite.options", "suite.workload", "suite.record", "suite.machine", "suite.plan", "suite.seams",
                 "suite.digest",
                 "suite.pipeline", "suite.cli", "suite.doctor", "suite.data", "suite.run", "suite.show", "suite.rendezvous"]
SEARCHES = {"startswith", "endswith", "count", "index", "find", "fullmatch", "match"}
COLLECTIVES = {
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_gather_single", "all_reduce",
    "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list",
    "gather", "gather_object", "irecv", "isend", "monitored_barrier", "recv", "recv_object_list", "reduce", "reduce_scatter",
    "reduce_scatter_single", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send", "send_object_list",
}
GROUPS = {"init_process_group", "new_group", "new_subgroups", "destroy_process_group", "init_device_mesh", "split_group"}
MEETING = {  # file -> what it may call of torch.distributed's meetings
    "suite/comm/transport.py": COLLECTIVES,
    "suite/mesh.py": GROUPS,
    "suite/rank.py": {"broadcast_object_list"},  # the list of cases, before any is run
}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for path in SOURCES:
        yield path, ast.parse(path.read_text(encoding="utf-8"), str(path))


def decisions(tree: ast.AST) -> Iterator[ast.AST]:
    """Where code may go one way or another by a text: comparisons, `in`, `match`, searches, a dict that is looked up at once."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare | ast.MatchValue):
            yield node
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in SEARCHES:
                yield from node.args
            if node.func.attr == "get" and isinstance(node.func.value, ast.Dict):
                yield node.func.value
        elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Dict):
            yield node.value


def compared(tree: ast.AST, known: Iterable[str]) -> list[tuple[int, str]]:
    """(line, value) of every decision on one of the values."""
    values = set(known)
    return [(part.lineno, part.value) for node in decisions(tree) for part in ast.walk(node)
            if isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value in values]


def names_of_distributed(tree: ast.AST) -> set[str]:
    """What a file calls of torch.distributed, however it imports it."""
    aliases = {"torch.distributed"}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {a.asname for a in node.names if a.name == "torch.distributed" and a.asname}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            aliases |= {a.asname or a.name for a in node.names if a.name == "distributed"}
    below = tuple(f"{alias}." for alias in aliases)
    return found | {node.attr for node in ast.walk(tree)
                    if isinstance(node, ast.Attribute) and f"{ast.unparse(node.value)}.".startswith(below)}


def test_only_its_own_folder_compares_an_axis_value():
    found = []
    for path, tree in trees():
        here = path.relative_to(ROOT)
        if here in SCHEMA:
            continue
        own = AXES.get(here.parts[1], {}) if len(here.parts) > 2 else {}
        others = {value for values in AXES.values() for value in values} - set(own)
        found += [f"{here}:{line}: {value!r}" for line, value in compared(tree, others)]
    assert not found, "code that decides by a value of an axis: " + ", ".join(found)


@pytest.mark.parametrize("code", [
    "if case.comm.tp.forward.name == 'int8': pass",
    "x = layout in ('megatron-sp', 'other')",
    "match name:\n    case 'fp8': pass",
    "x = name.startswith('megatron')",
    "x = {'bf16': 1}[name]",
    "x = {'bf16': 1}.get(name)",
])
def test_every_way_to_compare_is_seen(code):
    assert compared(ast.parse(code), {value for values in AXES.values() for value in values})


@pytest.mark.parametrize("code", [
    "from torch.distributed import all_reduce",
    "import torch.distributed as dist\ndist.all_reduce(x)",
    "import torch\ntorch.distributed.all_reduce(x)",
    "from torch import distributed as d\nd.all_reduce(x)",
    "import torch.distributed as dist\ndist.nn.functional.all_reduce(x)",
])
def test_every_way_to_a_collective_is_seen(code):
    assert "all_reduce" in names_of_distributed(ast.parse(code))


def test_collectives_are_called_in_their_files_only():
    found = []
    for path, tree in trees():
        extra = (names_of_distributed(tree) & (COLLECTIVES | GROUPS)) - MEETING.get(relative(path), set())
        found += [f"{relative(path)}: {name}" for name in sorted(extra)]
    assert not found, "meetings of ranks that no wire counts: " + ", ".join(found)


def test_every_axis_value_is_one_file():
    for axis, values in AXES.items():
        missing = [value for value in values if not (ROOT / "suite" / axis / f"{value.replace('-', '_')}.py").exists()]
        assert not missing, f"suite/{axis}: no file for {', '.join(missing)}"


def test_kernels_import_nothing_of_the_suite():
    found = []
    for path, tree in trees():
        for node in ast.walk(tree):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else \
                [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            if path.is_relative_to(ROOT / "kernels") and any(name.split(".")[0] == "suite" for name in names):
                found.append(f"{relative(path)}:{node.lineno}")
    assert not found


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_torch_where_it_is_not_needed():
    """Each import is slow in seconds: pipeline, tables and command line must start without it."""
    report = [f"suite.report.{path.stem}" for path in sorted((ROOT / "suite/report").glob("*.py")) if path.stem != "__init__"]
    guilty = python(
        "import importlib, sys\n"
        f"for name in {FREE_OF_TORCH + report!r}:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules: print(name); break\n"
    )
    assert guilty == "", f"imports torch: {guilty}"


def test_parsing_the_pipeline_imports_no_torch():
    """A list of rules needs the whole Snakefile parsed and nothing else."""
    command = [sys.executable, "-X", "importtime", "-m", "snakemake", "--list-rules", "--cores", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "launch" in done.stdout.split(), done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "suite.pipeline" in imported and "torch" not in imported


def test_files_are_short():
    others = [*(ROOT / "tests").glob("*.py"), ROOT / "Snakefile", *(ROOT / "workloads").glob("*.yaml")]
    long = {relative(path): count for path in [*SOURCES, *others]
            if (count := len(path.read_text(encoding="utf-8").splitlines())) > LINES}
    assert not long, f"files of more than {LINES} lines: {long}"


def test_every_module_says_what_it_is():
    missing = [relative(path) for path, tree in trees() if not ast.get_docstring(tree)]
    assert not missing, f"no docstring: {', '.join(missing)}"


def test_every_test_can_fail():
    """It asserts, or expects an error, in its own lines."""
    def asserts(node):
        return isinstance(node, ast.Assert) or (isinstance(node, ast.Attribute) and node.attr in ("raises", "assert_close"))

    silent = [f"{path.name}:{node.lineno} {node.name}" for path in sorted((ROOT / "tests").glob("test_*.py"))
              for node in ast.walk(ast.parse(path.read_text("utf-8")))
              if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and not any(map(asserts, ast.walk(node)))]
    assert not silent, f"no assert: {', '.join(silent)}"


def test_nothing_is_left_for_later():
    words = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    found = [f"{relative(path)}:{number}" for path in SOURCES for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
             if words.search(line)]
    assert not found


def test_the_top_level_holds_the_named_things_only():
    names = {path.name for path in ROOT.iterdir() if not path.name.startswith(".") and not any(path.match(m) for m in MADE)}
    assert names == TOP
