"""Claims: the shipped file, selectors, pairing and verdicts."""
import csv
import json
from pathlib import Path

import pytest

from suite.case import Case
from suite.record import Metric, Record, publish, write
from suite.report import claims, compare, overhead, reference, selector
from suite.report.source import Entry, ReportError, entries
from suite.workload import FOLDER, Expanded, Workload, load_all

FILE = FOLDER / "claims.csv"
ROW = {"id": "C1", "paper": "p", "where": "w", "statement": "s", "metric": "tokens_per_second", "paper_value": "1.5", "unit": "x",
       "comparison": "ratio", "numerator": "comm=int8 tp=2", "denominator": "comm=bf16 tp=2", "combine": "mean",
       "direction": "at least", "target": "-", "tolerance": "0", "same_setting": "-", "note": "-"}


def case(codec: str = "bf16", seed: int = 0, **more) -> Case:
    return Case(**{"model": "gpt-tiny", "mesh": {"tp": 2}, "comm": codec, "seed": seed, "measure": "speed", **more})


def put(root: Path, this: Case, value: float | None = None, *, machine="cpu2", kind="measured", reason=None, minute=0, spread=None,
        versions=None):
    metric = [] if value is None else [Metric("tokens_per_second", value, "tokens/s", kind, 20, *(spread or (None, None)))]
    known = {"started": f"2026-01-01T00:{minute:02}:00+00:00", "git": {"commit": "abc", "dirty": False}, "versions": versions}
    write(Record(this.id, this.row(), "failed" if reason else "ok", reason, "key", machine, known, {}, metric), root)


def workload(*cases: Case) -> dict[str, Workload]:
    return {"w": Workload("w", "t", "q", [Expanded(this, "w", "small") for this in cases])}


def judged(root: Path, *cases: Case, **change) -> list[claims.Outcome]:
    where = root / "claims.csv"
    save(where, [{**ROW, **change}])
    known = workload(*cases)
    found = entries(root, known)
    return claims.outcomes(claims.read(where), found, known, overhead.overheads(root, found))


def save(path: Path, rows) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, claims.HEADER, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def test_the_shipped_claims_are_whole():
    found = claims.read(FILE)
    assert [c.error for c in found if c.error] == []
    ids = [c["id"] for c in found]
    for paper, rows in (("taco", [f"R{i}" for i in range(1, 13)]), ("boost", [f"E{i}" for i in range(1, 11)]),
                        ("tetrajet", [*(f"E{i}" for i in range(1, 8)), *(f"A{i}" for i in range(1, 5))])):
        for row in rows:
            assert any(f"{i}-".startswith(f"{paper}-{row}-") for i in ids), f"{paper} {row}"
    models = {"gpt-350m", "gpt-1.3b", "gpt-6.7b", "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b"}
    assert {i.removeprefix("F1-") for i in ids if i.startswith("F1-")} == models
    assert {i.removeprefix("F1f-") for i in ids if i.startswith("F1f-")} == {"gpt-350m", "gpt-1.3b", "qwen2.5-0.5b", "qwen2.5-1.5b"}
    assert "F5" in ids and all((c["paper_value"] == "-") == (c["paper"] == claims.OWN) for c in found)


@pytest.mark.parametrize(("row", "value"), [
    ("taco-R1", "1.87"), ("taco-R2-val", "2.389899"), ("taco-R2-test", "2.344701"), ("taco-R3-val", "0.25"),
    ("taco-R3-test", "0.28"),
    ("taco-R4-val", "2.88"), ("taco-R4-test", "2.94"), ("taco-R6", "near-lossless"), ("taco-R8", "not public"),
    ("taco-R12-gpt-13b", "1.24"), ("boost-E1-1b-vanilla", "0.95"), ("boost-E1-30b-full", "1.91"), ("boost-E1-7b-vanilla", "2.28"),
    ("boost-E1-range-vanilla-low", "1.87"), ("boost-E6-b1", "0.3754 / 0.1446 ms"), ("boost-E8-b8", "177.0 / 113.6 MB/ms"),
    ("boost-E10-sp", "not public"), ("tetrajet-E1", "51.3"), ("tetrajet-E2", "1.67"), ("tetrajet-E3", "33.49"),
    ("tetrajet-E4", "36.73"), ("tetrajet-E5", "35.88"), ("tetrajet-E6", "not public"), ("tetrajet-A1", "31.49 vs 31.74"),
    ("tetrajet-A2", "-0.31"), ("tetrajet-A3", "-0.05"), ("tetrajet-A4", "not public"),
])
def test_paper_values_are_those_of_the_papers(row, value):
    assert next(c for c in claims.read(FILE) if c["id"] == row)["paper_value"] == value


def test_foundation_claims_have_their_cases(tmp_path):
    """Each row about speed pairs cases of the shipped workloads, as it would on a machine that ran them all, and loses none."""
    known = load_all()
    for row in (row for w in known.values() for row in w.rows):
        put(tmp_path, row.case, 7.0, machine="h200x2")
    mine = [c for c in claims.read(FILE) if c["id"].startswith(("F1-", "F1f-", "F2-"))]
    found = claims.outcomes(mine, entries(tmp_path, known), known)
    assert len(found) == len(mine) == 12
    assert [(o.verdict, o.n) for o in found if o.value != 1.0 or o.n != o.of or o.setting != "same"] == []
    assert [o.n for o in found] == [1] * 10 + [2] * 2


def test_no_foundation_claim_loses_a_pair_to_its_own_selectors():
    cases = [Entry("run", "-", r.id, r.case.row(), "not run", "-", r.workload, r.size) for w in load_all().values() for r in w.rows]
    for claim in claims.read(FILE):
        if claim["paper"] == claims.OWN and claim["denominator"] != "-":
            top, bottom = selector.parse(claim["numerator"]), selector.parse(claim["denominator"])
            sides = [[e for e in cases if side.matches(e)] for side in (top, bottom)]
            found = selector.pairs(*sides, selector.free(top, bottom))
            assert found and selector.alone(*sides, found) == [], claim["id"]


def test_parameters_in_bf16_and_float32_are_claims_of_their_own(tmp_path):
    """A pair of one is never counted for the other."""
    known = load_all()
    for row in known["baseline"].rows:
        if row.case.precision.options["params"] == "bfloat16":
            put(tmp_path, row.case, 7.0, machine="h200x1")
    found = {o.claim["id"]: o for o in claims.outcomes(claims.read(FILE), entries(tmp_path, known), known)}
    assert (found["F1-gpt-350m"].n, found["F1-gpt-350m"].of) == (1, 1)
    assert found["F1f-gpt-350m"].verdict == "not run: no record yet"


@pytest.mark.parametrize(("comparison", "direction", "target", "value", "spread", "verdict"), [
    ("ratio", "at least", 1.5, 1.5, 0, "replicated"), ("ratio", "at least", 1.5, 1.45, 0, "replicated"),  # tolerance 0.1
    ("ratio", "at least", 1.5, 1.2, 0, "partly"), ("ratio", "at least", 1.5, 0.99, 0, "not replicated"),
    ("ratio", "at most", 0.5, 0.7, 0, "partly"), ("ratio", "at most", 0.5, 1.1, 0, "not replicated"),
    ("ratio", "about", 1.5, 1.7, 0, "partly"), ("ratio", "about", 1.5, 1.58, 0, "replicated"),
    ("ratio", "about", 0.9, 1.05, 0, "not replicated"), ("ratio", "at least", 1.0, 0.85, 0.1, "partly"),
    ("difference %", "at most", 0.3, -1.0, 0, "replicated"), ("difference %", "at most", 0.3, 0.5, 0, "not replicated"),
    ("difference %", "about", 2.88, 1.0, 0, "partly"), ("difference", "at most", -0.31, -0.1, 0, "partly"),
    ("value", "about", 33.49, 33.5, 0, "replicated"), ("value", "about", 33.49, 34.0, 0, "not replicated"),
])
def test_verdicts(comparison, direction, target, value, spread, verdict):
    claim = claims.Claim({**ROW, "comparison": comparison, "direction": direction, "target": str(target), "tolerance": "0.1"})
    assert claims.judge(claim, value, True, spread) == verdict
    if verdict == "replicated":
        assert claims.judge(claim, value, False, spread) == "partly"


def test_a_ratio_of_one_machine_says_how_far_apart(tmp_path):
    put(tmp_path, case("int8"), 18.0)
    put(tmp_path, case(), 10.0, minute=12)
    (one,) = judged(tmp_path, case("int8"), case())
    assert (one.verdict, one.value, one.apart, one.n, one.of, one.kind) == ("replicated", 1.8, 720.0, 1, 1, "measured")
    assert (one.machine, one.setting, one.cases) == ("cpu2", "other", (case("int8").id, case().id))
    assert judged(tmp_path, case("int8"), case(), same_setting="machine=cpu* tp=2")[0].setting == "same"
    assert judged(tmp_path, case("int8"), case(), same_setting="machine=h200*")[0].setting == "other"


def test_no_ratio_across_machines(tmp_path):
    put(tmp_path, case("int8"), 18.0, machine="cpu2")
    put(tmp_path, case(), 10.0, machine="cpu4")
    assert [(o.machine, o.verdict) for o in judged(tmp_path, case("int8"), case())] == [
        ("cpu2", "not run: no record yet"), ("cpu4", "not run: no record yet")]


def test_a_failed_seed_is_counted_and_never_replicated(tmp_path):
    for seed in range(3):
        put(tmp_path, case(seed=seed), 10.0)
        put(tmp_path, case("int8", seed), 18.0 + seed, reason="oom" if seed == 1 else None)
    (one,) = judged(tmp_path, *(case(c, s) for c in ("int8", "bf16") for s in range(3)))
    assert (one.verdict, one.n, one.of, one.value) == ("partly", 2, 3, 1.9)
    assert one.note == f"2 of 3: failed: {case('int8', 1).id}: oom"
    assert one.interval[0] < 1.9 < one.interval[1]
    assert judged(tmp_path, combine="max")[0].value == 2.0 and judged(tmp_path, combine="min")[0].value == 1.8


@pytest.mark.parametrize("origin", ["run", "reference:desk"])
@pytest.mark.parametrize(("missing", "lacks"), [("bf16", "denominator"), ("int8", "numerator")])
def test_a_side_without_its_partner_is_a_lost_pair(tmp_path, origin, missing, lacks):
    """Whichever side it is, in a run as in a reference: n of N, and never replicated."""
    for codec, value in (("int8", 18.0), ("bf16", 10.0)):
        for seed in range(2 if codec == missing else 3):
            put(tmp_path, case(codec, seed), value)
    if origin != "run":
        reference.bring(tmp_path / "runs" / "cpu2", "desk", tmp_path)
    (one,) = [o for o in judged(tmp_path) if o.origin == origin]
    there = case("int8" if missing == "bf16" else "bf16", 2).id
    assert (one.verdict, one.n, one.of, one.value) == ("partly", 2, 3, 1.8)
    assert one.note == f"2 of 3: {there}: no {lacks} here"


def test_a_case_that_a_reference_lacks_is_counted_where_its_machine_could_run_it(tmp_path):
    """The least of several cases is no `replicated` before all of them were measured: `value` claims have no pairs to miss."""
    cases = [case("int8"), case("int8", 1), case("int8", device="cuda")]
    put(tmp_path, cases[0], 200.0)
    reference.bring(tmp_path / "runs" / "cpu2", "cpu2", tmp_path)
    change = {"comparison": "value", "denominator": "-", "combine": "min", "target": "150", "unit": "tokens/s"}
    found = {o.origin: o for o in judged(tmp_path, *cases, **change)}["reference:cpu2"]
    assert (found.n, found.of, found.verdict, found.note) == (1, 2, "partly", f"1 of 2: {cases[1].id}: no record here")
    put(tmp_path, cases[1], 300.0)
    reference.bring(tmp_path / "runs" / "cpu2", "cpu2", tmp_path, replace=True)
    found = {o.origin: o for o in judged(tmp_path, *cases, **change)}["reference:cpu2"]
    assert (found.n, found.of, found.verdict, found.note) == (2, 2, "replicated", ""), "a GPU's case is none of a CPU's"


@pytest.mark.parametrize(("machine", "needs", "could"), [
    ("cpu2", {}, True), ("desk", {}, True), ("h200x2", {}, False), ("h200x2", {"device": "cuda"}, True),
    ("cpu2", {"device": "cuda"}, False),
    ("h200x2", {"device": "cuda", "mesh": {"tp": 4}}, False),
    ("h200x2", {"device": "cuda", "mesh": {"tp": 4}, "link": "gloo"}, True),
])
def test_a_machine_is_asked_for_what_its_name_promises(machine, needs, could):
    assert claims._could_run(case(**needs), machine) == could


def test_a_reference_without_any_partner_says_so(tmp_path):
    put(tmp_path, case("int8"), 18.0)
    reference.bring(tmp_path / "runs" / "cpu2", "desk", tmp_path)
    found = {o.origin: o for o in judged(tmp_path, case("int8"), case())}
    assert found["run"].verdict == "not run: no record yet"
    lonely = found["reference:desk"]
    assert (lonely.verdict, lonely.n, lonely.of) == (f"not run: {case().id}: no record here", 0, 1)


@pytest.mark.parametrize("tool", ["torch", "triton", "cuda"])
def test_no_number_across_versions(tmp_path, tool):
    mine = {"torch": "2.13.0", "triton": "3.7.1", "cuda": "13.0", "python": "3.11.1"}
    put(tmp_path, case("int8"), 18.0, versions=mine)
    put(tmp_path, case(), 10.0, versions=mine | {"python": "3.12.3"})
    assert judged(tmp_path)[0].value == 1.8
    put(tmp_path, case(), 10.0, versions=mine | {tool: "9.9"})
    for comparison in ("ratio", "difference", "difference %"):
        (one,) = judged(tmp_path, comparison=comparison)
        assert one.value is None
        assert one.verdict == f"not run: {case('int8').id} ran with {tool} {mine[tool]}, {case().id} with 9.9"
    put(tmp_path, case(), 10.0)
    assert judged(tmp_path)[0].verdict.endswith("with torch 2.13.0, " + case().id + " with unknown")


def test_the_spread_of_a_number():
    """By hand: 3-4-5 triangles."""
    def metric(value, low, high):
        return Metric("m", value, "u", "measured", 20, low, high)

    pair = [metric(200.0, 194.0, 208.0), metric(100.0, 97.0, 104.0)]  # down 3 % and 4 %, up 4 % and 3 %
    assert compare.spread("ratio", pair) == pytest.approx((1.9, 2.1))
    assert compare.spread("difference %", pair) == pytest.approx((90.0, 110.0))
    assert compare.spread("difference", [metric(10.0, 7.0, 14.0), metric(5.0, 2.0, 9.0)]) == pytest.approx((0.0, 10.0))
    assert compare.spread("value", pair[:1]) == (194.0, 208.0)
    assert compare.spread("ratio", [pair[0], Metric("m", 100.0, "u")]) is None


@pytest.mark.parametrize(("combine", "value", "spread"), [
    ("max", 2.0, (1.9, 2.1)), ("min", 1.0, (0.95, 1.05)), ("mean", 1.5, (1.425, 1.575))])
def test_the_spread_is_shown_with_the_number(tmp_path, combine, value, spread):
    for seed, high in ((0, 2.0), (1, 1.0)):
        put(tmp_path, case("int8", seed), 100 * high, spread=(97 * high, 104 * high))
        put(tmp_path, case(seed=seed), 100.0, spread=(97.0, 104.0))
    (one,) = judged(tmp_path, combine=combine)
    assert one.value == value and one.spread == pytest.approx(spread)
    row = claims.row(one)
    assert (row["q20"], row["q80"], row["samples"]) == (*one.spread, 20)
    shown = claims.ours(one)
    assert f"q20-q80 {spread[0]:.{4 if spread[0] < 1 else 3}f} to {spread[1]:.3f} (n=2 of 2, medians of 20)" in shown
    assert shown in claims.table([one])


def test_a_number_without_quantiles_says_so(tmp_path):
    put(tmp_path, case("int8"), 18.0)
    put(tmp_path, case(), 10.0)
    (one,) = judged(tmp_path)
    assert (one.spread, one.samples) == (None, None)
    assert claims.ours(one) == "1.800 x, no q20-q80 (n=1 of 1)"


def test_what_a_number_is_held_against_says_whose_it_is(tmp_path):
    put(tmp_path, case("int8"), 18.0)
    put(tmp_path, case(), 10.0)
    paper, gated, own = (judged(tmp_path, **change)[0] for change in (
        {}, {"paper_value": "near-lossless", "target": "1.2"}, {"paper": "triaxis", "paper_value": "-", "target": "1.2"}))
    assert "| paper: 1.5 (w) |" in claims.table([paper])
    assert "| paper: near-lossless; target: at least 1.2 (w) |" in claims.table([gated])
    assert "| target: at least 1.2 (w) |" in claims.table([own])
    assert {o.verdict for o in (paper, gated, own)} == {"replicated"}
    (mixed,) = judged(tmp_path, paper="triaxis")
    assert mixed.verdict.endswith("line 2: column paper_value: '1.5', expected - in a claim of our own: it has a target")


def test_the_measured_spread_softens_a_miss(tmp_path):
    put(tmp_path, case("int8"), 9.9, spread=(9.7, 10.1))
    put(tmp_path, case(), 10.0, spread=(9.9, 10.1))
    assert judged(tmp_path, target="1.0")[0].verdict == "partly"
    put(tmp_path, case("int8"), 9.5, spread=(9.4, 9.6))
    assert judged(tmp_path, target="1.0")[0].verdict == "not replicated"


def test_emulated_and_missing_numbers_are_never_compared(tmp_path):
    put(tmp_path, case("int8"), 18.0, kind="emulated")
    put(tmp_path, case(), 10.0)
    (one,) = judged(tmp_path)
    assert (one.verdict, one.value) == ("not run: tokens_per_second is emulated: never compared", None)
    assert judged(tmp_path, metric="other")[0].verdict == f"not run: {case('int8').id}: no other: not in the record"


def test_a_value_that_is_not_public_is_shown_and_not_judged(tmp_path):
    put(tmp_path, case("int8"), 18.0)
    put(tmp_path, case(), 10.0)
    (one,) = judged(tmp_path, paper_value="not public", direction="-", tolerance="-")
    assert (one.verdict, one.value) == ("not run: no public value to compare with", 1.8)
    assert judged(tmp_path, paper_value="not public", target="1.2")[0].verdict == "replicated"


def test_reasons_of_what_did_not_run(tmp_path):
    assert judged(tmp_path)[0].verdict == "not run: no case defined yet"
    assert judged(tmp_path, case("int8"), case())[0].verdict == "not run: no record yet"
    rows = [{"id": this.id, "runs": False, "reason": "needs 4 GPUs"} for this in (case("int8"), case())]
    publish(tmp_path / "plan" / "cpu2.json", json.dumps(rows))
    (one,) = judged(tmp_path, case("int8"), case())
    assert (one.verdict, one.machine, one.n, one.of) == ("not run: needs 4 GPUs", "cpu2", 0, 1)
    put(tmp_path, case("int8"), reason="deadline")
    assert judged(tmp_path, case("int8"), case())[0].verdict == f"not run: failed: {case('int8').id}: deadline"


def test_two_denominators_are_an_error_of_the_row(tmp_path):
    for this in (case("int8"), case(), case(data={"batch": 16})):
        put(tmp_path, this, 10.0)
    (one,) = judged(tmp_path, denominator="comm=bf16 tp=2 batch=*")
    assert one.verdict.startswith(f"not run: {case('int8').id} fits two denominators")
    assert judged(tmp_path)[0].value == 1.0


def test_selectors():
    row = Entry("run", "h200x2", "x", case("int8", mesh={"tp": 4}, data={"micro": 2}).row(), "ok", None, "taco+stack", "small")
    for given in ("comm=int8 tp=4", "model=gpt-*", "tp=2|4", "workload=stack", "data.micro=2", "machine=h200x?", "compile=false",
                  "comm_forward=int8 comm_backward=int8", "comm.dp.forward=bf16"):
        assert selector.parse(given).matches(row), given
    for given in ("comm=bf16", "tp=2", "workload=tac", "data.micro=none", "machine=h200"):
        assert not selector.parse(given).matches(row), given
    for given, message in (("codec=int8", "unknown key 'codec'"), ("tp", "expected key=value"), ("tp=2 tp=4", "each key once"),
                           ("", "no key")):
        with pytest.raises(ValueError, match=message):
            selector.parse(given)
    pair = selector.parse("comm=int8 tp=2 link=p2p"), selector.parse("comm=bf16 tp=2")
    assert selector.free(*pair) == {"comm.tp.forward", "comm.tp.backward", "link"}


@pytest.mark.parametrize("column", claims.HEADER)
def test_a_deleted_cell_changes_only_its_row(tmp_path, column):
    put(tmp_path, case("int8"), 18.0)
    put(tmp_path, case(), 10.0)
    rows = [{**ROW, "id": f"C{i}"} for i in range(3)]
    known = workload(case("int8"), case())
    found = entries(tmp_path, known)

    def table(given) -> list[dict]:
        save(tmp_path / "claims.csv", given)
        return [claims.row(o) for o in claims.outcomes(claims.read(tmp_path / "claims.csv"), found, known)]

    whole, holed = table(rows), table([rows[0], {**rows[1], column: ""}, rows[2]])
    assert (holed[0], holed[2]) == (whole[0], whole[2])
    assert holed[1]["verdict"] == f"not run: claims.csv: line 3: column {column}: is empty" and holed[1]["value"] is None


def test_a_row_with_a_cell_too_few_is_its_own_fault(tmp_path):
    lines = FILE.read_text(encoding="utf-8").splitlines()
    lines[1] = lines[1].replace("tokens_per_second,", "", 1)
    (tmp_path / "claims.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    found = claims.read(tmp_path / "claims.csv")
    assert found[0].error == "claims.csv: line 2: 15 cells, expected 16"
    assert [c.cells for c in found[1:]] == [c.cells for c in claims.read(FILE)[1:]]


@pytest.mark.parametrize(("change", "message"), [
    ({"numerator": "codec=int8"}, "column numerator: unknown key 'codec'"), ({"comparison": "times"}, "column comparison: 'times'"),
    ({"tolerance": "some"}, "column tolerance"), ({"target": "nan"}, "column target: nan is no number"),
    ({"denominator": "-"}, "column denominator: '-' does not fit comparison ratio"), ({"direction": "-"}, "column direction"),
    ({"combine": "median"}, "column combine"), ({"same_setting": "tp"}, "column same_setting"),
])
def test_a_faulty_cell_names_file_line_and_column(tmp_path, change, message):
    (one,) = judged(tmp_path, **change)
    assert one.verdict.startswith(f"not run: claims.csv: line 2: {message}")


def test_a_faulty_file_is_refused(tmp_path):
    path = tmp_path / "claims.csv"
    path.write_text("id,paper\n", encoding="utf-8")
    with pytest.raises(ReportError, match=r"claims.csv: line 1: column combine is missing"):
        claims.read(path)
    save(path, [ROW, ROW])
    with pytest.raises(ReportError, match="id C1 is there twice"):
        claims.read(path)


def test_a_mean_is_as_good_as_its_interval():
    claim = next(c for c in claims.read(FILE) if c["id"] == "F4-int8-gpt-tiny")  # at most 0.3 %
    assert claims.judge(claim, 0.1, True, interval=(0.0, 0.2)) == "replicated"
    assert claims.judge(claim, 0.1, True, interval=(-0.5, 0.7)) == "partly"
    assert claims.judge(claim, 0.8, True, interval=(-3.0, 4.6)) == "partly"
    assert claims.judge(claim, 0.8, True, interval=(0.4, 1.2)) == "not replicated"
    assert claims.judge(claim, 0.1, False, interval=(0.0, 0.2)) == "partly"
