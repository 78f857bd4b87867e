"""The differentiable collective: gradients against one process, statistics, checkpoints, compiled graphs."""
import pytest
import torch
import torch._dynamo.testing
from ranks import run_ranks
from torch.utils.checkpoint import checkpoint
from wires import SITE, alone, build, error, everyones, mine, wire_on

from suite.comm.meet import EXACT_GRADS, cross, meet


def gradients(mesh, dtype):
    """f(all ranks' inputs) against autograd on one process that holds all of them."""
    wire, p = wire_on(mesh, "fp64"), mesh.size
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]

    def close(a, b, what):
        assert a.dtype == dtype and error(a, b) < bound, (what, error(a, b))

    xs = [v.double().requires_grad_() for v in everyones(mesh, p * 2, 6, dtype=dtype)]
    ws = [v.double() for v in everyones(mesh, p * 2, 6, dtype=dtype, seed=5)]
    x = xs[mesh.rank].detach().to(dtype).requires_grad_()
    w = ws[mesh.rank].to(dtype)
    # f then g: replicated input, sharded weights; each rank sees the gradient of the whole sum
    y, _ = meet(wire, (meet(wire, x, forward="none", backward="all_reduce", site=SITE)[0] * w).tanh(),
                forward="all_reduce", backward="none", site=SITE)
    (y * y).sum().backward()
    total_y = sum((a * b).tanh() for a, b in zip(xs, ws))
    (total_y**2).sum().backward()
    close(y, total_y, "g")
    close(x.grad, sum(v.grad for v in xs), "f")  # inputs differ here, so the sum over ranks is what a replica would get
    # sequence parallel: gather the inputs, scatter the sums
    for v in [*xs, x]:
        v.grad = None
    whole, _ = meet(wire, x, forward="all_gather", backward="reduce_scatter", site=SITE, dim=1)
    z, _ = meet(wire, (whole * w.repeat(1, p)).tanh(), forward="reduce_scatter", backward="all_gather", site=SITE, dim=0)
    (z * z).sum().backward()
    full = sum((torch.cat(xs, 1) * b.repeat(1, p)).tanh() for b in ws)
    (full**2).sum().backward()
    close(z, full.chunk(p)[mesh.rank], "scatter")
    close(x.grad, xs[mesh.rank].grad, "gather")
    return mesh.rank


def rms_gradient(grad_y, y, exact, constant):
    """d loss / d S of z = y / sqrt(S/d + eps): z depends on S through one scale of y. constant = d eps."""
    return -0.5 * (grad_y * y).sum(-1, keepdim=True) / (exact + constant)


def norm_between_factors(mesh, codec, mode, compiled):
    """Sharded input, statistic of the whole row, product reduced: z = (sum_i x_i A_i) / sqrt(S/d + eps), then sharded again."""
    EXACT_GRADS["rms"] = rms_gradient
    wire, p, eps = wire_on(mesh, codec), mesh.size, 1e-3
    d = 8 * p

    def block(layer, x, a, b):
        y, s = meet(wire, x @ a, forward="all_reduce", backward="all_reduce", exact=x.pow(2).sum(-1, keepdim=True),
                    exact_grad=("rms", d * eps) if mode == "rms" else (mode, 0.0), site=(layer, "q"))
        return (y * torch.rsqrt(s / d + eps)) @ b

    xs = [v.requires_grad_() for v in everyones(mesh, 5, 8, dtype=torch.float64)]
    aa, bb = everyones(mesh, 8, 4, dtype=torch.float64, seed=1), everyones(mesh, 4, 3, dtype=torch.float64, seed=2)
    z = sum(x @ a for x, a in zip(xs, aa)) * torch.rsqrt(sum(x.pow(2).sum(-1, keepdim=True) for x in xs) / d + eps)
    sum((z @ b).sin().sum() for b in bb).backward()
    x = xs[mesh.rank].detach().clone().requires_grad_()
    frames = torch._dynamo.testing.CompileCounterWithBackend("aot_eager") if compiled else None
    f = torch.compile(block, fullgraph=True, backend=frames) if compiled else block
    for layer in range(4 if compiled else 1):
        x.grad = None
        out = f(layer, x, aa[mesh.rank], bb[mesh.rank])
        out.sin().sum().backward()
        assert error(out, z @ bb[mesh.rank]) < 1e-12
    rows = wire.counter.snapshot()
    return error(x.grad, xs[mesh.rank].grad), frames.frame_count if compiled else 0, rows


def compiled_equals_eager(mesh, codec):
    """One graph for all layers, the same bits as eager, also where the codec changes under a compiled graph."""
    def block(wire, layer, x, w):
        def inner(x):
            y, _ = meet(wire, x, forward="all_gather", backward="reduce_scatter", dim=0, site=(layer, "in"))
            y = (meet(wire, y, forward="none", backward="all_reduce", site=(layer, "in"))[0] @ w).relu()
            return meet(wire, y, forward="reduce_scatter", backward="all_gather", dim=0, site=(layer, "out"))[0]

        y = checkpoint(inner, x, use_reentrant=False)
        peak, _ = cross(wire, y.detach().amax(-1), "max", purpose="loss")
        return meet(wire, y, forward="all_reduce", backward="none", site=(layer, "out"))[0] - peak[:, None]

    frames = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, fullgraph=True, backend=frames)
    wire = wire_on(mesh, codec)
    counts = []
    for layer in range(5):
        if layer == 4:
            wire.codecs = {"forward": build("bf16"), "backward": build("fp32")}
        bits = []
        for f in (block, compiled):
            wire.counter.reset()
            x, w = mine(mesh, 4, 8).requires_grad_(), mine(mesh, 8, 8, seed=3).requires_grad_()
            y = f(wire, layer, x, w)
            y.pow(2).sum().backward()
            bits.append((y.detach(), x.grad, w.grad, wire.counter.snapshot()))
        assert all(torch.equal(a, b) for a, b in zip(bits[0][:3], bits[1][:3])), layer
        assert bits[0][3] == bits[1][3], "compiled and eager count differently"
        counts.append(frames.frame_count)
    return counts


def summed_in_place(mesh):
    """Where nothing reads a product but the all-reduce, it is summed in place; what is read later stays as it was."""
    wire, places = wire_on(mesh, "taco"), []
    native = wire.start

    def watched(op, x, **rest):
        pending, before = native(op, x, **rest), x.data_ptr()
        places.append((rest["owned"], pending.wait()[0].data_ptr() == before))
        return pending

    wire.start = watched

    def block(x, w):
        a = x @ w
        once = meet(wire, x @ (w + 1), forward="all_reduce", backward="none", site=(0, "up"))[0]
        return meet(wire, a, forward="all_reduce", backward="all_reduce", site=(0, "out"))[0].sin() + a + once

    found = []
    def recomputed(x, w):
        return checkpoint(block, x, w, use_reentrant=False)

    for f in (block, torch.compile(block, fullgraph=True), torch.compile(recomputed, fullgraph=True)):
        x, w = mine(mesh, 64, 128).requires_grad_(), mine(mesh, 128, 128, seed=3).requires_grad_()
        y = f(x, w)
        grad = torch.ones_like(y)
        y.backward(grad)
        assert bool((grad == 1).all())
        found.append((y.detach(), x.grad, w.grad))
    for eager, *others in zip(*found):
        assert all(error(eager, other) < 2e-3 for other in others)  # a product that rounds otherwise may take another code
    return places[:6]


def test_a_compiled_graph_sums_in_place():
    for places in run_ranks(summed_in_place, 2):
        assert places == [(False, False)] * 3 + [(True, True)] * 3


@pytest.mark.parametrize("size,dtype", [(2, torch.float64), (4, torch.float64), (2, torch.float32), (2, torch.bfloat16)])
def test_gradients(size, dtype):
    assert run_ranks(gradients, size, dtype) == [*range(size)], "every rank came to the end of its checks"


@pytest.mark.parametrize("mode,compiled", [("sum", False), ("rms", False), ("rms", True)])
def test_gradient_of_a_statistic(mode, compiled):
    for grad_error, frames, rows in run_ranks(norm_between_factors, 2, "fp64", mode, compiled):
        assert grad_error < 1e-12
        assert frames <= 2, "layers do not share a graph"
        back = [r for r in rows if r.way == "backward" and r.purpose == "statistic"]
        assert bool(back) == (mode == "sum"), "a formula needs no message"


def test_a_statistic_without_gradient_gives_another_gradient():
    assert all(grad_error > 1e-3 for grad_error, _, _ in run_ranks(norm_between_factors, 2, "fp64", "none", False))


@pytest.mark.parametrize("codec", ["fp8", "fp32"])
def test_compiled_graphs_equal_eager_and_outlive_a_codec(codec):
    counts = run_ranks(compiled_equals_eager, 2, codec)[0]
    assert counts[1] == counts[4] <= 2


def test_one_rank_gives_a_statistic_its_gradient():
    EXACT_GRADS["rms"] = rms_gradient
    wire, x = alone(), torch.randn(4, 8, dtype=torch.float64)
    found = []
    for mode in (("sum", 0.0), ("rms", 8e-3), ("none", 0.0)):
        x.requires_grad_().grad = None
        squares = x.pow(2).sum(-1, keepdim=True)
        y, s = meet(wire, 2 * x, forward="all_reduce", backward="all_reduce", exact=squares, exact_grad=mode, site=SITE)
        (y * torch.rsqrt(s / 8 + 1e-3)).sin().sum().backward()
        found.append(x.grad.clone())
    assert error(found[1], found[0]) < 1e-12 < error(found[2], found[0])
