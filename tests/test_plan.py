"""The plan: what runs on which machine, why the rest does not, and how cases form launches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from suite import plan
from suite.case import Case
from suite.machine import Gpu, Machine
from suite.rendezvous import Rendezvous
from suite.workload import Expanded, Workload, load_all

CPU = Machine("cpu2", 2, 24.0)


def gpus(n: int) -> Machine:
    return Machine(
        f"h200x{n}", 16, 500.0, tuple(Gpu(i, f"GPU-{i}", "NVIDIA H200", "h200", 140.0, False, "Default") for i in range(n))
    )


def case(**row) -> Case:
    return Case.model_validate({"model": "gpt-tiny", "data": {"batch": 8}, **row})


def big(tp: int, **row) -> Case:
    return case(model="gpt-1.3b", device="cuda", mesh={"tp": tp}, measure="speed", data={"seq": 2048, "batch": 16}, steps=20, **row)


def one(*rows: tuple[Case, str, float], name: str = "toy") -> dict[str, Workload]:
    return {name: Workload(name, name, "", [Expanded(c, name, size, value) for c, size, value in rows])}


def reasons(planned) -> dict[str, str | None]:
    return {row.id: row.reason for row in planned}


def test_small_runs_without_a_gpu_and_the_rest_says_why():
    rows = one((case(), "small", 1), (big(1), "short", 9), (big(4), "short", 9), (big(8), "full", 9))
    assert list(reasons(plan.plan(rows, CPU)).values()) == [None, "needs a GPU", "needs 4 GPUs", "size full not asked"]
    assert [r.runs for r in plan.plan(rows, gpus(2))] == [True, True, False, False]
    assert all(r.runs for r in plan.plan(rows, gpus(8), size="full"))


def test_small_only():
    planned = plan.plan(one((case(), "small", 1), (big(1), "short", 9)), gpus(1), size="small")
    assert list(reasons(planned).values()) == [None, "size short not asked"]


def test_the_budget_goes_to_the_most_valuable_and_never_stops_small():
    rows = [(big(1, seed=s), "short", float(s)) for s in range(10)]
    each = plan.seconds(rows[0][0], 16)
    hours = (plan.START["cuda"] + 3.5 * each) / 3600
    planned = plan.plan(one(*rows), gpus(1), hours)
    assert [row.expanded.value for row in planned if row.runs] == [9.0, 8.0, 7.0]
    assert {row.reason for row in planned if not row.runs} == {"budget"}
    assert all(r.runs for r in plan.plan(one((case(steps=100000), "small", 1)), CPU, hours=0.001))


def test_full_has_no_budget_unless_given():
    rows = one(
        *[
            (
                big(
                    1,
                    seed=s,
                ),
                "full",
                1.0,
            )
            for s in range(200)
        ]
    )
    assert all(r.runs for r in plan.plan(rows, gpus(1), size="full"))
    assert any(r.reason == "budget" for r in plan.plan(rows, gpus(1), 1.0, "full"))


def test_ranks_joined_by_gloo_share_one_gpu():
    assert plan.plan(one((big(4, link="gloo"), "short", 1)), gpus(1))[0].runs


def test_several_machines_need_their_share_of_the_gpus_each(monkeypatch):
    rows = one((big(1), "short", 4), (big(4), "short", 3), (big(8), "short", 2), (big(8, link="gloo"), "short", 1))
    two = ["1 rank does not divide over 2 machines", None, "needs 4 GPUs on each of 2 machines", None]
    assert list(reasons(plan.plan(rows, gpus(2), rendezvous=Rendezvous(nodes=2))).values()) == two
    monkeypatch.setenv("NNODES", "2")
    assert list(reasons(plan.plan(rows, gpus(2))).values()) == two
    assert reasons(plan.plan(rows, CPU))[big(8, link="gloo").id] == "needs a GPU on each of 2 machines"


def test_a_rank_on_the_cpu_computes_on_one_core():
    def work(cpus: int, tp: int) -> float:
        return plan.seconds(case(steps=500, mesh={"tp": tp}), cpus) - plan.FIXED["cpu"]

    assert work(8, 1) == work(1, 1) == work(1, 4) > 0
    assert work(8, 4) == pytest.approx(work(1, 1) / 4) and work(2, 4) == pytest.approx(work(1, 1) / 2)
    alone = case(steps=5000)
    assert plan.deadline(alone, 64) == plan.deadline(alone, 1) > 180


def test_bad_settings_name_the_key():
    with pytest.raises(ValueError, match="size: expected one of small, short, full, got 'big'"):
        plan.plan({}, CPU, size="big")
    with pytest.raises(ValueError, match="hours: expected a number above 0"):
        plan.plan({}, CPU, hours=0)


def test_cases_that_agree_in_device_mesh_link_and_measure_share_a_launch():
    rows = one(
        *[
            (c, "small", 1.0)
            for c in (
                case(mesh={"tp": 2}),
                case(mesh={"tp": 2}, comm="int8"),
                case(mesh={"tp": 2, "dp": 2}),
                case(),
                case(seed=1),
                case(measure="speed"),
            )
        ]
    )
    found = plan.launches(plan.plan(rows, CPU))
    assert {name: len(launch.cases) for name, launch in found.items()} == {
        "toy-cpu-tp2-gloo-loss": 2,
        "toy-cpu-dp2-tp2-gloo-loss": 1,
        "toy-cpu-tp1-loss": 2,
        "toy-cpu-tp1-speed": 1,
    }
    assert [name for name, launch in found.items() if launch.exclusive] == ["toy-cpu-tp1-speed"]
    assert plan.single(rows["toy"].rows[0]).id == "toy-cpu-tp2-gloo-loss"


@pytest.mark.parametrize(
    ("change", "cores", "count", "threads"),
    [
        ({}, 2, 0, 1),  # two launches of one process lie side by side
        ({"measure": "speed"}, 2, 0, 2),
        ({"mesh": {"tp": 4}}, 2, 0, 2),
        ({"mesh": {"tp": 2}}, 16, 0, 2),
        ({"device": "cuda"}, 16, 2, 8),
        ({"device": "cuda", "measure": "speed"}, 16, 2, 16),
    ],
)
def test_a_launch_takes_its_share_of_the_cores(change, cores, count, threads):
    (row,) = one((case(**change), "small", 1.0))["toy"].rows
    assert plan.single(row).threads(cores, count) == threads


def test_untimed_cases_of_one_process_are_cut_into_launches():
    """Alternately, so that each part has some of the most valuable and as many; ranks, timed cases and GPUs stay together."""
    rows = [(case(seed=s), "small", 1.0) for s in range(21)]
    more = [(case(seed=s, **c), "small", 1.0) for c in ({"mesh": {"tp": 2}}, {"measure": "speed"}) for s in range(11)]
    found = plan.launches(plan.plan(one(*rows, *more), CPU))
    cut = ["toy-cpu-tp1-loss", "toy-cpu-tp1-loss-2", "toy-cpu-tp1-loss-3"]
    assert {name: len(launch.cases) for name, launch in found.items()} == dict.fromkeys(cut, 7) | {
        "toy-cpu-tp1-speed": 11,
        "toy-cpu-tp2-gloo-loss": 11,
    }
    assert len({row.id for launch in found.values() for row in launch.cases}) == 43
    assert plan.launches_of("toy", plan.plan(one(*rows), CPU), found) == cut


def test_a_case_of_two_workloads_runs_once():
    rows = one((case(), "small", 1), name="b") | one((case(), "small", 5), (case(seed=1), "small", 1), name="a")
    planned = plan.plan(rows, CPU)
    found = plan.launches(planned)
    assert [[c.id for c in launch.cases] for launch in found.values()] == [[case().id, case(seed=1).id]]
    assert plan.launches_of("b", planned, found) == plan.launches_of("a", planned, found) == ["a-cpu-tp1-loss"]
    assert len(planned) == 3 and all(row.runs for row in planned)


def test_a_case_short_in_one_workload_and_small_in_another_runs_once():
    rows = one((case(), "short", 1), name="b") | one((case(), "small", 5), name="a")
    assert [row.runs for row in plan.plan(rows, CPU)] == [True, True]
    assert sum(len(launch.cases) for launch in plan.launches(plan.plan(rows, CPU)).values()) == 1


def test_an_unaffordable_case_is_refused_in_both_workloads():
    rows = one((big(1), "short", 1), name="b") | one((big(1), "short", 5), name="a")
    assert reasons(plan.plan(rows, gpus(1), 0.001)) == {big(1).id: "budget"}
    assert not any(row.runs for row in plan.plan(rows, gpus(1), 0.001))


def test_the_plan_does_not_depend_on_the_order_of_rows():
    rows = [(case(seed=s), "small", float(s % 3)) for s in range(6)]
    first, second = (plan.plan(one(*r), CPU) for r in (rows, rows[::-1]))
    assert [r.row() for r in first] == [r.row() for r in second]
    assert list(plan.launches(first)) == list(plan.launches(second))


def test_estimates_grow_with_the_work_and_deadlines_lie_far_above():
    small, large = big(1), big(1, seed=1)
    large = large.model_copy(update={"steps": 4000})
    assert plan.seconds(large) > 50 * (plan.seconds(small) - plan.FIXED["cuda"])
    assert plan.seconds(case(steps=500)) > plan.seconds(case(steps=50)) > plan.FIXED["cpu"]
    for c in (small, large, case()):
        assert plan.deadline(c) >= 10 * plan.seconds(c)
    hours = plan.hours_by_workload(plan.plan(one((case(), "small", 1)), CPU))
    assert hours["toy"] == pytest.approx((plan.seconds(case()) + plan.START["cpu"]) / 3600)


def test_a_machine_with_gpus_still_runs_the_small_size_on_its_cpu():
    planned = plan.plan(one((case(), "small", 1)), replace(gpus(2), cpus=32))
    assert [row.runs for row in planned] == [True] and planned[0].expanded.case.device == "cpu"


def test_a_case_of_an_implementation_that_is_not_installed_is_a_row_with_a_reason(monkeypatch):
    monkeypatch.setattr(plan, "installed", lambda name: name == "triaxis")
    rows = plan.plan(load_all(), CPU)
    theirs = [row for row in rows if row.expanded.case.implementation == "transformers" and row.expanded.size == "small"]
    assert theirs and all(row.reason == "needs transformers (extra test)" for row in theirs)
    assert all(row.runs for row in rows if row.expanded.case.implementation == "triaxis" and row.expanded.size == "small")
