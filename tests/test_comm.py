"""The comm seam over several processes: sums, bits, bytes, and an audit of everything that crossed."""
import pytest
import torch
import torch.distributed as dist
from ranks import RankError, run_ranks
from torch.utils.checkpoint import checkpoint
from wires import NATIVE, SITE, alone, build, error, everyones, mine, wire_on

from suite.comm.audit import Audit, AuditError
from suite.comm.counter import Counter, difference, total
from suite.comm.meet import meet
from suite.comm.transport import Transport
from suite.comm.wire import Wire, WireError, wire_of
from suite.mesh import Group, Mesh
from suite.record import Traffic
from suite.seams import Key


def native_ops(mesh, codec):
    wire = wire_on(mesh, codec)
    tolerance = {"bf16": 1e-2, "fp32": 1e-6, "fp64": 1e-14}[codec]
    p, xs = mesh.size, everyones(mesh, 4, 6, 8, dtype=torch.float64)
    full = torch.stack(xs).sum(0)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        x = xs[mesh.rank].to(dtype)
        bound = max(tolerance, {torch.bfloat16: 1e-2, torch.float32: 1e-6}.get(dtype, 0))
        y, none = wire.run("all_reduce", x)
        assert none is None and y.dtype == dtype and y.shape == x.shape and error(y, full) < bound
        assert torch.equal(x, xs[mesh.rank].to(dtype)), "the input was changed"
        for dim in (0, 2, -1):
            part, _ = wire.run("reduce_scatter", x, dim=dim)
            assert part.dtype == dtype and error(part, full.chunk(p, dim)[mesh.rank]) < bound
            whole, _ = wire.run("all_gather", x, dim=dim)
            assert error(whole, torch.cat(xs, dim)) < bound
            torch.testing.assert_close(wire.run("all_gather", x.transpose(0, 1), dim=dim)[0],
                                       torch.cat([v.transpose(0, 1) for v in xs], dim).to(dtype), rtol=bound, atol=0)
    peak, _ = wire.run("max", xs[mesh.rank])
    assert torch.equal(peak, torch.stack(xs).amax(0)), "a maximum passed a codec"
    ints, _ = wire.run("all_reduce", torch.tensor([2**40 + mesh.rank]))
    assert int(ints) == p * 2**40 + p * (p - 1) // 2, "integers passed a codec"
    return mesh.rank


def byte_ops(mesh, codec, algorithm, n):
    """Against the codec applied by hand to every rank's tensor; returns bits for comparison between ranks."""
    wire = wire_on(mesh, codec, algorithm=algorithm, group=16)
    c, p = build(codec, group=16), mesh.size
    xs = everyones(mesh, p * n, seed=n)
    x = xs[mesh.rank]

    def q(v):
        return through(c, v)

    def ordered(rows):
        out = rows[0].clone()
        for row in rows[1:]:
            out += row
        return out

    if algorithm == "one-shot":
        expected = ordered([q(v) for v in xs])
    else:
        width = -(-n // 16) * 16  # chunks are whole groups of the tensor
        padded = [torch.nn.functional.pad(v, (0, p * width - p * n)).view(p, width) for v in xs]
        expected = torch.cat([q(ordered([q(v[k]) for v in padded])) for k in range(p)])[: p * n]
    y, _ = wire.run("all_reduce", x)
    assert torch.equal(y, expected)
    assert torch.equal(wire.run("all_reduce", x)[0], y)
    part, _ = wire.run("reduce_scatter", x.view(p, n), dim=0)
    assert torch.equal(part[0], ordered([q(v.view(p, n)[mesh.rank]) for v in xs]))
    columns, _ = wire.run("reduce_scatter", x.view(p, n).t().contiguous(), dim=-1)
    assert torch.equal(columns, part.t())
    for dim in (0, 1):
        whole, _ = wire.run("all_gather", x.view(p, n), dim=dim)
        assert torch.equal(whole, torch.cat([q(v).view(p, n) for v in xs], dim))
    return y


def through(c, x):
    buffer, out = torch.empty(c.nbytes(x.numel()), dtype=torch.uint8), torch.empty_like(x)
    c.encode(x, buffer, Key())
    c.decode(buffer, out)
    return out


def two_shot_error(mesh):
    xs = everyones(mesh, 1 << 16)
    y, _ = wire_on(mesh, "fp8", algorithm="two-shot").run("all_reduce", xs[mesh.rank])
    return error(y, torch.stack(xs).sum(0)), y


def statistics(mesh, codec, algorithm, op):
    """An exact statistic beside a coarse tensor: float32 exact to the bit between ranks, float64 kept."""
    options = {} if codec in NATIVE else {"algorithm": algorithm}
    wire = wire_on(mesh, codec, **options)
    found = []
    for shape, dtype in (((5, 1), torch.float32), ((3, 7), torch.float64), ((2,), torch.bfloat16), ((1,), torch.float32)):
        x, s = mine(mesh, 8, 33 * mesh.size), mine(mesh, *shape, dtype=dtype, seed=1)
        expected = torch.stack([v.double() for v in everyones(mesh, *shape, dtype=dtype, seed=1)]).sum(0)
        _, got = wire.run(op, x, dim=1, exact=s)
        assert got.dtype == torch.promote_types(dtype, torch.float32) and got.shape == s.shape
        assert float((got.double() - expected).abs().max()) < (1e-14 if dtype == torch.float64 else 1e-5)
        found.append(got)
    return found


def bad_values(mesh, codec):
    wire = wire_on(mesh, codec)
    found = []
    for op in ("all_reduce", "reduce_scatter", "all_gather"):
        for size in (512, 1 << 17):
            x = torch.ones(size)
            if mesh.rank == 1:
                x[5] = torch.inf if op == "all_reduce" else torch.nan
            y, _ = wire.run(op, x)
            found.append(int((~torch.isfinite(y)).sum()))
    return found, wire.nonfinite


def asynchronous(mesh, codec):
    wire = wire_on(mesh, codec)
    xs = [mine(mesh, 64, 1024, seed=s) for s in range(3)]
    s = mine(mesh, 64, 1, seed=9)
    now = [wire.run(op, x, exact=s) for op, x in zip(("all_reduce", "reduce_scatter", "all_gather"), xs)]
    later = [wire.start(op, x, exact=s) for op, x in zip(("all_reduce", "reduce_scatter", "all_gather"), xs)]
    for (y, t), pending in zip(now, later):
        z, u = pending.wait()
        assert torch.equal(y, z) and torch.equal(t, u) and pending.wait()[0] is z
    return mesh.rank


PAIRS = [("none", "all_reduce"), ("all_reduce", "none"), ("all_gather", "reduce_scatter"), ("reduce_scatter", "all_gather"),
         ("all_reduce", "all_reduce")]


def audited(mesh, codec, algorithm):
    """Every pair of ops, statistic or not, forward and backward, checkpointed too: all seen, all counted."""
    wire = wire_on(mesh, codec, **({} if codec in NATIVE else {"algorithm": algorithm, "group": 16}))
    with Audit(wire.counter) as audit:
        for forward, backward in PAIRS:
            for exact in (None, mine(mesh, 6, 1).requires_grad_()):
                def segment(x, e, forward=forward, backward=backward):
                    y, s = meet(wire, x, forward=forward, backward=backward, exact=e, site=SITE)
                    return y.sin().sum() + (0 if s is None else s.sum())

                x = mine(mesh, 4 * mesh.size, 10).requires_grad_()
                segment(x, exact).backward()
                checkpoint(segment, x, exact, use_reentrant=False).backward()
        wire.run("max", torch.ones(3), purpose="loss")
        wire.run("all_reduce", torch.ones(3), purpose="loss")
        wire.run("all_reduce", torch.ones(3), way="step", purpose="gradients")
        wire.barrier()
    audit.check()
    return {op: sums[0] for op, sums in wire.counter.messages.items()}


def smuggled(mesh):
    wire = wire_on(mesh)
    with Audit(wire.counter) as audit:
        wire.run("all_reduce", torch.ones(4))
        dist.all_reduce(torch.ones(4))
    audit.check()


def lying_row(mesh):
    wire = wire_on(mesh)
    with Audit(wire.counter) as audit:
        wire.run("all_reduce", torch.ones(4))
        wire.counter.add(group="tp", way="forward", op="all_reduce", codec="fp32", dtype="float32", purpose="activations",
                         kind="modelled", elements=1, payload_bytes=4, wire_bytes=4.0)
    audit.check()


def traffic(mesh, codec, n, options):
    wire = wire_on(mesh, codec, **options)
    wire.run("all_reduce", mine(mesh, n), exact=torch.ones(8))
    before = wire.counter.snapshot()
    for op in ("reduce_scatter", "all_gather"):
        wire.run(op, mine(mesh, n), way="backward")
    return before, difference(wire.counter.snapshot(), before)


def dp_gradients(mesh):
    """Gradients over dp pass that wire's backward codec; over tp, and everything else of a step, nothing."""
    dp, tp = wire_on(mesh, "int8", "fp8", name="dp"), wire_on(mesh, "int8", "fp8", name="tp")
    x = mine(mesh, 64).bfloat16()
    for wire in (dp, tp):
        for purpose in ("gradients", "norm"):
            wire.run("all_reduce", x, way="step", purpose=purpose)
    return [(r.group, r.purpose, r.codec, r.dtype) for w in (dp, tp) for r in w.counter.snapshot()]


def on_a_shared_gpu(mesh, codec):
    """Ranks that share a GPU over gloo give what the same ranks give on the CPU."""
    shared = Mesh.from_env(tp=mesh.size, device="cuda", link="gloo")
    here, there = wire_on(mesh, codec), wire_on(shared, codec)
    x, s = mine(mesh, 64, 256), mine(mesh, 64, 1, seed=1)
    for op in ("all_reduce", "reduce_scatter", "all_gather", "max"):
        (y, t), (z, u) = here.run(op, x, exact=s), there.run(op, x.to(shared.device), exact=s.to(shared.device))
        assert z.device.type == u.device.type == "cuda"
        assert error(z.cpu(), y) < 1e-3 and error(u.cpu(), t) < 1e-6
    assert here.counter.snapshot() == there.counter.snapshot()
    return mesh.rank


def undivided(mesh):
    wire_on(mesh).run("reduce_scatter", torch.ones(5, 3), dim=0, site=SITE)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("codec", NATIVE)
def test_native_ops(codec, size):
    assert run_ranks(native_ops, size, codec) == [*range(size)], "every rank came to the end of its checks"


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("algorithm", ["one-shot", "two-shot"])
@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_byte_ops_equal_the_codec_by_hand_and_all_ranks_agree(codec, algorithm, size):
    for n in (1, 16, 37):
        found = run_ranks(byte_ops, size, codec, algorithm, n)
        assert all(torch.equal(found[0], y) for y in found[1:])


@pytest.mark.parametrize("size", [2, 4])
def test_two_shot_fp8_error(size):
    found = run_ranks(two_shot_error, size)
    assert all(e == pytest.approx(0.036, abs=0.003) for e, _ in found)
    assert all(torch.equal(found[0][1], y) for _, y in found[1:])


@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter", "all_gather", "none", "max"])
@pytest.mark.parametrize("codec,algorithm", [("bf16", ""), ("int8", "one-shot"), ("fp8", "two-shot")])
def test_statistics_are_exact_and_equal_on_all_ranks(codec, algorithm, op):
    found = run_ranks(statistics, 4, codec, algorithm, op)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other))


@pytest.mark.parametrize("codec", ["bf16", "int8", "fp8"])
def test_nonfinite_values_reach_the_output(codec):
    width = 1 if codec == "bf16" else 128
    # all_reduce (one-shot at 2 ranks), reduce_scatter: only the first part holds it; all_gather
    found = run_ranks(bad_values, 2, codec)
    assert found[0][0] == [width] * 6
    assert found[1][0] == [width, width, 0, 0, width, width]
    assert [count for _, count in found] == ([0, 0] if codec == "bf16" else [0, 6])
    if codec == "fp8":  # two-shot at 4 ranks: the owner of the chunk encodes the bad sum again
        found = run_ranks(bad_values, 4, codec)
        assert all(counts[:2] == [128, 128] for counts, _ in found)


@pytest.mark.parametrize("codec", ["bf16", "fp8"])
def test_started_equals_run(codec):
    assert run_ranks(asynchronous, 4, codec) == [*range(4)]


@pytest.mark.parametrize("codec,algorithm", [("bf16", ""), ("fp32", ""), ("fp64", ""), ("int8", "one-shot"), ("int8", "two-shot"),
                                             ("fp8", "auto")])
@pytest.mark.parametrize("size", [2, 4])
def test_every_collective_is_counted(codec, algorithm, size):
    found = run_ranks(audited, size, codec, algorithm)
    assert found[0]["barrier"] == 1 and sum(found[0].values()) > 30


def test_audit_finds_what_passed_no_wire():
    with pytest.raises(RankError, match="AuditError: audit: all_reduce: 2 calls with 32 bytes seen, 1 with 16 counted"):
        run_ranks(smuggled, 2)
    with pytest.raises(RankError, match="AuditError: audit: rows claim 20 bytes"):
        run_ranks(lying_row, 2)
    assert issubclass(AuditError, AssertionError)


@pytest.mark.parametrize("codec,size,n,options,payload,sent", [
    ("bf16", 2, 1024, {}, 2048, 2048), ("bf16", 4, 1024, {}, 2048, 2048 * 1.5), ("fp32", 4, 1024, {}, 4096, 4096 * 1.5),
    ("fp8", 2, 1024, {}, 1056, 1056), ("fp8", 4, 1024, {}, 1056, 3 * 1056),
    ("int8", 4, 1024, {"algorithm": "two-shot"}, 1056, 1056 * 1.5),
    ("fp8", 4, 65536, {}, 67584, 67584 * 1.5), ("int8", 4, 65536, {"group": 64}, 69632, 69632 * 1.5),
    ("fp8", 2, 1024, {"min_bytes": 2049}, 2048, 2048),
])
def test_bytes_of_a_message(codec, size, n, options, payload, sent):
    before, after = run_ranks(traffic, size, codec, n, options)[0]
    crossed = "bf16" if options.get("min_bytes") else codec
    ours = crossed not in NATIVE
    kind, width = ("counted", "uint8") if ours else ("modelled", str(NATIVE[crossed]).removeprefix("torch."))
    main = next(r for r in before if r.purpose == "activations")
    assert main == Traffic("tp", "forward", "all_reduce", crossed, width, "activations", 1, n, payload, sent, kind)
    statistic = next(r for r in before if r.purpose == "statistic")
    assert (statistic.calls, statistic.elements, statistic.dtype, statistic.codec) == (0 if ours else 1, 8, "float32", "exact")
    one_shot = ours and sent == (size - 1) * payload
    assert (statistic.payload_bytes, statistic.wire_bytes) == (32, 32 * (size - 1 if one_shot else 2 * (size - 1) / size))
    scatter, gather = (next(r for r in after if r.op == op) for op in ("reduce_scatter", "all_gather"))
    assert (scatter.way, scatter.elements, scatter.wire_bytes) == ("backward", n, (size - 1) / size * scatter.payload_bytes)
    assert (gather.calls, gather.elements, gather.payload_bytes) == (1, size * n, size * payload)
    assert gather.wire_bytes == (size - 1) * payload


def test_which_codec_a_message_passes():
    found = run_ranks(dp_gradients, 4, dp=2)[0]
    assert set(found) == {("dp", "gradients", "fp8", "uint8"), ("dp", "norm", "exact", "float32"),
                          ("tp", "gradients", "exact", "float32"), ("tp", "norm", "exact", "float32")}


@pytest.mark.gpu
@pytest.mark.parametrize("codec", ["bf16", "fp32", "int8", "fp8"])
def test_ranks_that_share_a_gpu(codec):
    assert run_ranks(on_a_shared_gpu, 4, codec, timeout=240) == [*range(4)]


def test_a_dimension_that_does_not_divide():
    message = r"WireError: wire tp: \(3, 'out'\): reduce_scatter: dimension 0 of \(5, 3\) does not divide by 2"
    with pytest.raises(RankError, match=message):
        run_ranks(undivided, 2)


def test_one_rank_sends_nothing_and_copies_nothing():
    wire, x = alone("int8"), torch.randn(4, 3, requires_grad=True)
    for op in ("all_reduce", "reduce_scatter", "all_gather", "max"):
        assert wire.run(op, x)[0] is x
        assert meet(wire, x, forward=op, backward="all_reduce", site=SITE)[0] is x
    assert Transport(Group(), wire.counter).all_gather(x).wait().shape == (1, 4, 3)
    assert wire.counter.snapshot() == [] and not wire.counter.messages


def test_ids_are_given_again_and_a_lost_wire_is_named():
    first = alone()
    number = first.id
    del first
    with pytest.raises(WireError, match=f"wire {number} is gone"):
        wire_of(number)
    again, other = alone(), alone()
    assert (again.id, wire_of(other.id)) == (number, other)


def test_wrong_calls_are_named():
    with pytest.raises(WireError, match="unknown op 'sum'"):
        alone().run("sum", torch.ones(2), site=SITE)
    with pytest.raises(WireError, match="no dimension 3"):
        alone().run("all_gather", torch.ones(2), dim=3)
    with pytest.raises(WireError, match="expected forward and backward, got forward"):
        Wire("tp", Group(), {"forward": build("bf16")}, Counter())
    with pytest.raises(ValueError, match="unknown exact_grad 'mean'"):
        meet(alone(), torch.ones(2), forward="none", backward="none", exact_grad=("mean", 0.0))


def test_totals_of_rows():
    counter = Counter()
    for way, n in (("forward", 3), ("forward", 4), ("backward", 5)):
        counter.add(group="tp", way=way, op="all_reduce", codec="bf16", dtype="bfloat16", purpose="activations", kind="modelled",
                    elements=n, payload_bytes=2 * n, wire_bytes=2.0 * n)
    rows = counter.snapshot()
    assert [(r.way, r.calls, r.elements) for r in rows] == [("backward", 1, 5), ("forward", 2, 7)]
    both = total(rows, op="all_reduce")
    assert (both.way, both.op, both.calls, both.elements, both.wire_bytes) == ("*", "all_reduce", 3, 12, 24.0)
    assert total(rows, op="max").calls == 0
    counter.reset()
    assert counter.snapshot() == []
