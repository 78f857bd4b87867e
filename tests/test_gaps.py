"""The share of a gap that is closed: its interval covers the truth as often as it says, and what cannot be told is not told."""
from __future__ import annotations

import random
from pathlib import Path

import pytest
from test_claims import judged, workload

from suite.case import Case
from suite.record import Metric, Record, write
from suite.report import gaps
from suite.report.source import entries

LOSS = {"metric": "validation_loss", "comparison": gaps.COMPARISON, "unit": "%", "numerator": "precision=tetrajet*",
        "denominator": "precision=nvfp4", "direction": "at least", "paper_value": "51.3"}


def case(precision: str, seed: int) -> Case:
    return Case(model="gpt-tiny", precision=precision, seed=seed)


def put(root: Path, losses: dict[str, list[float | None]]) -> list[Case]:
    """Records of each precision by seed; None is a run that failed."""
    cases = []
    for precision, values in losses.items():
        for seed, value in enumerate(values):
            cases.append(case(precision, seed))
            known = {"started": "2026-01-01T00:00:00+00:00", "git": {"commit": "abc", "dirty": False}, "versions": None}
            metrics = [] if value is None else [Metric("validation_loss", value, "nat")]
            status = ("ok", None) if metrics else ("failed", "oom")
            write(Record(cases[-1].id, cases[-1].row(), *status, "key", "cpu2", known, {}, metrics), root)
    return cases


def test_three_seeds_by_hand(tmp_path):
    """Gaps .02, .03, .04 of one and .04, .07, .07 of the other: half of it is closed."""
    cases = put(tmp_path, {"bf16": [3.0, 3.1, 3.2], "nvfp4": [3.04, 3.17, 3.27], "tetrajet": [3.02, 3.13, 3.24]})
    rows = gaps.rows(entries(tmp_path, workload(*cases)))
    assert [(r["precision"], r["finding"]) for r in rows] == [("nvfp4", "larger"), ("tetrajet", "smaller")]
    row = rows[1]
    assert row["other"] == "gpt-tiny_nvfp4_s0" and row["n"] == 3 and "seed" not in row
    assert (row["gap"], row["other_gap"]) == pytest.approx((0.03, 0.06)) and row["closed_percent"] == pytest.approx(50)
    # d = -.02, -.04, -.03: sd .01, t(.975, 2) = 4.3027
    assert row["difference"] == pytest.approx(-0.03) and row["smallest"] == pytest.approx(4.3027 * 0.01 / 3**0.5, rel=1e-4)
    assert (row["difference_low"], row["difference_high"]) == pytest.approx((-0.03 - row["smallest"], -0.03 + row["smallest"]))
    assert row["closed_low"] < 50 < row["closed_high"]
    for share in (row["closed_low"], row["closed_high"]):  # at the ends the statistic is t's bound
        rest = [g - (1 - share / 100) * h for g, h in zip((0.02, 0.03, 0.04), (0.04, 0.07, 0.07))]
        mean = sum(rest) / 3
        error = (sum((r - mean) ** 2 for r in rest) / 2 / 3) ** 0.5
        assert abs(mean) / error == pytest.approx(4.3027, rel=1e-4)


def test_the_interval_covers_as_often_as_it_says():
    draw, hits, tries = random.Random(0), 0, 2000
    for _ in range(tries):
        common = [draw.gauss(0, 0.02) for _ in range(5)]
        mine, other = (tuple(gap + c + draw.gauss(0, 0.01) for c in common) for gap in (0.1, 0.2))
        found = gaps.Gaps(mine, other)
        low, high = found.interval
        hits += low < 50 < high
    assert 0.935 < hits / tries < 0.965


def test_what_is_not_separable_is_not_told():
    flat = gaps.Gaps((0.01, -0.02, 0.03), (0.02, -0.01, 0.01))
    assert flat.finding == "not separable" and flat.closed is not None and flat.interval is None
    assert gaps.Gaps((0.1,), (0.2,)).interval is gaps.Gaps((0.1,), (0.2,)).smallest is gaps.Gaps((0.1,), (0.2,)).finding is None
    assert gaps.Gaps((0.1, 0.1), (-0.1, -0.2)).closed is None, "no gap to close"
    assert gaps.Gaps((0.1, 0.1), (0.2, 0.2)).interval == pytest.approx((50, 50))


LOSSES = {"bf16": [3.0, 3.1, 3.2], "nvfp4": [3.05, 3.15, 3.25], "tetrajet": [3.020, 3.121, 3.219]}


def test_a_claim_of_a_gap(tmp_path):
    [found] = judged(tmp_path, *put(tmp_path, LOSSES), **LOSS)
    assert found.value == pytest.approx(60) and found.n == found.of == 3 and len(found.cases) == 6
    assert found.interval[0] > 51.3 and found.verdict == "replicated"
    [found] = judged(tmp_path, *put(tmp_path, LOSSES), **LOSS | {"paper_value": "80"})
    assert found.verdict == "partly", "it goes the claimed way"


@pytest.mark.parametrize(("change", "verdict", "words"), [
    ({"tetrajet": [3.02, None, 3.22]}, "partly", "2 of 3: failed: gpt-tiny_tetrajet_s1: oom"),
    ({"bf16": [3.0, 3.1]}, "partly", "2 of 3: gpt-tiny_tetrajet_s2: no common baseline here"),
    ({"tetrajet": [3.02], "nvfp4": [3.05]}, "partly", "no bounded interval"),
    ({"nvfp4": [2.9, 3.0, 3.1]}, "not run: the denominator has no gap to close", ""),
    ({"bf16": []}, "not run: gpt-tiny_tetrajet_s0: no common baseline here", "")])
def test_a_claim_with_what_is_missing(tmp_path, change, verdict, words):
    [found] = judged(tmp_path, *put(tmp_path, LOSSES | change), **LOSS)
    assert found.verdict == verdict and words in found.note
