"""Where ranks sit and which groups they form; wrong launches are one clear line."""
import itertools

import pytest
import torch
from ranks import RankError, run_ranks

from suite.comm.counter import Counter
from suite.comm.transport import Transport
from suite.mesh import Group, Mesh, MeshError


def places(mesh):
    return [(name, mesh.group(name).ranks, mesh.group(name).index) for name in ("tp", "dp", "pp", "world")]


def copies_and_sum(mesh):
    """Ranks of each set of copies, and the sum of ranks over them: the handle joins the ranks that it says."""
    found = []
    for n in (1, 2, 4):
        group = mesh.copies(n)
        total = Transport(group, Counter()).all_reduce(torch.tensor([float(mesh.rank)])).wait()
        found.append((group.ranks, group.index, float(total)))
    return found


def meshes_of_one_launch(mesh):
    """Two shapes in turn in one process: both sum over their own groups."""
    sums = []
    for dp, tp in ((2, 2), (1, 4), (2, 2)):
        m = Mesh.from_env(dp=dp, tp=tp, link="gloo")
        sums.append([float(Transport(m.group(g), Counter()).all_reduce(torch.tensor([10.0**m.rank])).wait()) for g in ("tp", "dp")])
    return sums


def wrong_size(mesh):
    Mesh.from_env(tp=3)


def fall(mesh):
    if mesh.rank == 1:
        raise KeyError("rank one")
    Transport(mesh.group("tp"), Counter()).all_reduce(torch.ones(1)).wait()


def pid(mesh):
    import os

    return os.getpid()


def sleep(mesh):
    import time

    time.sleep(60)


def test_tp_is_fastest_then_pp_then_dp():
    grid = list(itertools.product(range(2), range(3), range(4)))
    for rank, (d, p, t) in enumerate(grid):
        mesh = Mesh(2, 3, 4, rank)
        assert (mesh.dp_index, mesh.pp_index, mesh.tp_index) == (d, p, t)


def test_groups_of_dp2_tp2():
    found = run_ranks(places, 4, dp=2)
    assert found[1] == [("tp", (0, 1), 1), ("dp", (1, 3), 0), ("pp", (1,), 0), ("world", (0, 1, 2, 3), 1)]
    assert found[2] == [("tp", (2, 3), 0), ("dp", (0, 2), 1), ("pp", (2,), 0), ("world", (0, 1, 2, 3), 2)]


def test_copies_join_neighbours():
    found = run_ranks(copies_and_sum, 4)
    assert found[0] == [((0,), 0, 0.0), ((0, 1), 0, 1.0), ((0, 1, 2, 3), 0, 6.0)]
    assert found[3] == [((3,), 0, 3.0), ((2, 3), 1, 5.0), ((0, 1, 2, 3), 3, 6.0)]


def test_meshes_of_one_launch_share_groups():
    found = run_ranks(meshes_of_one_launch, 4)
    assert found[0] == [[11.0, 101.0], [1111.0, 1.0], [11.0, 101.0]]
    assert found[3] == [[1100.0, 1010.0], [1111.0, 1000.0], [1100.0, 1010.0]]


def test_one_process_needs_no_process_group(monkeypatch):
    for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(key, raising=False)
    mesh = Mesh.from_env()
    assert (mesh.backend, mesh.group("tp"), mesh.copies(1)) == ("none", Group(), Group())
    assert not torch.distributed.is_initialized()
    mesh.close()


def test_wrong_number_of_processes(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(MeshError, match="dp 1 x pp 1 x tp 4 needs 4 processes, 2 are running"):
        Mesh.from_env(tp=4)
    with pytest.raises(RankError, match="tp 3 needs 3 processes, 2 are running"):
        run_ranks(wrong_size, 2)


def test_no_gpu_and_no_gpu_of_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(MeshError, match="torch sees no GPU"):
        Mesh.from_env(device="cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(MeshError, match="local rank 1 has no GPU of its own"):
        Mesh.from_env(tp=2, device="cuda", link="p2p")


def test_copies_that_do_not_divide():
    with pytest.raises(MeshError, match="3 copies do not divide tp 4"):
        Mesh(tp=4).copies(3)


def test_harness_reports_a_fault_and_starts_anew():
    with pytest.raises(RankError, match=r"(?s)rank 1 of 2:.*KeyError: 'rank one'"):
        run_ranks(fall, 2)
    first = run_ranks(pid, 2)
    assert first == run_ranks(pid, 2)


def test_harness_kills_ranks_that_hang():
    before = run_ranks(pid, 2)
    with pytest.raises(RankError, match=r"did not come back within 0\.5 s"):
        run_ranks(sleep, 2, timeout=0.5)
    assert not set(before) & set(run_ranks(pid, 2))
