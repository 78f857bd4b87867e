"""Which way a byte codec's message goes: slices, chosen paths, peers' memory, unlike tensors."""
from __future__ import annotations

import time
from dataclasses import dataclass

import pytest
import torch
from ranks import run_ranks
from wires import SITE, mine, wire_on

from suite.comm import choice, direct
from suite.comm.bytewise import _cut
from suite.comm.choice import UNCOMPRESSED
from suite.comm.counter import Counter
from suite.comm.route import Route
from suite.comm.wire import WireError
from suite.mesh import Group
from suite.seams import load

N = 128 * 64 * 4 * 3 + 130  # several slices at 2 and 4 ranks, and a tail within a group


def sliced(mesh):
    found = {}
    exact = torch.tensor([1.0 + mesh.rank, 2.0])
    for algorithm in ("one-shot", "two-shot"):
        for mode in ("lean", "paper"):
            for depth in (1, 2, 4, 8):
                wire = wire_on(mesh, "taco", mode=mode, algorithm=algorithm, depth=depth)
                y, total = wire.run("all_reduce", mine(mesh, N), site=SITE, exact=exact)
                messages = {op: int(sums[0]) for op, sums in wire.counter.messages.items()}
                [row] = [r for r in wire.counter.snapshot() if r.codec == "taco"]
                found[algorithm, mode, depth] = y, total, messages, (row.calls, row.payload_bytes)
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("p", [2, 4])
def test_slices_change_no_number(p):
    everywhere = run_ranks(sliced, p)
    for (algorithm, mode, depth), (y, total, messages, row) in everywhere[0].items():
        whole, sum_, _, once = everywhere[0][algorithm, mode, 1]
        assert torch.equal(y, whole) and torch.equal(total, sum_)
        assert row[0] == 1 and 0 <= row[1] - once[1] <= 132 * p  # one call of the seam; a tail of its own is padded once more
        calls = depth if depth <= 2 else len(_cut(N, 64 * p * 128, depth)) - 1
        if algorithm == "one-shot":
            assert messages == {"all_gather": calls}
        else:  # between two ranks an exchange of rows is an all-gather of what each holds for the other
            assert messages == ({"all_gather": 2 * calls} if p == 2 else {"all_to_all": calls, "all_gather": calls})
        assert all(torch.equal(y, other[algorithm, mode, depth][0]) for other in everywhere)


def test_slices_cover_everything_once():
    for n, step, depth in ((1000, 64, 4), (64, 64, 8), (63, 64, 2), (1 << 20, 8192, 8)):
        ends = _cut(n, step, depth)
        assert ends[0] == 0 and ends[-1] == n and sorted(set(ends)) == ends and len(ends) <= depth + 1
        assert all(end % step == 0 for end in ends[:-1])


def chosen(mesh):
    wire = wire_on(mesh, "taco", min_bytes="auto")
    x = mine(mesh, 4096)
    y, _ = wire.run("all_reduce", x, site=SITE)
    seconds = dict(wire.choices.seconds)
    wire.run("all_reduce", x, site=SITE)
    rows = [(r.codec, r.calls, r.payload_bytes) for r in wire.counter.snapshot()]
    return wire.choices.rows(), rows, seconds == wire.choices.seconds, y, wire.nonfinite


@pytest.mark.ranks
def test_auto_takes_what_was_faster_and_counts_only_the_models_messages():
    (rows, counted, once, y, bad), (other, _, _, y_other, _) = run_ranks(chosen, 2)
    assert rows == other and once and bad == 0  # times too: the slowest rank's
    [row] = rows
    assert set(row["seconds"]) == {UNCOMPRESSED, "one-shot", "two-shot"} and all(s > 0 for s in row["seconds"].values())
    best = min(("one-shot", "two-shot"), key=row["seconds"].__getitem__)
    want = best if row["seconds"][best] * choice.MARGIN <= row["seconds"][UNCOMPRESSED] else UNCOMPRESSED
    assert row["path"] == want
    assert [c[:2] for c in counted] == [("bf16" if want == UNCOMPRESSED else "taco", 2)]
    assert torch.equal(y, y_other)


def slow(mesh):
    wire = wire_on(mesh, "taco", min_bytes="auto")
    codec, encode = wire.codecs["forward"], wire.codecs["forward"].encode
    codec.encode = lambda *arguments: (time.sleep(0.02), encode(*arguments))[1]
    wire.run("all_reduce", mine(mesh, 4096), site=SITE)
    gathered = wire.run("all_gather", mine(mesh, 4, 32), site=SITE)[0]
    plain = wire.transport.all_reduce
    del codec.encode
    wire.transport.all_reduce = lambda x, how="sum": (time.sleep(0.05 * (how == "sum")), plain(x, how))[1]
    wire.run("all_reduce", mine(mesh, 8192), site=SITE)
    return {(r["op"], r["elements"]): r["path"] for r in wire.choices.rows()}, gathered


@pytest.mark.ranks
def test_auto_avoids_a_slow_codec_and_a_slow_library():
    (paths, gathered), _ = run_ranks(slow, 2)
    assert paths["all_reduce", 4096] == UNCOMPRESSED and paths["all_gather", 128] == UNCOMPRESSED
    assert paths["all_reduce", 8192] in ("one-shot", "two-shot")
    assert gathered.shape == (8, 32)


def both_ways(mesh):
    """A slow codec forward, a fast one backward, of one size; then along another dimension."""
    wire = wire_on(mesh, "taco", min_bytes="auto")
    wire.codecs["backward"] = load("comm", "int8")(min_bytes="auto")
    codec, encode = wire.codecs["forward"], wire.codecs["forward"].encode
    codec.encode = lambda *arguments: (time.sleep(0.02), encode(*arguments))[1]
    for way in ("forward", "backward", "forward"):
        wire.run("all_reduce", mine(mesh, 4096), site=SITE, way=way)
    for dim in (0, 1, 0):
        wire.run("reduce_scatter", mine(mesh, 64, 64), dim=dim, site=SITE, way="backward")
    return [(r["op"], r["codec"], r["dim"]) for r in wire.choices.rows()]


@pytest.mark.ranks
def test_each_codec_and_dimension_is_timed_by_itself_and_once():
    rows, other = run_ranks(both_ways, 2)
    assert rows == other == [("all_reduce", "int8", 0), ("all_reduce", "taco", 0), ("reduce_scatter", "int8", 0),
                             ("reduce_scatter", "int8", 1)]


def unlike(mesh):
    found = []
    for other in (torch.bfloat16, torch.float32):
        x = mine(mesh, 256, dtype=other if mesh.rank else torch.float32)
        x = x if other == torch.bfloat16 or not mesh.rank else x[:128]
        try:
            wire_on(mesh, "int8").run("all_reduce", x, site=SITE)
        except WireError as error:
            found.append(str(error))
    return found


@pytest.mark.ranks
def test_ranks_with_unlike_tensors_are_told():
    first, second = run_ranks(unlike, 2)
    assert first == ["wire tp: (3, 'out'): all_reduce forward: this rank holds float32 x 256, rank 1 holds bfloat16 x 256",
                     "wire tp: (3, 'out'): all_reduce forward: this rank holds float32 x 256, rank 1 holds float32 x 128"]
    assert "this rank holds bfloat16 x 256, rank 0 holds float32 x 256" in second[0]


@pytest.mark.parametrize("options", [{"min_bytes": -1}, {"min_bytes": "some"}, {"algorithm": "three-shot"}, {"depth": 3}])
def test_routes_out_of_range(options):
    with pytest.raises(ValueError, match=f"comm: {next(iter(options))}"):
        Route(**options)


@dataclass
class Handle:
    calls: int = 0

    def barrier(self):
        self.calls += 1


def test_a_slot_is_written_again_only_behind_a_barrier():
    rooms = direct.Rooms(Group((0, 1)), Counter())
    rooms.slots[256] = [direct.Slot(torch.zeros(256, dtype=torch.uint8), Handle()) for _ in range(2)]
    rooms.barriers = 1
    first = rooms.take(1, 200, torch.device("cpu"))
    second = rooms.take(2, 100, torch.device("cpu"))
    assert first.slot is not second.slot and second.bytes.shape == (2, 100)
    assert second.bytes.data_ptr() == second.slot.whole.data_ptr()
    first.done()  # read behind barrier 1: others may still read until the next one
    assert not [s for s in rooms.slots[256] if s.free is not None and s.free < rooms.barriers]
    rooms.barriers += 1
    assert rooms.take(1, 256, torch.device("cpu")).slot is first.slot
    rooms.turns[64] = direct.Turn([direct.Slot(torch.zeros(64, dtype=torch.uint8), Handle()) for _ in range(2)], [])
    assert rooms.nbytes == 2 * 256 + 2 * 64


def test_without_gpus_of_their_own_ranks_read_no_peer():
    assert "NCCL" in direct.usable(Group(), torch.device("cpu"))
