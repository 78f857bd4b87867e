"""The README says what the code and the references say: numbers, commands, names, paths, and the table of machines.

    python tests/test_readme.py      writes the table of machines (the scoreboard: python -m suite.report.reference readme)
"""
from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

import pytest
import torch
import yaml
from typer.main import get_command

from suite import cli, corpora, doctor, plan, record, workload
from suite.data import cache_folder
from suite.machine import Gpu, Machine
from suite.options import AXES
from suite.report import claims, reference, selector
from suite.report.source import NOT_RUN, RUN, Entry
from suite.workload import FOLDER, ROOT, SIZES

README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")
MACHINES, MACHINES_END = "<!-- machines -->", "<!-- /machines -->"
CORES = 2  # of the machine without a GPU; 16 a GPU elsewhere
METHODS = ("taco", "btp", "tetrajet")
MISSING = ()  # what the README says is not there yet


def between(start: str, end: str) -> str:
    return TEXT.partition(start)[2].partition(end)[0]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def prose() -> str:
    """Without code blocks and the two generated blocks."""
    text = re.sub(r"^```.*?^```", "", TEXT, flags=re.MULTILINE | re.DOTALL)
    for start, end in ((MACHINES, MACHINES_END), (reference.START, reference.END)):
        text = text.partition(start)[0] + text.partition(end)[2]
    return text


def planned(gpus: int) -> list[plan.Planned]:
    cards = tuple(Gpu(i, f"GPU-{i}", "NVIDIA H200", "h200", 140.0, False, "Default") for i in range(gpus))
    return plan.plan(workload.load_all(), Machine("any", 16 * gpus or CORES, 100.0, cards))


def answerable(running: Sequence[plan.Planned]) -> list[str]:
    """Ids of the claims whose cases, both sides of a comparison, are among those that run."""
    here = [Entry(RUN, "-", row.id, row.expanded.case.row(), NOT_RUN, "-", row.expanded.workload, row.expanded.size)
            for row in {row.id: row for row in running}.values()]
    found = []
    for claim in claims.read(FOLDER / "claims.csv"):
        top = selector.parse(claim["numerator"])
        cases = [e for e in here if top.matches(e)]
        if claim["denominator"] != "-":
            bottom = selector.parse(claim["denominator"])
            cases = selector.pairs(cases, [e for e in here if bottom.matches(e)], selector.free(top, bottom))
        if cases:
            found.append(claim["id"])
    return found


def megabytes(text: str) -> int:
    """Of the wheels that hold a text, which are fetched where they are missing."""
    wheels = corpora.CORPORA[text][0]
    return round(sum(corpora.fetch(wheel, cache_folder()).stat().st_size for wheel in wheels) / 1e6)


def measured(gpus: int, results: Path = ROOT / "results") -> str:
    """What the cases of the references took on machines with that many GPUs: from start to end, without the start of ranks."""
    texts = []
    for folder in sorted(results.glob("reference/*/runs")):
        records = [one for path in sorted(folder.glob("*.json")) if (one := record.read(path)).status == "ok"]
        count = re.search(r"x(\d+)$", records[0].machine) if records else None
        if records and int(count[1] if count else 0) == gpus:
            spans = [datetime.fromisoformat(one.provenance[key]) for one in records for key in ("started", "ended")]
            seconds = sum((end - start).total_seconds() for start, end in zip(spans[::2], spans[1::2]))
            texts.append(f"; {seconds / 60:.1f} measured for {len(records)} cases of {folder.parent.name}")
    return "".join(texts)


def machines_table() -> str:
    head = ("GPUs", "what runs", "minutes", "free disk", "text to download", "claims with cases")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for gpus in (0, 1, 2, 8):
        rows = planned(gpus)
        running = [row for row in rows if row.runs]
        texts = sorted({row.expanded.case.data.text for row in running} - {"random"})
        counts = ", ".join(f"`{size}` {sum(r.expanded.size == size for r in running)} of {total}" for size in SIZES
                           if (total := sum(r.expanded.size == size for r in rows)))
        minutes = 60 * sum(plan.hours_by_workload(rows).values())
        ids = answerable(running)
        groups = ", ".join(f"{key} ({len(list(group))})" for key, group in itertools.groupby(ids, lambda i: i.partition("-")[0]))
        lines.append(f"| {gpus} | {counts} cases | about {minutes:.0f}{measured(gpus)} | {doctor.DISK >> 30} GiB | "
                     f"{sum(map(megabytes, texts))} MB | {len(ids)}: {groups} |")
    return "\n".join(lines)


def test_table_of_machines():
    assert between(MACHINES, MACHINES_END).strip() == machines_table(), "run: python tests/test_readme.py"


def test_measured_minutes_are_the_records(tmp_path):
    times = {"started": "2026-01-01T10:00:00.000+00:00", "ended": "2026-01-01T10:01:30.000+00:00"}
    for case, status in (("a", "ok"), ("b", "ok"), ("c", "failed")):
        reason, provenance = (None, times) if status == "ok" else ("oom", {})
        one = record.Record(case, {}, status, reason, "k", "h200x2", provenance)
        path = tmp_path / "reference/h200x2/runs" / f"{case}.json"
        record.publish(path, json.dumps(asdict(one)))
    assert measured(2, tmp_path) == "; 3.0 measured for 2 cases of h200x2"
    assert measured(0, tmp_path) == measured(1, tmp_path) == ""


def test_scoreboard_is_what_the_references_give(tmp_path):
    given = ROOT / "results", FOLDER / "claims.csv", workload.load_all()
    reference.check_readme(README, *given)
    head, inside, tail = reference._split(README.read_text(encoding="utf-8"), README.name)
    changed = tmp_path / "README.md"
    changed.write_text(head + reference.START + inside.replace("1.", "2.", 1) + reference.END + tail, encoding="utf-8")
    with pytest.raises(reference.ReportError, match="scoreboard line"):
        reference.check_readme(changed, *given)


def test_numbers_in_the_text():
    """Every number with a unit is one of these, taken from the code."""
    known = {f"{plan.HOURS:g} hours", "12 hours", "2.5 GB"}
    units = r"(?:GB/s|GB|GiB|MB|MiB|KiB|hours?|minutes?|seconds?|ms|s|%|x|tokens/s|TFLOP/s|nat)"
    found = set(re.findall(rf"(?<![\w.])\d[\d.,]*\s?{units}(?![\w/])", prose()))
    assert found <= known, f"numbers that no test knows: {sorted(found - known)}"
    assert f"{plan.HOURS:g} hours" in found


def test_disk_of_the_environment():
    """About right, for the CPU-only torch; that of the CUDA build is said not to be measured."""
    assert "several times that (not measured)" in TEXT
    said = float(re.search(r"about ([\d.]+) GB of disk", TEXT)[1])
    packages = Path(torch.__file__).parent.parent
    size = sum(path.lstat().st_size for path in packages.rglob("*") if path.is_file() and not path.is_symlink()) / 1e9
    assert torch.version.cuda or 0.6 * said < size < 1.6 * said, f"{size:.2f} GB"


def test_axes_table_lists_what_is_built():
    for axis, values in AXES.items():
        if axis == "factor":
            assert f"(`factor`, now {', '.join(f'`{v}`' for v in values)})" in TEXT
            continue
        row = re.search(rf"^\| `{axis}` \|[^|]*\|([^|]*)\|([^|]*)\|$", TEXT, re.MULTILINE)
        assert re.findall(r"`([^`]+)`", row[1]) == list(values)
        [method] = re.findall(r"`([^`]+)`", row[2])
        assert method in METHODS and (", next" in row[2]) == (method in MISSING)
    there = {value for values in AXES.values() for value in values} & set(MISSING)
    assert not there, f"the README says that {there} cannot be chosen"
    assert ("**are not in yet**" in TEXT) == bool(MISSING)


def test_commands_exist():
    known = set(get_command(cli.app).commands)
    spoken = [*blocks("bash"), *re.findall(r"`([^`\n]+)`", prose())]
    words = set(re.findall(r"(?<![\w-])triaxis ([a-z]+)", "\n".join(spoken)))
    assert words <= known and {"doctor", "cases", "show", "run", "retry", "prepare"} <= words
    cases = set(re.findall(r"triaxis (?:run|show) ([a-z]\S+?)[\s`]", TEXT)) - {"CASE"}
    assert cases and all(workload.find(case) for case in cases)
    targets = set(re.findall(r"--cores all(?: --forceall)? ([a-z]+)[\s`]", TEXT)) - {"mine"}
    assert "gate" in targets and targets - {"gate"} <= set(workload.names())


def test_ci_runs_the_readmes_commands():
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    commands = "\n".join(blocks("bash"))
    assert "pip install -e . && snakemake --cores all" in commands and "snakemake --cores all --config size=small" in script
    assert "pip install -e '.[test]' && pytest" in commands
    assert re.search(r"pip install --quiet -e '\.\[test\]' && pytest", script)
    assert (ROOT / ".ci/run").stat().st_mode & 0o111
    [job] = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert job["env"]["PIP_EXTRA_INDEX_URL"] in commands


def test_own_workload_is_one(tmp_path):
    [text] = blocks("yaml")
    (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
    rows = workload.load("mine", tmp_path).rows
    assert len(rows) == 3 + 3 * 3  # TP 1 has nothing to compress
    own = [row.case for row in rows if ":" in row.case.comm.tp.forward.name]
    assert own and all(case.comm.tp.forward.options == {"bits": 4} for case in own)


def test_paths_and_names_exist():
    spoken = re.findall(r"`([^`\n]+)`", prose())
    paths = [word for word in spoken if re.fullmatch(r"(suite|tests|workloads|kernels|\.ci)/[\w./-]*", word)]
    missing = [word for word in paths if word != "workloads/mine.yaml" and not (ROOT / word).exists()]
    assert paths and not missing
    [tree] = blocks("text")
    names = re.findall(r"(?<!\S)[\w.]+(?:/|\.py|\.yaml|\.csv)(?!\S)", tree)
    lost = [name for name in names if not any((ROOT / folder / name).exists() for folder in ("", "suite", "workloads", "results"))]
    assert len(names) > 20 and not lost
    for name in corpora.CORPORA:
        assert f"`{name}`" in TEXT
    container = re.search(r'^container: "(.*)"', (ROOT / "Snakefile").read_text(encoding="utf-8"), re.MULTILINE)[1]
    assert f"`{container}`; it is untested" in TEXT


@pytest.mark.parametrize("path", ["README.md", "results/README.md", ".ci/run", ".github/workflows/ci.yml"])
def test_nothing_of_one_machine(path):
    text = (ROOT / path).read_text(encoding="utf-8")
    assert not re.search(r"/(work|home|root|tmp)/", text)
    assert text.endswith("\n") and not re.search(r"[ \t]+$", text, re.MULTILINE)


def test_license_is_whole():
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    for part in ("Version 2.0, January 2004", "1. Definitions.", "3. Grant of Patent License.", "9. Accepting Warranty",
                 "END OF TERMS AND CONDITIONS", "limitations under the License."):
        assert part in text


def test_three_papers_are_cited():
    [text] = blocks("bibtex")
    assert text.count("@inproceedings{") == text.count("author") == 3
    for number in ("2604.24088", "2512.12131", "2510.27527"):
        assert f"arXiv:{number}" in text
    assert text.count("{") == text.count("}")


if __name__ == "__main__":
    head, tail = TEXT.partition(MACHINES)[0], TEXT.partition(MACHINES_END)[2]
    README.write_text(f"{head}{MACHINES}\n{machines_table()}\n{MACHINES_END}{tail}", encoding="utf-8")
