"""The claim about what the GPU sampler costs: it is in no record, but in a file of its own, beside runs and references."""
import json
import tarfile
from dataclasses import asdict
from pathlib import Path

import pytest
from test_claims import case, judged, put

from suite.record import Metric, publish
from suite.report import claims, overhead, reference
from suite.report.source import ReportError

SAMPLER = {"paper": "triaxis", "metric": "sampler_overhead_upper_bound", "paper_value": "-", "comparison": "value",
           "numerator": "tp=2 device=cuda", "denominator": "-", "direction": "at most", "target": "1.005",
           "same_setting": "machine=h200*"}


def measured(root: Path, machine: str, upper: float) -> None:
    metrics = [Metric("sampler_overhead", 1.0, "ratio", n=12, q20=0.9, q80=1.1),
               Metric("sampler_overhead_upper_bound", upper, "ratio", n=12)]
    publish(overhead.path_of(machine, root), json.dumps([asdict(m) for m in metrics]))


def test_the_cost_of_the_sampler(tmp_path):
    """Not in any record: from the run's file, and from a reference's."""
    (one,) = judged(tmp_path, **SAMPLER)
    assert one.verdict == "not run: triaxis overhead was not run"
    measured(tmp_path, "h200x1", 1.004)
    put(tmp_path, case(), 10.0, machine="h200x1")
    reference.bring(tmp_path / "runs" / "h200x1", "one", tmp_path)
    measured(tmp_path, "h200x1", 1.006)
    found = judged(tmp_path, **SAMPLER)
    assert {(o.machine, o.setting, o.n, o.of, o.samples) for o in found} == {("h200x1", "same", 1, 1, 12)}
    assert [(o.origin, o.value, o.verdict) for o in found] == [
        ("run", 1.006, "not replicated"), ("reference:one", 1.004, "replicated")]
    assert claims.rerun(found[0]) == "`triaxis overhead CASE`" and "1.006 x" in claims.table(found)
    board = reference.scoreboard(tmp_path, "one", tmp_path / "claims.csv", {})
    number = "1.004 x, q20-q80 0.9000 to 1.100 (n=1 of 1, 12 pairs)"
    assert f"| target: at most 1.005 | {number} | measured | replicated, setting: same |" in board


def test_a_sampler_that_was_not_there(tmp_path):
    publish(overhead.path_of("cpu2", tmp_path), json.dumps([asdict(Metric("sampler_overhead", None, "ratio", reason="no GPU"))]))
    (one,) = judged(tmp_path, **SAMPLER)
    assert (one.verdict, one.machine, one.value) == ("not run: triaxis overhead: no GPU", "cpu2", None)


@pytest.mark.parametrize(("text", "message"), [
    ("{", "Expecting"), ('[{"name": "x", "value": 1.0, "unit": "1"}]', "no sampler_overhead in it"), ("7", "not iterable"),
    ('[{"name": "sampler_overhead", "value": "1", "unit": "1"}]', "real number"),
])
def test_a_faulty_measurement_of_the_sampler_names_its_file(tmp_path, text, message):
    publish(overhead.path_of("cpu2", tmp_path), text)
    with pytest.raises(ReportError, match=rf"^overhead cpu2.json: .*{message}"):
        overhead.overheads(tmp_path, [])


def test_the_cost_of_the_sampler_comes_with_the_reference(tmp_path):
    """From the results that the run is in, from an archive of them, and from ours; never another machine's."""
    results, elsewhere = tmp_path / "results", tmp_path / "elsewhere"
    for root in (results, elsewhere):
        put(root, case(), 10.0)
    metrics = [asdict(Metric("sampler_overhead", value, "ratio")) for value in (1.001, 1.002)]
    publish(results / "overhead" / "h200x1.json", json.dumps(metrics[:1]))
    assert not (reference.bring(results / "runs" / "cpu2", "none", results) / "overhead.json").exists()
    publish(results / "overhead" / "cpu2.json", json.dumps(metrics[:1]))
    publish(elsewhere / "overhead" / "cpu2.json", json.dumps(metrics[1:]))
    bare, whole = tmp_path / "bare.tar.gz", tmp_path / "whole.tar.gz"
    for path, folders in ((bare, ["runs"]), (whole, ["runs", "overhead"])):
        with tarfile.open(path, "w:gz") as file:
            for name in folders:
                file.add(elsewhere / name, f"results/{name}")
    for run, name, value in ((results / "runs" / "cpu2", "ours", 1.001), (bare, "bare", 1.001),
                             (elsewhere / "runs" / "cpu2", "there", 1.002), (whole, "whole", 1.002)):
        made = reference.bring(run, name, results)
        assert sorted(p.name for p in made.iterdir()) == ["environment.txt", "overhead.json", "runs"]
        assert json.loads((made / "overhead.json").read_text(encoding="utf-8"))[0]["value"] == value, name
    publish(results / "overhead" / "cpu2.json", "{")
    with pytest.raises(ReportError, match=r"overhead cpu2\.json"):
        reference.bring(results / "runs" / "cpu2", "broken", results)
    assert not (results / "reference" / "broken").exists()
