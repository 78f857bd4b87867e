"""Tables, losses, coverage, figures, verdict and references, from synthetic records."""
import csv
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from statistics import fmean, stdev

import pytest

from suite.case import Case
from suite.record import Metric, Record, RecordError, Traffic, path_of, publish, write
from suite.report import coverage, figures, losses, reference, source, tables, verdict
from suite.report.source import ReportError, entries
from suite.report.write import number, write_csv
from suite.workload import FOLDER, ROOT, load_all

LOSSES = {"bf16": (4.0, 4.1, 4.2), "int8": (4.004, 4.1041, 4.2126), "fp8": (3.5, 3.6, 3.7)}
WORKLOAD = """title: Codecs
question: What do they save?
sizes:
  small:
    - {model: gpt-tiny, mesh: {tp: 2}, comm: [bf16, int8, fp8], seed: [0, 1, 2], steps: 20}
    - {model: gpt-tiny, mesh: {tp: 2}, comm: [bf16, int8], measure: speed, steps: 20}
  short:
    - {model: gpt-tiny, mesh: {tp: 4}, device: cuda, measure: speed}
"""


def traffic(codec: str, wire: float, purpose: str = "activations") -> Traffic:
    kind = "modelled" if codec in ("bf16", "fp32") else "counted"
    return Traffic("tp", "forward", "all_reduce", codec, "uint8", purpose, 9, 1000, 2000, wire, kind)


def put(results: Path, case: Case, *metrics: Metric, machine: str = "cpu2", reason: str | None = None, rows=(),
        started: str = "2026-01-01T00:00:00+00:00", torch: str = "2.13.0") -> Path:
    known = {"started": started, "ended": started, "launch": "x", "cpu": "A CPU", "versions": {"torch": torch}, "git": None}
    return write(Record(case.id, case.row(), "failed" if reason else "ok", reason, "key", machine, known, {"timed": 1.0},
                        list(metrics), list(rows)), results)


def case(codec: str = "bf16", seed: int = 0, **more) -> Case:
    return Case(**{"model": "gpt-tiny", "mesh": {"tp": 2}, "comm": codec, "seed": seed, "steps": 20, **more})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A workload folder with one workload, `taco`."""
    place = tmp_path / "workloads"
    place.mkdir()
    for name in ("models.yaml", "claims.csv"):
        (place / name).write_bytes((FOLDER / name).read_bytes())
    (place / "taco.yaml").write_text(WORKLOAD, encoding="utf-8")
    return place


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Every case of `folder` on cpu2, one seed failed, one timed case not run."""
    root = tmp_path / "results"
    fill(root)
    return root


def fill(root: Path, order: int = 1) -> None:
    jobs = [(codec, seed) for codec in LOSSES for seed in range(3)][::order]
    for codec, seed in jobs:
        this, loss = case(codec, seed), LOSSES[codec][seed]
        if (codec, seed) == ("fp8", 1):
            put(root, this, reason="nan at step 17")
            continue
        put(root, this, Metric("validation_loss", loss, "nats/token", n=4), Metric("train_loss", loss + 0.1, "nats/token", n=2),
            rows=[traffic(codec, 4000.0 if codec == "bf16" else 2000.0), traffic("fp32", 48.0, "loss")][::order])
        lines = "".join(f"{step},{loss + 3 / (step + 1)!r},0.001,1.0,1024\n" for step in range(20))
        publish(path_of("cpu2", this.id, root).with_suffix(".loss.csv"), "step,loss,lr,grad_norm,tokens\n" + lines)
    put(root, case(measure="speed"), Metric("tokens_per_second", 1 / 3, "tokens/s", n=20, q20=0.3, q80=0.4))
    rows = [{"id": this.id, "workload": "taco", "size": "small", "runs": False, "reason": reason, "seconds": 1.0}
            for this, reason in ((case("int8", measure="speed"), "budget"), (cuda(), "needs 4 GPUs"))]
    publish(root / "plan" / "cpu2.json", json.dumps(rows))


def cuda() -> Case:
    return Case(model="gpt-tiny", mesh={"tp": 4}, device="cuda", measure="speed")


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_no_report_module_imports_torch():
    names = ", ".join(f"suite.report.{p.stem}" for p in sorted((ROOT / "suite" / "report").glob("*.py")) if p.stem != "__init__")
    code = f"import sys, {names}; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_measurements_hold_every_case_once_a_metric(results, folder):
    tables.write(results, entries(results, load_all(folder)))
    rows = read(results / "tables" / "measurements.csv")
    assert tuple(rows[0]) == tables.MEASUREMENTS
    speed = [r for r in rows if r["measure"] == "speed" and r["status"] == "ok"]
    assert [(r["metric"], r["value"], r["q20"], r["q80"], r["n"], r["kind"]) for r in speed] == [
        ("tokens_per_second", repr(1 / 3), "0.3", "0.4", "20", "measured")]
    failed = [r for r in rows if r["status"] == "failed"]
    assert [(r["case"], r["reason"], r["value"], r["metric"]) for r in failed] == [(case("fp8", 1).id, "nan at step 17", "", "")]
    assert {(r["case"], r["reason"]) for r in rows if r["status"] == "not run"} == {
        (case("int8", measure="speed").id, "budget"), (cuda().id, "needs 4 GPUs")}
    assert all((r["value"] == "") == (r["status"] != "ok" or r["metric_reason"] != "") for r in rows)
    assert {r["workload"] for r in rows} == {"taco"}


def test_a_kind_has_its_own_column(results, folder):
    tables.write(results, entries(results, load_all(folder)))
    rows = read(results / "tables" / "communication.csv")
    assert {(r["codec"], r["kind"], r["wire_bytes_counted"], r["wire_bytes_modelled"]) for r in rows} == {
        ("bf16", "modelled", "", "4000.0"), ("fp32", "modelled", "", "48.0"),
        ("int8", "counted", "2000.0", ""), ("fp8", "counted", "2000.0", "")}
    one = next(e for e in entries(results, load_all(folder)) if e.id == case("int8").id)
    assert (one.metric("wire_bytes").value, one.metric("wire_bytes").kind) == (2048.0, "modelled")
    assert (one.metric("wire_bytes_counted").value, one.metric("wire_bytes_modelled").value) == (2000.0, 48.0)


def test_losses_are_paired_by_seed_and_a_failed_seed_is_counted(results, folder):
    compared = losses.compare(entries(results, load_all(folder)))
    rows = {r["comm_forward"]: r for r in losses.summary_rows(compared) if r["metric"] == "validation_loss"}
    assert (rows["int8"]["n"], rows["int8"]["of"], rows["int8"]["missing"]) == (3, 3, None)
    assert (rows["fp8"]["n"], rows["fp8"]["of"], rows["fp8"]["missing"]) == (2, 3, "seed 1: failed: nan at step 17")
    differences = [0.1, 0.1, 0.3]
    half = 4.302652729911275 * stdev(differences) / 3**0.5  # t(0.975, 2), from a printed table
    assert rows["int8"]["difference_percent"] == pytest.approx(fmean(differences))
    assert rows["int8"]["difference_low"] == pytest.approx(fmean(differences) - half)
    assert rows["int8"]["difference_high"] == pytest.approx(fmean(differences) + half)
    assert rows["int8"]["band_low"] == pytest.approx(-100 * 0.1 / 4.1)
    assert (rows["bf16"]["difference_percent"], rows["int8"]["place"], rows["fp8"]["place"]) == (0, "inside", "below")
    pair = next(r for r in losses.case_rows(compared) if r["case"] == case("int8", 2).id and r["metric"] == "validation_loss")
    assert (pair["baseline"], pair["baseline_value"]) == (case("bf16", 2).id, 4.2)


def test_losses_of_two_versions_give_no_difference(results, folder):
    put(results, case("int8", 1), Metric("validation_loss", 4.1041, "nats/token", n=4), torch="2.11.0")
    (row,) = [r for r in losses.summary_rows(losses.compare(entries(results, load_all(folder))))
              if r["metric"] == "validation_loss" and r["comm_forward"] == "int8"]
    why = f"{case('int8', 1).id} ran with torch 2.11.0, {case('bf16', 1).id} with 2.13.0"
    assert (row["n"], row["difference_n"], row["missing"]) == (3, 2, why)


def test_the_baseline_of_a_case(tmp_path):
    def key(**more):
        return losses.family(source.Entry("run", "m", "x", case(**more).row(), "ok", None, "", ""))

    assert losses.baseline(key(codec="int8", layout="megatron-sp")) == key(layout="megatron-sp")
    assert losses.baseline(key(layout="megatron-sp")) == key()
    assert losses.baseline(key(codec="int8", precision="float32")) == key()
    kept = {"name": "bf16", "params": "bfloat16"}
    assert losses.baseline(key(codec="fp8", precision=kept)) == key(precision=kept)
    assert losses.family(source.Entry("run", "m", "x", case(seed=3, name="y").row(), "ok", None, "", "")) == key()


def test_methods_are_named_by_what_is_off_the_baseline():
    assert source.method(case().row()) == "baseline"
    assert source.method(case(precision={"name": "bf16", "params": "bfloat16"}).row()) == "baseline"
    assert source.method(case("int8", layout="megatron-sp").row()) == "comm=int8 layout=megatron-sp"
    assert source.method(case(comm={"forward": "int8", "backward": "bf16"}).row()) == "comm=int8+bf16"


@pytest.mark.parametrize(("change", "message"), [
    (lambda r: r["metrics"][0].update(value=float("nan")), "nan"),
    (lambda r: r["metrics"][0].update(value=None), "a value or a reason"),
    (lambda r: r["metrics"][0].update(q20=float("inf")), "q20: inf is no number"),
    (lambda r: r["metrics"][0].pop("unit"), "unit"),
    (lambda r: r["metrics"][0].update(value="7"), "not a record"),
    (lambda r: r["metrics"][0].update(n=True), "n: True is no number"),
    (lambda r: r["traffic"][0].update(wire_bytes=float("nan")), "traffic all_reduce: wire_bytes: nan is no number"),
    (lambda r: r["traffic"][0].update(calls=None), "traffic all_reduce: calls: None is no number"),
    (lambda r: r["traffic"][0].update(kind="measured"), "expected counted or modelled"),
    (lambda r: r["case"].pop("mesh"), "missing or malformed column 'mesh'"),
    (lambda r: r["metrics"].append({**r["metrics"][0]}), "there twice"),
    (lambda r: r["metrics"].append({"name": "mfu", "value": 104.0, "unit": "%"}), "mfu 104.0 % is over 100 %"),
    (lambda r: r["metrics"].append({"name": "hfu", "value": 1.04, "unit": "1"}), "hfu 1.04 1 is over 100 %"),
    (lambda r: r.update(id="another"), "holds the record of another case"),
])
def test_a_row_with_a_hole_is_refused_with_one_line(results, folder, change, message):
    path = path_of("cpu2", case("int8").id, results)
    data = json.loads(path.read_text(encoding="utf-8"))
    change(data)
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises((ReportError, RecordError)) as error:
        tables.write(results, entries(results, load_all(folder)))
    assert message in str(error.value) and "\n" not in str(error.value) and case("int8").id in str(error.value)


@pytest.mark.parametrize(("text", "message"), [
    ("step,lr\n0,1\n", "column loss is missing"), ("step,loss\n0,nan\n", "line 2"), ("step,loss\n0,4.0\n1,\n", "line 3"),
    ("step,loss\n", "holds no row"),
])
def test_a_loss_file_with_a_hole_is_refused(tmp_path, text, message):
    path = tmp_path / "x.loss.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ReportError, match=message):
        losses.read_curve(path)


def test_a_table_takes_no_hole(tmp_path):
    with pytest.raises(ReportError, match=r"row 2 .*column b is missing"):
        write_csv(tmp_path / "t.csv", ("a", "b"), [{"a": 1, "b": 2}, {"a": 1}])
    with pytest.raises(ReportError, match="nan is no number"):
        write_csv(tmp_path / "t.csv", ("a",), [{"a": float("nan")}])
    assert not (tmp_path / "t.csv").exists()
    assert [number(v) for v in (0.0, 1234567.0, 0.25, 1.87, 2e-5)] == ["0", "1,234,567", "0.2500", "1.870", "2e-05"]


def test_a_faulty_plan_names_file_and_row(results, folder):
    publish(results / "plan" / "cpu2.json", '[{"id": "x", "runs": true, "reason": null}, {"id": "y"}]')
    with pytest.raises(ReportError, match=r"plan cpu2.json: row 2"):
        entries(results, load_all(folder))


ALL = """
import sys
from pathlib import Path
from suite.report import claims, coverage, figures, tables, verdict
from suite.report.source import entries
from suite.workload import load_all
results, folder = map(Path, sys.argv[1:])
workloads = load_all(folder)
found = entries(results, workloads)
tables.write(results, found)
claims.write(results, folder / "claims.csv", found, workloads)
coverage.write(results, found, workloads)
figures.write(results, found, workloads)
verdict.write(results, folder, folder / "claims.csv")
"""


def test_the_same_records_give_the_same_bytes(tmp_path, folder):
    """Other order of writing, another hash seed, and no usable display: the same files."""
    made = []
    for seed, order, extra in (("1", 1, {"MPLBACKEND": "TkAgg", "DISPLAY": ":99"}), ("2", -1, {})):
        root = tmp_path / f"results{seed}"
        fill(root, order)
        environment = {k: v for k, v in os.environ.items() if k not in ("MPLBACKEND", "DISPLAY")}
        environment |= {"PYTHONHASHSEED": seed, **extra}
        subprocess.run([sys.executable, "-c", ALL, root, folder], cwd=ROOT, check=True, env=environment)
        paths = [p for name in ("tables", "figures") for p in (root / name).iterdir()]
        made.append({p.relative_to(root).as_posix(): p.read_bytes() for p in paths})
    named = "claims.csv claims.md communication.csv coverage.md layouts.csv loss_gaps.csv loss_summary.csv losses.csv"
    names = [*named.split(), "measurements.csv", "verdict.md"]
    assert sorted(made[0]) == ["figures/taco.png", *(f"tables/{name}" for name in names)]
    assert made[0] == made[1]
    assert made[0]["figures/taco.png"].startswith(b"\x89PNG") and b"matplotlib" not in made[0]["figures/taco.png"].lower()


def test_coverage_has_no_empty_cell(results, folder):
    workloads = load_all(folder)
    rows = coverage.rows(entries(results, workloads), workloads)
    coverage.filled(rows)
    cells = {row[:3]: dict(zip(coverage.HEADER, row)) for row in rows}
    int8 = cells["comm=int8", "gpt-tiny", "2"]
    assert int8["tokens/s (measured)"] == "not run: budget"
    assert int8["validation loss, nat (measured)"] == "4.107 (cpu2 gloo, n=3)"
    assert int8["bytes sent a step and rank (counted)"] == "2,000 (cpu2 gloo, n=3)"
    assert int8["bytes sent a step and rank (modelled)"] == "48.00 (cpu2 gloo, n=3)"
    assert "n=2 of 3" in cells["comm=fp8", "gpt-tiny", "2"]["validation loss, nat (measured)"]
    assert cells["baseline", "gpt-tiny", "2"]["tokens/s (measured)"] == "0.3333 (cpu2 gloo, n=1)"
    assert cells["baseline", "gpt-tiny", "4"]["tokens/s (measured)"] == "not run: needs 4 GPUs"
    assert cells["comm=taco", "gpt-tiny", "2"]["tokens/s (measured)"] == "not run: no case defined yet"
    assert {r[0] for r in rows} == {
        "baseline", "comm=int8", "comm=fp8", "comm=taco", "factor=cola layout=btp", "precision=tetrajet"}
    assert {r[2] for r in rows} == {"1", "2", "4", "8"}


def test_coverage_without_any_record_is_full_too(tmp_path, folder):
    workloads = load_all(folder)
    assert coverage.filled(coverage.rows(entries(tmp_path / "none", workloads), workloads)) is None


@pytest.mark.parametrize("hole", ["", "  ", "-"])
def test_an_empty_coverage_cell_is_refused(hole):
    row = ["baseline", "gpt-tiny", "1", "7", "8", "9", hole, "no traffic", "no traffic"]
    with pytest.raises(ReportError, match=r"baseline, gpt-tiny, TP 1: GPU utilization"):
        coverage.filled([row])


def test_a_workload_without_records_gives_a_figure_that_says_so(tmp_path, folder):
    workloads = load_all(folder)
    made = figures.write(tmp_path, entries(tmp_path, workloads), workloads, "taco")
    assert made[0].read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ReportError, match="no workload 'other'; known: taco"):
        figures.write(tmp_path, [], workloads, "other")


def test_figures_count_seeds_that_failed(results, folder):
    figure_class, seaborn = figures._library()
    workloads = load_all(folder)
    mine = figures.chosen(entries(results, workloads), "taco")
    look = figures.style(mine, seaborn)
    (group,) = figures.panels.rows_of(mine).values()
    texts = {}
    for name, panel in figures.COLUMNS.items():
        ax = figure_class().add_subplot()
        if panel(ax, group, look):
            texts[name] = " ".join([ax.get_title(), ax.get_ylabel(), *(t.get_text() for t in ax.texts)])
    assert set(texts) == {"curves", "difference", "wire", "tokens_per_second"}
    assert "n=2 of 3, 3 of 3" in texts["curves"] and "n=2 of 3, 3 of 3" in texts["difference"]
    assert "counted" in texts["wire"] and "kB" in texts["wire"]
    assert "Throughput (CPU)" in texts["tokens_per_second"] and "measured" in texts["tokens_per_second"]
    assert figures.panels.caption(mine).startswith(f"Not shown: failed: {case('fp8', 1).id} (nan at step 17). not run: 1 (budget)")


def test_references_are_drawn_where_this_machine_has_nothing(results, folder, tmp_path):
    reference.bring(results / "runs" / "cpu2", "desk", results)
    found = entries(results, load_all(folder))
    assert {e.origin for e in figures.chosen(found, "taco")} == {"run"}
    for path in (results / "runs").rglob("*.json"):
        path.unlink()
        assert "reference:desk" in {e.origin for e in figures.chosen(entries(results, load_all(folder)), "taco")}
    assert {e.origin for e in figures.chosen(entries(results, load_all(folder)), "taco") if e.status == "ok"} == {"reference:desk"}


def test_the_verdict_says_what_failed_and_what_is_missing(results, folder):
    found = entries(results, load_all(folder))
    assert [(e.id, e.reason) for e in verdict.failed(found)] == [(case("fp8", 1).id, "nan at step 17")]
    assert verdict.failed(found, "h200x2") == []
    text = verdict.write(results, folder, folder / "claims.csv").read_text(encoding="utf-8")
    for words in ("A CPU, torch 2.13.0", "| nan at step 17 |", "1: budget; 1: needs 4 GPUs", "no case defined yet"):
        assert words in text


def test_the_verdict_is_written_whatever_it_finds(results, folder, capsys):
    path_of("cpu2", case().id, results).write_text("{", encoding="utf-8")
    verdict.main(["--results", str(results), "--workloads", str(folder), "--claims", str(folder / "claims.csv")])
    text = (results / "tables" / "verdict.md").read_text(encoding="utf-8")
    assert f"No verdict: {case().id}.json: not a record" in text
    with pytest.raises(SystemExit) as end:
        source.main("x", lambda *_: [], argv=["--results", str(results), "--workloads", str(folder)])
    assert end.value.code == 1 and capsys.readouterr().err.count("\n") == 1


def pack(results: Path, path: Path, names=None) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        archive.add(results / "runs" / "cpu2", "cpu2")
        for name in names or ():
            archive.addfile(tarfile.TarInfo(name), io.BytesIO())
    return path


def test_a_run_becomes_a_reference(results, folder, tmp_path):
    made = reference.bring(results / "runs" / "cpu2", "desk", results)
    again = reference.bring(pack(results, tmp_path / "run.tar.gz"), "desk-tar", results)
    for place in (made, again):
        assert sorted(p.name for p in place.iterdir()) == ["environment.txt", "runs"]
    one, other = ([p.read_bytes() for p in sorted(place.rglob("*.*")) if p.is_file()] for place in (made, again))
    assert one == other
    assert "versions.torch: 2.13.0\n" in (made / "environment.txt").read_text(encoding="utf-8")
    assert "2026" not in (made / "environment.txt").read_text(encoding="utf-8")
    assert len(list((made / "runs").glob("*.loss.csv"))) == 8
    found = entries(results, load_all(folder))
    assert {e.origin for e in found} == {"run", "reference:desk", "reference:desk-tar"}
    with pytest.raises(ReportError, match="reference desk exists already"):
        reference.bring(results / "runs" / "cpu2", "desk", results)
    reference.bring(results / "runs" / "cpu2", "desk", results, replace=True)


def test_a_faulty_run_becomes_no_reference(results, tmp_path):
    put(results, case(), machine="other3")
    (tmp_path / "text.txt").write_text("no archive", encoding="utf-8")
    (tmp_path / "empty").mkdir()
    for run, message in ((results / "runs", "records of cpu2, other3"), (tmp_path / "text.txt", "neither a folder nor an archive"),
                         (tmp_path / "empty", "records of no machine"), (tmp_path / "absent", "neither a folder"),
                         (pack(results, tmp_path / "evil.tar.gz", ["../../evil"]), "neither a folder nor an archive")):
        with pytest.raises(ReportError, match=message):
            reference.bring(run, "desk", results)
    with pytest.raises(ReportError, match="reference name"):
        reference.bring(results / "runs" / "cpu2", "../desk", results)
    assert list((results / "reference").iterdir()) == [] and not (results / "evil").exists()


def test_the_readme_shows_what_the_reference_gives(results, folder, tmp_path):
    reference.bring(results / "runs" / "cpu2", "desk", results)
    readme = tmp_path / "README.md"
    given = (results, folder / "claims.csv", load_all(folder))
    readme.write_text(f"# Title\n\n{reference.START}\n{reference.END}\n\nThe rest.\n", encoding="utf-8")
    with pytest.raises(ReportError, match=r"README.md: scoreboard line 1"):
        reference.check_readme(readme, *given)
    reference.write_readme(readme, *given)
    reference.check_readme(readme, *given)
    text = readme.read_text(encoding="utf-8")
    assert text.startswith("# Title\n") and text.endswith("\nThe rest.\n")
    assert "F3-int8" in text and "`triaxis run gpt-tiny_tp2_int8" in text and "A CPU, torch 2.13.0" in text
    readme.write_text(text.replace("0.5059", "0.5058"), encoding="utf-8")
    with pytest.raises(ReportError, match="the references give"):
        reference.check_readme(readme, *given)
    readme.write_text("no markers", encoding="utf-8")
    with pytest.raises(ReportError, match="expected one"):
        reference.check_readme(readme, *given)
    with pytest.raises(ReportError, match="no reference 'attic'"):
        reference.scoreboard(results, "attic", folder / "claims.csv", load_all(folder))
