"""The README's table in short: least and largest over cases, of how many, nothing that was not measured."""
from suite.case import Case
from suite.record import Metric, Record
from suite.report import brief
from suite.report.source import NOT_RUN, Entry

SPEED = "device=cuda tp=2 measure=speed"
LINE = brief.Line("w", "t", "tokens_per_second", f"{SPEED} comm=taco", f"{SPEED} comm=bf16")


def entry(value: float | None = None, status: str = "ok", **more) -> Entry:
    case = Case(**{"model": "gpt-tiny", "mesh": {"tp": 2}, "comm": "taco", "device": "cuda", "measure": "speed", **more})
    metrics = [] if value is None else [Metric("tokens_per_second", value, "tokens/s", "measured", 10)]
    reason = None if status == "ok" else "why"
    record = None if status == NOT_RUN else Record(case.id, case.row(), status, reason, "key", "h200x2", {}, {}, metrics)
    return Entry("reference:h200x2", "h200x2", case.id, case.row(), status, reason, "w", "small", record)


def test_a_cell_holds_the_ends_and_counts_what_is_missing():
    both = [entry(30.0), entry(20.0, comm="bf16"), entry(50.0, model="qwen-tiny"), entry(20.0, comm="bf16", model="qwen-tiny")]
    lone, failed = entry(9.0, model="gpt-30m"), entry(status="failed", model="gpt-125m")
    mine = [*both, lone, failed, entry(20.0, comm="bf16", model="gpt-125m")]
    defined = [*mine, entry(status=NOT_RUN, seed=1), entry(status=NOT_RUN, link="shm")]
    assert brief.cell(LINE, "p2p", mine, defined) == "1.500 to 2.500 (2 of 5)"
    assert brief.cell(LINE, "p2p", both[:2], defined[:2]) == "1.500 (1 of 1)"
    assert brief.cell(LINE, "shm", mine, defined) == brief.cell(LINE, "socket", mine, defined) == "not measured"


def test_one_metric_stands_for_itself_and_an_empty_table_is_none(monkeypatch):
    line = brief.Line("w", "t", "tokens_per_second", "device=cuda tp=2 measure=speed comm=taco")
    monkeypatch.setattr(brief, "LINES", (line,))
    assert "| w | t | 7.000 (1 of 1) | not measured | not measured |" in brief.table([entry(7.0)], [entry(7.0)])
    assert brief.table([entry(7.0, comm="bf16")], []) == ""


def test_the_lines_select_cases_that_there_are():
    from suite.report.claims import defined
    from suite.workload import load_all

    cases = defined(load_all())
    for line in brief.LINES:
        for link in brief.LINKS:
            for side in filter(None, (line.numerator, line.denominator)):
                assert any(brief.selector.parse(f"{side} link={link}").matches(e) for e in cases), (line.what, link)
