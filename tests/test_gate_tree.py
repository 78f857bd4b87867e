"""What the pipeline's target `gate` is made of: findings of the working tree, their table, and the history of the budget in git."""
from __future__ import annotations

import csv
import json
import re
import subprocess

import pytest
from test_gate_ab import git
from typer.testing import CliRunner

from suite import cli
from suite.gate import ab, budget, losses, tree, trial
from suite.gate.finding import FAULT, FINE, NEW, WORSE, Finding
from suite.report import gate as report
from suite.report.source import ReportError
from suite.workload import ROOT

ROW = {"registers": 32, "spills": 0, "instructions": 100, "traffic": 2.0}


def commit(folder, *rows, words=()):
    made = {f"k.run/{n}": ROW | row for n, row in enumerate(rows)} | {"k.run/x": {"refused": "no"}}
    body = {"triton": "1", "calls": {}, "sm_90": made}
    (folder / "kernels").mkdir(exist_ok=True)
    (folder / "kernels/budget.json").write_text(json.dumps(body))
    if words:
        git(folder, "add", "-A")
        git(folder, "commit", "-qm", *words)


@pytest.fixture
def said(monkeypatch):
    """Gates that answer at once."""
    monkeypatch.setattr(budget, "gate", lambda: [Finding("a", FINE), Finding("b", FINE)])
    monkeypatch.setattr(losses, "gate", lambda runs: [Finding("case", FINE), Finding("other", NEW, "kept")])
    monkeypatch.setattr(ab, "gate", lambda root, base, head, device: [
        Finding("c", WORSE, "1.150 times the base's 3.0 us [1.1, 1.2], n=15"), Finding("d", FINE, "0.990 times the base's 1 us")])
    return None


def test_findings_are_kept_whatever_they_say_and_checked_afterwards(tmp_path, said, monkeypatch):
    def run(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(cli.app, ["gate", *words])
        return done.exit_code, done.output

    path = str(tmp_path / "found.json")
    assert run("tree", path)[0] == 0 and run("check", path) == (0, "new: losses other: kept\nWorking tree: 3 ok, 1 new\n")
    assert run("tree", path, "--base", "HEAD")[0] == 0
    code, text = run("check", path)
    assert code == 1 and "worse: ab c: 1.150 times" in text and "d" not in text.splitlines()[1]

    def broken(runs):
        raise ValueError("counts.json: broken")

    monkeypatch.setattr(losses, "gate", broken)
    assert run("tree", path)[0] == 0 and run("check", path)[0] == 1
    assert [row["verdict"] for row in tree.read(tmp_path / "found.json")] == [FINE, FINE, FAULT]
    for text in ("", "[]", "{}", '[{"gate": "budget"}]'):
        (tmp_path / "found.json").write_text(text)
        assert run("check", path)[0] == 2


def test_table_and_figure_over_revisions(tmp_path, said):
    git(tmp_path, "init", "-q")
    commit(tmp_path, {}, words=["one"])
    (tmp_path / "kernels/budget.json").write_text("{")
    git(tmp_path, "commit", "-qam", "broken")
    commit(tmp_path, {}, {"registers": 40, "spills": 8, "instructions": 300}, words=["two"])
    commit(tmp_path, {"instructions": 90})
    tree.write(tmp_path / "found.json", tree.findings(tmp_path, "HEAD", "cpu"))
    paths = report.write(tmp_path / "results", tmp_path / "found.json", tmp_path)
    first = [path.read_bytes() for path in paths]
    rows = list(csv.DictReader(paths[0].open(encoding="utf-8")))
    commits = git(tmp_path, "log", "--reverse", "--abbrev=10", "--format=%h").split()
    values = {(row["revision"], row["quantity"]): float(row["value"]) for row in rows if row["kernel"] == "k.run sm_90"}
    assert [values[name, "instructions"] for name in (commits[0], commits[2], report.HERE)] == [100, 200, 90]
    assert (values[commits[2], "registers"], values[commits[2], "spills"], values[commits[2], "traffic"]) == (40, 8, 2)
    assert commits[1] not in {row["revision"] for row in rows}
    assert {(row["gate"], row["kernel"], row["value"], row["verdict"]) for row in rows if row["quantity"].startswith("time")} == {
        ("ab", "c", "1.15", WORSE), ("ab", "d", "0.99", FINE)}
    assert {(row["gate"], row["verdict"]): row["value"] for row in rows if row["quantity"] == "findings"} == {
        ("budget", FINE): "2.0", ("losses", FINE): "1.0", ("losses", NEW): "1.0", ("ab", WORSE): "1.0", ("ab", FINE): "1.0"}
    assert [path.read_bytes() for path in report.write(tmp_path / "results", tmp_path / "found.json", tmp_path)] == first
    subprocess.run(["rm", "-rf", str(tmp_path / ".git")], check=True)
    assert {name for name, *_ in report.revisions(tmp_path)} == {report.HERE}, "no git, no history"
    (tmp_path / "found.json").write_text("[]")
    with pytest.raises(ReportError, match="not findings"):
        report.write(tmp_path / "results", tmp_path / "found.json", tmp_path)


def test_every_fault_of_the_readme_has_its_test():
    table = (ROOT / "README.md").read_text(encoding="utf-8").partition("| fault | caught by | test |\n")[2].partition("\n\n")[0]
    rows = [line.split(" | ") for line in table.splitlines()[1:]]
    sources = "\n".join(path.read_text("utf-8") for path in (ROOT / "tests").glob("test_gate*.py"))
    defined = set(re.findall(r"^def (test_\w+)", sources, re.MULTILINE))
    named = [re.findall(r"`(test_\w+)`", row[2]) for row in rows]
    assert len(rows) >= 15 and all(named) and {name for names in named for name in names} <= defined


def test_the_readme_says_what_the_committed_trials_found():
    """No alarm without a change, an alarm in each run at 15 %, by this README's own commands."""
    for path in (ROOT / "results/reference").glob("*/gate_trial.csv"):
        rows = trial.load(path)
        text = (ROOT / "README.md").read_text(encoding="utf-8")
        for line, _ in trial.summary(rows):
            assert line in text, line
        for share in (0.0, 0.15) if rows[0]["device"] == "cpu" else (0.0, 0.05):
            assert sum(row["share"] == share for row in rows) >= 20
            assert all(good for _, good in trial.summary([row for row in rows if row["share"] == share]))
        assert (path.parent / "environment.txt").exists()
    with pytest.raises(ValueError, match="not a table of a trial"):
        trial.load(ROOT / "workloads/claims.csv")
