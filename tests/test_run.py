"""The runner under attack: ranks that fail in every way, Ctrl-C, full disks, taken ports; locks; what ranks inherit."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import project
import pytest

from suite import events, link, locks
from suite.case import Case
from suite.rendezvous import Rendezvous, RendezvousError

NAMES = ("ok1", "nan1", "oom1", "bug1", "kill1", "exit1", "hang1", "ok2", "ok3")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    rows = [{"name": name} for name in NAMES] + [{"name": "okdata", "data": {"text": "missing.txt"}},
                                                {"name": "okpiece", "data": {"text": "missing.txt"}, "measure": "quantize"}]
    rows += [{"name": f"{name}-two", "mesh": {"tp": 2}} for name in ("ok", "kill", "slow")]
    rows += [{"name": "okgpu-two", "device": "cuda", "compile": False, "mesh": {"tp": 2}}]
    rows += [{"name": "oktimed", "device": "cuda", "compile": False, "measure": "speed"}]
    rows += [{"name": "slow1"}, {"name": "slowt1", "measure": "speed"}, {"name": "slowt2", "measure": "speed"}]
    rows += [{"name": f"slowgpu{i}", "device": "cuda", "compile": False, "seed": i} for i in range(2)]
    return project.build(tmp_path, {"toy": rows})


def leftovers(copy: Path) -> list[str]:
    """Temporary files of records, launch files and folders of cases."""
    results = copy / "results"
    return [str(p) for p in [*results.glob("runs/*/.*"), *results.glob(".work/*/*")]]


def test_each_failure_costs_one_case_and_one_line(copy):
    status, out = project.launch(copy, *NAMES, TRIAXIS_DEADLINE="4")
    assert status == 0, out
    found = {name: project.record(copy, name) for name in NAMES}
    assert {name: one["reason"] for name, one in found.items()} == {
        "ok1": None,
        "nan1": "loss is nan at step 17",
        "oom1": "oom",
        "bug1": "KeyError: 'what'",
        "kill1": "rank 0 died with signal 9",
        "exit1": "rank 0 exited with status 5",
        "hang1": "deadline: no end after 4 s",
        "ok2": None,
        "ok3": None,
    }
    assert [one["status"] for one in found.values()] == ["ok", *["failed"] * 6, "ok", "ok"]
    assert project.ran(copy) == ["ok1", "ok2", "ok3"]
    assert not [m for one in found.values() if one["status"] == "failed" for m in one["metrics"]]
    assert (copy / "results/runs/cpu2/ok1.loss.csv").read_text().splitlines()[:2] == [
        "step,loss,lr,grad_norm,tokens",
        "0,3.0,0.1,1.0,8",
    ]
    assert not project.processes(copy) and not leftovers(copy)
    stamp = json.loads((copy / "results/launches/toy-launch.json").read_text())
    assert [row["status"] for row in stamp["cases"]] == [one["status"] for one in found.values()]

    status, out = project.launch(copy, *NAMES)
    assert status == 0 and "0 of 9 cases to run, 9 kept" in out and not project.ran(copy)
    with (copy / "suite" / "train.py").open("a") as file:
        file.write("\nx = 1\n")
    project.launch(copy, "ok1", "ok2")
    assert project.ran(copy) == ["ok1", "ok2"]
    project.launch(copy, "ok1", TRIAXIS_FORCE="1")
    assert project.ran(copy) == ["ok1"]


def test_a_killed_rank_of_two_fails_its_case_only(copy):
    status, out = project.launch(copy, "kill-two", "ok-two", NCCL_NVLS_ENABLE="0", TORCH_FOO="bar", NVSHMEM_DISABLE_CUDA_VMM="1")
    assert status == 0, out
    assert project.record(copy, "kill-two")["reason"] == "rank 1 died with signal 9"
    facts = project.record(copy, "ok-two")["provenance"]
    inherited = {"NCCL_NVLS_ENABLE": "0", "TORCH_FOO": "bar", "NVSHMEM_DISABLE_CUDA_VMM": "1", "OMP_NUM_THREADS": "1"}
    assert inherited.items() <= facts["environment"].items() and facts["threads"] == 1
    assert not project.processes(copy) and not leftovers(copy)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_runner_leaves_no_rank_no_lock_and_no_part_of_a_record(copy, how):
    case = "slow-two" if how == signal.SIGINT else "slow1"
    before = ["ok1"] if case == "slow1" else []
    process = project.start(copy, "suite.cli", "launch", "toy", "--stamp", "results/s.json", *before, case, FAKE_STEPS="500")
    log = copy / "results/logs/cpu2/toy.log"
    rank = "rank 1 runs" if case == "slow-two" else "rank 0 runs slow1"
    project.until(lambda: log.exists() and rank in log.read_text(), 60)
    os.kill(process.pid, how)
    out, _ = process.communicate(timeout=30)
    project.until(lambda: not project.processes(copy), 10)
    if how != signal.SIGKILL:
        assert process.returncode == 130 and out.strip().endswith("interrupted: ranks are gone, finished records are kept")
        assert "Traceback" not in out
    assert not list(copy.glob(f"results/runs/*/*{case}*")) and not (copy / "results/s.json").exists()
    with locks.hold(copy / "results" / ".locks", exclusive=True, waiting=lambda what: pytest.fail(f"still locked: {what}")):
        pass
    assert case == "slow-two" or project.record(copy, "ok1")["status"] == "ok"


def test_a_full_disk_is_one_line_and_leaves_nothing_partial(copy):
    with (copy / "suite" / "record.py").open("a") as file:
        file.write("\n\ndef _full(_):\n    raise OSError(28, 'No space left on device')\n\n\nos.fsync = _full\n")
    for case in ("ok1", "nan1"):  # published by the rank, by the runner
        status, out = project.launch(copy, case)
        assert status == 2 and "No space left on device" in out.splitlines()[-1] and "Traceback" not in out, out
        assert not list(copy.glob("results/runs/*/*.json")) and not list(copy.glob("results/runs/*/.*"))
        assert not (copy / "results/launches/toy-launch.json").exists()


def test_a_file_limit_stops_the_record_not_the_line(copy):
    """The same from the operating system: no file may grow beyond 2 KiB, so neither may the temporary one of a record."""
    program = (
        "import resource, runpy, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))\n"
        "sys.argv = ['triaxis', 'launch', 'toy', '--stamp', 'results/s.json', 'ok1']\n"
        "runpy.run_module('suite.cli', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=copy,
        env=project.environment(copy, TORCH_LONG="x" * 4096),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=60,
    )
    assert done.returncode == 2 and "ok1.json: cannot be written: File too large" in done.stdout.splitlines()[-1], done.stdout
    assert not list(copy.glob("results/runs/*/*.json")) and not list(copy.glob("results/runs/*/.*"))


def test_a_taken_port_and_ranks_that_cannot_join_fail_with_the_reason(copy):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        status, out = project.launch(copy, "ok-two", MASTER_PORT=port)
        assert status == 0 and project.record(copy, "ok-two")["reason"] == f"MASTER_PORT: port {port} is taken; choose another", out
    status, out = project.launch(copy, "ok1", "ok2", FAKE_JOIN="Address already in use")
    assert status == 0
    assert {project.record(copy, name)["reason"] for name in ("ok1", "ok2")} == {"port taken: RuntimeError: Address already in use"}


def test_data_that_cannot_be_prepared_fail_only_their_cases(copy):
    status, _ = project.launch(copy, "okdata", "ok1")
    assert status == 0 and project.record(copy, "okdata")["reason"] == "data: missing.txt: no such file"
    assert project.record(copy, "ok1")["status"] == "ok"
    status, _ = project.launch(copy, "okpiece")
    assert status == 0 and project.record(copy, "okpiece")["status"] == "ok", "what makes its own tensors asks for no text"


def test_a_gpu_case_over_two_machines_with_a_gpu_each(copy):
    with socket.socket() as free:
        free.bind(("", 0))
        port = str(free.getsockname()[1])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "NNODES": "2", "FAKE_GPUS": "1"}
    each = [{**common, "NODE_RANK": str(i), "TRIAXIS_RESULTS": str(copy / f"results{i}")} for i in range(2)]
    nodes = [project.start(copy, "suite.cli", "run", "okgpu-two", **variables) for variables in each]
    outs = [node.communicate(timeout=90)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outs
    found = json.loads((copy / "results0/runs/h200x1-x2/okgpu-two.json").read_text())
    assert (found["status"], found["machine"]) == ("ok", "h200x1-x2")
    assert found["provenance"]["environment"]["CUDA_VISIBLE_DEVICES"] == "GPU-0"
    assert not list(copy.glob("results?/.work/*/*"))
    assert not list(copy.glob("results1/runs/*/*.json")) and "the machine of rank 0 holds the record" in outs[1]
    assert "okgpu-two on h200x1-x2: ok" in project.call(copy, "suite.cli", "show", "okgpu-two", **each[0])[1]
    for case, variables, line in (
        ("okgpu-two", {"FAKE_GPUS": "1"}, "error: needs 2 GPUs, has 1"),
        ("ok1", each[0], "error: NNODES: 1 ranks do not divide over 2 machines"),
    ):
        status, out = project.call(copy, "suite.cli", "run", case, **variables)
        assert (status, out.splitlines()[-1]) == (2, line)


@pytest.mark.parametrize(
    ("row", "one", "two"),
    [
        ({"device": "cuda"}, 4, 2),
        ({"device": "cuda", "link": "gloo"}, 1, 1),
        ({"device": "cpu"}, 0, 0),
    ],
)
def test_gpus_that_a_case_needs_on_each_machine(row, one, two):
    case = Case.model_validate({"model": "gpt-tiny", "mesh": {"tp": 4}, **row})
    assert (Rendezvous().gpus(case), Rendezvous(nodes=2).gpus(case)) == (one, two)
    with pytest.raises(RendezvousError, match="4 ranks do not divide over 3"):
        Rendezvous(nodes=3).gpus(case)


def test_a_timed_run_sees_only_the_gpus_of_its_case(copy):
    status, out = project.launch(copy, "oktimed", FAKE_GPUS="2")
    assert status == 0, out
    assert project.record(copy, "oktimed", "h200x2")["provenance"]["environment"]["CUDA_VISIBLE_DEVICES"] == "GPU-0"


def test_machines_that_share_a_folder_hold_locks_of_their_own(tmp_path, monkeypatch):
    waited: list[str] = []
    with locks.hold(tmp_path, True):
        monkeypatch.setattr(locks, "_host", lambda: "another")
        with locks.hold(tmp_path, True, waiting=waited.append):
            assert not waited


def windows(copy: Path, machine: str, *cases: str) -> list[tuple[str, str]]:
    facts = [project.record(copy, case, machine)["provenance"] for case in cases]
    return sorted((one["started"], one["ended"]) for one in facts)


def test_two_processes_never_measure_at_once_and_loss_runs_take_a_gpu_each(copy):
    both = [
        project.start(copy, "suite.cli", "launch", f"t{i}", "--stamp", f"results/{i}.json", f"slowt{i}", FAKE_STEPS="4")
        for i in (1, 2)
    ]
    outs = [one.communicate(timeout=60)[0] for one in both]
    first, second = windows(copy, "cpu2", "slowt1", "slowt2")
    assert first[1] <= second[0], (first, second)
    assert sum("waiting for the machine" in out for out in outs) == 1

    both = [
        project.start(
            copy, "suite.cli", "launch", f"g{i}", "--stamp", f"results/g{i}.json", f"slowgpu{i}", FAKE_GPUS="2", FAKE_STEPS="40"
        )
        for i in range(2)
    ]
    outs = [one.communicate(timeout=60)[0] for one in both]
    used = {project.record(copy, f"slowgpu{i}", "h200x2")["provenance"]["environment"]["CUDA_VISIBLE_DEVICES"] for i in range(2)}
    assert used == {"GPU-0", "GPU-1"}, outs
    first, second = windows(copy, "h200x2", "slowgpu0", "slowgpu1")
    assert second[0] < first[1]


def test_shared_holders_keep_an_exclusive_one_out_and_a_killed_one_frees_everything(tmp_path):
    program = (
        "import sys, time; from pathlib import Path; from suite import locks\n"
        "with locks.hold(Path(sys.argv[1]), False, ['a', 'b'], 1) as mine:\n    print(*mine, flush=True)\n    time.sleep(60)"
    )
    holders = [
        subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], cwd=project.ROOT, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert {one.stdout.readline().strip() for one in holders} == {"a", "b"}
    waited: list[str] = []

    def kill(what: str) -> None:
        waited.append(what)
        for one in holders:
            one.kill()

    began = time.monotonic()
    with locks.hold(tmp_path, True, ["a", "b"], 2, waiting=kill) as mine:
        assert mine == ("a", "b")
    assert waited == ["the machine (a run is being measured)"] and time.monotonic() - began < 5
    for one in holders:
        one.wait()
        one.stdout.close()
    with pytest.raises(ValueError, match="needs 3 GPUs, has 2"), locks.hold(tmp_path, False, ["a", "b"], 3):
        pass


@pytest.mark.parametrize(
    ("name", "added"),
    [
        ("none", {}),
        ("p2p", {}),
        ("gloo", {}),
        ("shm", {"NCCL_P2P_DISABLE": "1"}),
        ("p2p-nvls", {"NCCL_NVLS_ENABLE": "1"}),
        ("socket", {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}),
    ],
)
def test_a_link_only_adds_variables(name, added):
    inherited = {
        "NCCL_DEBUG": "WARN",
        "NCCL_CUMEM_ENABLE": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "NVSHMEM_DISABLE_NVLS": "1",
        "HOME": "/h",
    }
    made = link.environment(name, inherited, threads=3)
    assert inherited.items() <= made.items()
    extra = {key: value for key, value in made.items() if key not in inherited}
    assert extra == {**added, "OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "3", "PYTHONUNBUFFERED": "1"}


@pytest.mark.parametrize(
    ("name", "variable", "value"),
    [
        ("shm", "NCCL_P2P_DISABLE", "0"),
        ("p2p", "NCCL_P2P_DISABLE", "1"),
        ("p2p-nvls", "NCCL_NVLS_ENABLE", "0"),
        ("shm", "NCCL_SHM_DISABLE", "1"),
    ],
)
def test_a_variable_that_contradicts_the_link_is_refused(name, variable, value):
    with pytest.raises(link.LinkError, match=f"{name}.*{variable}"):
        link.environment(name, {variable: value}, 1)


@pytest.mark.parametrize(
    ("variables", "wrong"),
    [({"MASTER_PORT": "http"}, "MASTER_PORT"), ({"NNODES": "0"}, "NNODES"), ({"NNODES": "2", "NODE_RANK": "2"}, "NODE_RANK")],
)
def test_wrong_rendezvous_variables_are_named(variables, wrong):
    with pytest.raises(RendezvousError, match=wrong):
        Rendezvous.of(variables)


def test_rendezvous_command_lines():
    worker = ["python", "-m", "suite.rank", "x"]
    assert Rendezvous.of({}).command(1, worker) == worker
    assert Rendezvous.of({}).command(4, worker)[1:] == [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=4",
        "--standalone",
        *worker[1:],
    ]
    there = Rendezvous.of({"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234", "NNODES": "2", "NODE_RANK": "1"})
    assert {"--nproc-per-node=2", "--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.1", "--master-port=1234"} <= set(
        there.command(4, worker)
    )
    with pytest.raises(RendezvousError, match="3 ranks do not divide over 2"):
        there.command(3, worker)


@pytest.mark.parametrize(
    ("error", "reason", "echo"),
    [
        (MemoryError(), "oom", False),
        (RuntimeError("HIP out of memory. Tried"), "oom", False),
        (
            RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1"),
            "RuntimeError: [gloo] Connection closed by peer [127.0.0.1]:1",
            True,
        ),
        (ValueError("line one\nline two"), "ValueError: line one", False),
        (KeyError(), "KeyError", False),
    ],
)
def test_reasons_are_one_line_and_echoes_are_known(error, reason, echo):
    assert events.reason_of(error) == (reason, echo)


def test_events_travel_in_the_text_of_the_ranks(capfd):
    print("no newline", end="", file=sys.stderr, flush=True)
    events.emit("done", id="x", seconds=1.0)
    events.Progress(speaks=False)(1, 2)
    lines = capfd.readouterr().err.split("\n")  # splitlines would also cut at the mark
    found = [event for line in lines if (event := events.parse(line))]
    assert found == [{"event": "done", "id": "x", "seconds": 1.0}] and lines[0] == "no newline"
    assert events.parse("text \x1e{broken") is None
