"""The gate of files: budgets, counts of calls, benchmark files, losses. Each planted fault is caught by its gate."""
from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from typer.testing import CliRunner

from kernels import sass
from kernels.launch import Launch
from kernels.registry import ENTRIES
from suite import cli
from suite.gate import budget, compare, losses, resources
from suite.gate.calls import calls
from suite.gate.finding import BETTER, CHANGED, FAULT, FINE, MISSING, NEW, REBASELINE, SKIPPED, WORSE, Finding, markdown, status

COMMITTED = budget.load()
ENTRIES_BY_NAME = {e.name: e for e in ENTRIES}


@triton.jit
def copied(x, y, n, BLOCK: tl.constexpr, TIMES: tl.constexpr, DOUBLE: tl.constexpr, STEP: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + place * STEP, mask=place < n)
    for _ in tl.static_range(TIMES):
        tl.store(y + place, value * 2.0, mask=place < n)
        tl.debug_barrier()
        value = tl.load(y + place, mask=place < n)
    if DOUBLE:
        value = (value.to(tl.float64) * 1.1).to(tl.float32)
    tl.store(y + place, value + 1.0, mask=place < n)


def made(block: int = 1024, times: int = 0, double: bool = False, step: int = 1) -> dict:
    x = torch.empty(1 << 20, device="meta")
    constants = {"BLOCK": block, "TIMES": times, "DOUBLE": double, "STEP": step}
    return resources.resources(Launch(copied, (1024,), {"x": x, "y": x, "n": 1 << 20}, constants), 90)


def verdict(old: dict, new: dict) -> Finding:
    [found] = budget.compare({"triton": "1", "sm_90": {"k": old}}, {"triton": "1", "sm_90": {"k": new}})
    return found


def test_a_compiled_kernel_is_read():
    plain = made()
    assert plain["traffic"] == 8.0 and plain["global"] == plain["wide"] == 4 and plain["double"] == plain["local"] == 0
    assert plain == made() and plain["occupancy"] == 64
    assert made(block=2048)["traffic"] == 8.0, "a larger block moves no more an element"


def test_each_fault_of_a_kernel_is_worse():
    plain = made()
    assert "traffic 8 -> 16" in verdict(plain, made(times=1)).text
    assert "double 0 ->" in verdict(plain, made(double=True)).text
    assert "wide 4 of 4" in verdict(plain, made(step=3)).text
    spilled = made(block=65536)  # 512 values a thread
    assert spilled["spills"] > 0 and spilled["local"] > 0
    found = verdict(plain, spilled)
    assert found.verdict == WORSE and "spills 0 ->" in found.text and "local 0 ->" in found.text
    for new in (made(times=1), made(double=True), made(step=3)):
        assert verdict(plain, new).verdict == WORSE
    assert verdict(plain, plain).verdict == FINE


@triton.jit
def parted(x, y, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    code = tl.maximum(tl.load(x + place).to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32), 1)
    tl.store(y + place, code.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32))


def test_a_conversion_that_takes_a_stale_register_is_a_fault():
    """Codes of one conversion, parted and joined again: seen on an H200 to give every second one what the register held before."""
    x = torch.empty(1 << 20, device="meta")
    for arch in (89, 90):
        found = resources.resources(Launch(parted, (2048,), {"x": x, "y": x}, {"BLOCK": 512}), arch)
        assert "conversions to 8 bits take a stale register" in found["fault"]
        assert verdict(found, found).verdict == FAULT and resources.merged([made(), found]) == found
        assert budget.compare({"triton": "1", "sm_90": {}}, {"triton": "1", "sm_90": {"k": found}})[0].verdict == FAULT
    own = ["F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R4, R5, R4, RZ", "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R6, R7, R6, R4"]
    assert sass.stale(own) == 0
    wrong = ["SHF.R.U32.HI R54, RZ, 0x8, R41", "FMNMX R41, R63, 448, PT",
             sass.bare("@!P1 F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C R41, R52, R41, R54 ")]
    assert sass.stale(wrong) == sass.stale([*wrong, *own]) == 1 and sass.stale([*wrong[:1], "MOV R54, R3", *wrong[1:]]) == 0


@pytest.mark.parametrize("name, change, word", [
    ("registers", lambda v: v * 1.2, WORSE), ("registers", lambda v: v + 1, CHANGED), ("occupancy", lambda v: v / 2, WORSE),
    ("shared", lambda v: v + 16, WORSE), ("instructions", lambda v: v * 1.5, WORSE), ("instructions", lambda v: v - 1, BETTER),
])
def test_a_budget_row(name, change, word):
    row = {**COMMITTED["sm_90"][ENTRIES[0].name]}
    assert verdict(row, row | {name: change(row[name])}).verdict == word


def test_the_budget_knows_every_entry():
    assert {place for place in COMMITTED if place != "triton"} == {"calls"} | {f"sm_{a}" for a in (80, 89, 90, 100, 120)}
    for place, rows in COMMITTED.items():
        assert place == "triton" or set(rows) == {e.name for e in ENTRIES}, place


def test_one_entry_is_what_the_budget_says():
    entry = min(ENTRIES, key=lambda e: e.traffic)
    assert COMMITTED["calls"][entry.name] == calls(entry)
    if COMMITTED["triton"] == budget.version():
        found = resources.merged([resources.resources(one, 90) for one in resources.launches(entry)])
        for place in (found, COMMITTED["sm_90"][entry.name]):
            assert {name for name, value in place.items() if type(value) is str} == {"code"}
        assert found | {"code": ""} == COMMITTED["sm_90"][entry.name] | {"code": ""}


SOURCE = """
from kernels import registry
from kernels.entry import Entry

ENTRIES = [e for e in registry.ENTRIES if e.name.startswith("cross_entropy.statistics/odd")][:1]
ENTRIES += [Entry("other", ENTRIES[0].function, ENTRIES[0].reference, ENTRIES[0].make, ENTRIES[0].launch, 1)]
"""


def test_equal_launches_compile_once_and_digests_need_steady_addresses(tmp_path, monkeypatch):
    (tmp_path / "two_entries.py").write_text(SOURCE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", ""), str(budget.ROOT)]))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    made = budget.collect("two_entries", workers=1, architectures=(100,))
    [first, second] = made["sm_100"].values()
    alone = resources.resources(resources.launches(ENTRIES_BY_NAME[min(made["calls"])])[0], 100)
    assert first == second == alone and len(list((tmp_path / "cache").rglob("*.cubin"))) == 1
    monkeypatch.setattr(budget, "_digests", False)
    assert budget._compiled(("two_entries", "other", 100, 0))[0]["code"] == ""
    made["sm_100"]["other"]["code"] = ""
    assert verdict(first, made["sm_100"]["other"]).verdict == FINE and verdict(made["sm_100"]["other"], first).verdict == FINE
    with pytest.raises(ValueError, match="at random"):
        budget.save(made, tmp_path / "budget.json")


def test_programs_start_at_the_same_addresses():
    """On a system that allows it; the assembler of sm_100 gives other code otherwise, once in a few starts."""
    code = ("import subprocess, sys; from kernels.sass import steady; from pathlib import Path; print(steady());"
            "[print(subprocess.run(['cat', '/proc/self/maps'], capture_output=True).stdout.split(b'-')[0]) for _ in range(3)]")
    done = subprocess.run([sys.executable, "-c", code], cwd=budget.ROOT, capture_output=True, text=True, check=True)
    allowed, *addresses = done.stdout.split()
    assert allowed == "False" or len(set(addresses)) == 1


def test_missing_renamed_new_and_another_triton():
    row = {"registers": 32, "spills": 0, "code": "abc", "wide": 1, "global": 1}
    old = {"triton": "1", "sm_90": {"a": row}}
    [gone, new] = budget.compare(old, {"triton": "1", "sm_90": {"b": row}})
    assert (gone.verdict, new.verdict) == (MISSING, NEW) and "b has the same code" in gone.text
    assert status([gone]) == 1 and status([new]) == 0
    [other] = budget.compare(old, {"triton": "2", "sm_90": {"a": row | {"spills": 64}}})
    assert other.verdict == REBASELINE and status([other]) == 3
    [gone] = budget.compare(old, {"triton": "1"})
    assert gone.verdict == MISSING, "a whole architecture"
    assert verdict(row, {"refused": "no such type"}).verdict == WORSE


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"triton": "1"}', '{"triton": "1", "sm_90": {}}',
                                  '{"triton": "1", "sm_90": {"a": {"registers": NaN}}}', '{"triton": "1", "sm_90": {"a": {}}}'])
def test_a_corrupt_budget_is_one_line(tmp_path, text):
    (tmp_path / "budget.json").write_text(text)
    with pytest.raises(ValueError, match=r"budget\.json"):
        budget.load(tmp_path / "budget.json")


def test_an_extra_pass_is_counted():
    entry = next(e for e in ENTRIES if "dz" in e.inputs("meta"))
    plain = calls(entry)

    def cast(**given):
        return entry.function(**given | {"dz": given["dz"].float().to(given["dz"].dtype)})

    def twice(**given):
        entry.function(**given)
        return entry.function(**given)

    row = {"triton": "1", "calls": {"k": plain}}
    for function, word in ((cast, "passes 0 ->"), (twice, "launches 1 -> 2")):
        [found] = budget.compare(row, {"triton": "1", "calls": {"k": calls(replace(entry, function=function))}})
        assert found.verdict == WORSE and word in found.text
    with pytest.raises(RuntimeError, match="launches no kernel"):
        calls(replace(entry, function=lambda **given: None))


def file(seconds: dict[str, float], **machine) -> dict:
    info = {"processor": "cpu", "gpu": ["H200"], "gpu_clocks": 1980, "driver": "1"} | machine
    return {"machine_info": info, "benchmarks": [
        {"fullname": name, "stats": {"median": value}, "extra_info": {"kernel": name}} for name, value in seconds.items()]}


def test_benchmark_files(tmp_path):
    def run(old, new, *options: str) -> tuple[int, str]:
        for name, value in (("old", old), ("new", new)):
            path = tmp_path / f"{name}.json"
            path.unlink(missing_ok=True)
            if value is not None:
                path.write_text(value if isinstance(value, str) else json.dumps(value))
        done = CliRunner().invoke(cli.app, ["gate", "compare", str(tmp_path / "old.json"), str(tmp_path / "new.json"), *options])
        return done.exit_code, done.output

    base = file({"a": 1.0, "b": 1.0})
    assert run(base, base)[0] == 0
    code, text = run(base, file({"a": 2.0, "b": 1.0}))
    assert code == 1 and "worse: a" in text and "worse: b" not in text
    assert run(base, file({"a": 1.07, "b": 1.0}))[0] == 1
    assert run(base, file({"a": 1.07, "b": 1.0}), "--tolerance", "a=0.1")[0] == 0, "per kernel"
    assert run(base, file({"a": 1.0, "b": 1.07}), "--tolerance", "a=0.1")[0] == 1
    code, text = run(base, file({"b": 1.0}))
    assert code == 1 and "missing: a" in text
    for key, value in (("gpu", ["A100"]), ("driver", "2"), ("gpu_clocks", 1)):
        code, text = run(base, file({"a": 9.0, "b": 1.0}, **{key: value}))
        assert code == 3 and "not comparable" in text
    code, text = run(None, base)
    assert code == 0 and "new: baseline: no old.json yet: new.json is accepted as the first" in text
    assert run(base, file({"a": float("nan"), "b": 1.0}))[0] == 1 and run(None, file({"a": 0.0}))[0] == 1
    for broken in ("", "{", "{}", '{"benchmarks": []}'):
        assert run(broken, base)[0] == 2 and run(base, broken)[0] == 2
    assert run(base, base, "--tolerance", "a")[0] == 2


def test_device_time_counts_where_there_is_one():
    old, new = file({"a": 1.0}), file({"a": 1.0})
    for side, value in ((old, 1e-3), (new, 2e-3)):
        side["benchmarks"][0]["extra_info"]["device_seconds"] = [value] * 3
    assert [one.verdict for one in compare.compare(old, new)] == [WORSE]


def test_losses_name_the_first_step_and_counts_the_collective():
    found = losses.first_difference("c", ["7.0", "6.5", "6.25"], ["7.0", "6.5000001", "6.0"])
    assert found.verdict == WORSE and "step 1 on: 6.5 -> 6.5000001" in found.text
    assert losses.first_difference("c", ["7.0"], ["7.0"]).verdict == FINE
    assert losses.first_difference("c", ["7.0"], ["nan"]).verdict == FAULT
    assert losses.first_difference("c", ["7.0", "6.0"], ["7.0"]).verdict == WORSE
    old = {"tp forward all_reduce bf16": [4, 10, 20, 20.0], "tp backward all_reduce bf16": [4, 10, 20, 20.0]}
    found = losses.changed_counts("c", old, old | {"tp forward all_reduce bf16": [5, 10, 20, 20.0]})
    assert found.verdict == WORSE and found.text.startswith("tp forward all_reduce bf16: calls 4")
    assert losses.changed_counts("c", old, {}).verdict == WORSE and losses.changed_counts("c", {}, old).verdict == WORSE


def test_losses_of_records(tmp_path):
    """A machine whose platform has no losses is told so; a case without a record fails."""
    from dataclasses import asdict

    from suite.record import Record, Traffic

    runs, reference = tmp_path / "runs", tmp_path / "reference"
    runs.mkdir()
    assert [one.verdict for one in losses.gate(runs, reference)] == [NEW]
    row = Traffic("tp", "forward", "all_reduce", "bf16", "bfloat16", "activations", 4, 10, 20, 20.0, "modelled")
    case, facts = {"measure": "loss", "device": "cpu"}, {"versions": {"torch": "2.13.0"}}
    one = Record("c", case, "ok", None, "k", "cpu2", facts, traffic=[row])
    (runs / "c.json").write_text(json.dumps(asdict(one)))
    (runs / "c.loss.csv").write_text("step,loss\n0,7.0\n1,6.5\n")
    losses.gate(runs, reference, update=True)
    assert [one.verdict for one in losses.gate(runs, reference)] == [FINE, FINE]
    (runs / "c.loss.csv").write_text("step,loss\n0,7.0\n1,6.6\n")
    assert [one.verdict for one in losses.gate(runs, reference)] == [FINE, WORSE]
    changed = copy.deepcopy(one)
    changed.provenance["versions"]["torch"] = "9.9.9"
    (runs / "c.json").write_text(json.dumps(asdict(changed)))
    assert [one.verdict for one in losses.gate(runs, reference)] == [FINE, SKIPPED]
    (runs / "c.json").unlink()
    assert [one.verdict for one in losses.gate(runs, reference)] == [MISSING]
    (reference / "counts.json").write_text("")
    with pytest.raises(ValueError, match=r"counts\.json"):
        losses.gate(runs, reference)


def test_the_kept_counts_are_those_of_known_cases():
    from suite import workload

    known = json.loads((losses.REFERENCE / "counts.json").read_text(encoding="utf-8"))
    cases = {row.id: row.case for one in workload.load_all().values() for row in one.rows}
    for case, rows in known.items():
        assert bool(rows) == (cases[case].mesh.ranks > 1), case
    for path in losses.REFERENCE.glob("*/*.txt"):
        assert path.stem in known and len(path.read_text().split()) == cases[path.stem].steps


def test_markdown_shows_failures_first():
    text = markdown("Title", [Finding("a", FINE), Finding("b", NEW, "x | y"), Finding("c", WORSE, "slow")])
    rows = [line for line in text.splitlines() if line.startswith("| ") and "`" in line]
    assert len(rows) == 2 and "`c`" in rows[0] and "x \\| y" in rows[1] and "1 ok, 1 new, 1 worse" in text
