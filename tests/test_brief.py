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


def trained(seed: int, loss: float, precision: str = "bf16") -> Entry:
    case = Case(model="gpt-30m", device="cuda", seed=seed, precision=precision, steps=100, data={"batch": 4, "seq": 512})
    metrics = [Metric("validation_loss", loss, "nats/token", "measured", 8), Metric("train_loss", 9.0, "nats/token", "measured", 8)]
    record = Record(case.id, case.row(), "ok", None, "key", "h200x1", {}, {}, metrics)
    return Entry("reference:h200x1", "h200x1", case.id, case.row(), "ok", None, "w", "small", record)


def test_losses_stand_against_bf16_over_seeds_and_against_the_other_recipe():
    runs = [trained(s, 2.0) for s in range(3)] + [trained(s, 2.1 + s / 100, "nvfp4") for s in range(3)]
    table = brief.loss_table([*runs, trained(0, 2.06, "tetrajet"), trained(1, 2.07, "tetrajet")])
    # t(0.975, 2) = 4.303 over sd 0.01 / √3; t(0.975, 1) = 12.71, both seeds 0.04 below
    assert "| nvfp4 | gpt-30m, 0.2M tokens, TP 1, lr 0.003 | 3 of 3 | +0.110 [+0.085, +0.135] nats |" in table
    assert "| +5.500 [+4.258, +6.742] % |" in table
    assert "| +0.00 to +0.00 % (3) | - |" in table
    assert "| 2 of 2 | +0.065 [+0.001, +0.129] nats |" in table
    assert "-0.0400 [-0.0400, -0.0400] (n=2), could have shown 0.0000: smaller |" in table
    assert brief.loss_table(runs[:3]) == "", "bf16 alone is compared with nothing"
