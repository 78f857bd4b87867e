"""TACO and its competitors: errors, bytes, extremes, options, several ranks. The kernels: test_taco_kernels.py."""
from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from ranks import RankError, run_ranks
from test_codecs import codec, e4m3_grid, error, gauss, through
from wires import SITE, everyones, mine, wire_on

from kernels import reference, taco_reference
from kernels.taco_reference import GROUPS, MODES, to_codes, transform
from suite.case import Case
from suite.comm.audit import Audit
from suite.record import CaseFailed
from suite.seams import Key
from suite.train import execute
from suite.trainer import Trainer

ERRORS = dict(zip(GROUPS, (2.39, 2.50, 2.57, 2.60, 2.64)))  # % on Gaussians, by group


def hadamard(n):
    """Sylvester's construction, [n, n]."""
    h = np.ones((1, 1))
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return h


def oracle(x, group):
    """Mode lean in NumPy float64: every group's transform, nearest codes with ties to even, and back."""
    h, grid, out = hadamard(group), e4m3_grid(), []
    for part in x.reshape(-1, group):
        y = h @ part / math.sqrt(group)
        s = np.abs(y).max() / 448
        mag = np.abs(y / s)
        high = np.searchsorted(grid, mag).clip(1, len(grid) - 1)
        low = high - 1
        left, right = mag - grid[low], grid[high] - mag
        q = np.sign(y) * grid[np.where((left < right) | ((left == right) & (low % 2 == 0)), low, high)]
        out.append(h @ (q * s) / math.sqrt(group))
    return np.concatenate(out)


def test_the_transform_is_sylvesters_and_its_own_inverse():
    for n in (2, *GROUPS):
        x = gauss(3, n).double()
        assert np.allclose(transform(x).numpy(), x.numpy() @ hadamard(n), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(transform(transform(x)) / n, x, rtol=0, atol=1e-13)


def test_the_documented_order_of_additions():
    x = gauss(4)
    a, b, c, d = x
    assert torch.equal(transform(x), torch.stack([(a + b) + (c + d), (a - b) + (c - d), (a + b) - (c + d), (a - b) - (c - d)]))


@pytest.mark.parametrize("group", [32, 128])
def test_equals_the_oracle(group):
    x = gauss(64 * group) * 1e-2
    y = through(codec("taco", group=group), x).numpy()
    off = np.abs(y - oracle(x.double().numpy(), group)).reshape(-1, group).max(1) > 1e-6
    assert off.sum() <= 1, "more than a group rounded another way in float32"


@pytest.mark.parametrize("mode", ["lean", "paper"])
@pytest.mark.parametrize("group", GROUPS)
def test_error_of_a_gaussian(group, mode):
    x = gauss(1 << 19) * 1e-2
    for on in (True, False):
        y = through(codec("taco", group=group, mode=mode, hadamard=on), x)
        assert 100 * error(y, x) == pytest.approx(ERRORS[group], abs=0.1)


def test_errors_of_formats_and_competitors():
    x = gauss(1 << 18) * 1e-2
    for name, options, percent in [("taco", {"format": "e5m2"}, 5.13), ("int8-hadamard", {}, 0.65), ("int8-tensor", {}, 1.06),
                                   ("fp8-cast", {}, 5.65), ("tahquant", {}, 10.0), ("taco", {"mode": "coarse"}, 2.65)]:
        assert 100 * error(through(codec(name, **options), x), x) == pytest.approx(percent, rel=0.05), name
    tails = torch.from_numpy(np.random.default_rng(0).standard_t(2, 1 << 18)).float() * 1e-3
    assert error(through(codec("int8-hadamard"), tails), tails) < 0.006 < 0.015 < error(through(codec("int8"), tails), tails)
    spoilt = through(codec("int8-tensor"), tails)
    assert error(spoilt, tails) > 0.2 and (spoilt == 0).float().mean() > 0.7
    assert not through(codec("fp8-cast"), x * 1e-4).any() and through(codec("fp8-cast"), x + 1e4).eq(448).all()


def shapes_of(group):
    """Groups of unit size that spread their values in as many ways."""
    hot = torch.zeros(group)
    hot[3] = 1
    x = gauss(group, seed=group)
    wide = torch.sign(x) * torch.logspace(-6, 0, group)
    return {"gauss": x / x.abs().max(), "wide": wide, "hot": hot, "constant": torch.full((group,), -1.0), "pair": hot + hot.roll(1)}


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e-9, 1.0, 1e5, 1e20, 3e38])
def test_any_finite_group(size, group):
    for name, unit in shapes_of(group).items():
        x = unit * size
        for options in ({}, {"hadamard": False}, *([{"mode": "paper"}] if 1e-8 < size < 1e5 else [])):
            y = through(codec("taco", group=group, **options), x)
            assert torch.isfinite(y).all()
            assert error(y / size, x / size) <= 0.0625, (name, options)
            if name in ("hot", "constant") and not (name == "hot" and options.get("hadamard") is False):
                torch.testing.assert_close(y / size, x / size, rtol=3e-7, atol=1e-7)


def test_paper_keeps_the_releases_clamps():
    """Outside RMS of 1e-9 to 1e5 its floor on s and its cap of alpha are those of the release: quiet groups lose their values."""
    x = gauss(128) * 1e-19
    assert error(through(codec("taco", mode="paper"), x) * 1e18, x * 1e18) > 0.1 > error(through(codec("taco"), x) * 1e18, x * 1e18)
    wire = taco_reference.taco_encode(gauss(128) * 1e-2, mode="paper")
    assert wire[132:].view(torch.float32).item() == 1000.0  # alpha of every RMS below 0.448
    loud = taco_reference.taco_encode(gauss(128) * 1e3, mode="paper")[132:].view(torch.float32).item()
    assert 0.3 < loud < 0.6


def test_alpha_cancels_but_for_coarse_scales():
    x = gauss(1 << 16) * torch.logspace(-4, 2, 512).repeat_interleave(128)
    on, off = (taco_reference.taco_encode(x, mode="paper", alpha=a)[: len(x)] for a in (True, False))
    assert (on != off).sum() <= len(x) // 10_000
    on, off = (through(codec("taco", mode="coarse", alpha=a), x) for a in (True, False))
    assert (off == 0).float().mean() > 0.05 > 100 * (on == 0).float().mean()


@pytest.mark.parametrize("mode", MODES)
def test_zeros_and_tails(mode):
    c = codec("taco", group=32, mode=mode)
    assert torch.equal(through(c, torch.zeros(100)), torch.zeros(100))
    for n in range(1, 65):
        x = gauss(n, seed=n)
        assert error(through(c, x), x) < 0.0625
    x = torch.cat([gauss(128), torch.zeros(128)])
    assert not through(codec("taco", mode=mode), x)[128:].any()


@pytest.mark.parametrize("name", ["taco", "int8-hadamard", "tahquant"])
def test_constants_and_zeros_of_competitors(name):
    assert torch.equal(through(codec(name), torch.zeros(300)), torch.zeros(300))
    torch.testing.assert_close(through(codec(name), torch.full((256,), -0.3)), torch.full((256,), -0.3), rtol=3e-7, atol=1e-7)


@pytest.mark.parametrize("name,options", [("taco", {"mode": m}) for m in MODES] + [("int8-hadamard", {}), ("tahquant", {})])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nonfinite_reaches_the_output_and_the_count(name, options, bad):
    c, x = codec(name, **options), gauss(512)
    x[200] = bad
    wire = torch.empty(c.nbytes(512), dtype=torch.uint8)
    c.encode(x, wire, Key(site=SITE, operand="sum"))
    assert c.nonfinite_at == {(SITE, "forward sum"): 1} and c.nonfinite == 1
    out = torch.empty(512)
    c.decode(wire, out)
    assert torch.isnan(out[128:256]).all() and torch.isfinite(out[:128]).all() and torch.isfinite(out[256:]).all()
    again = torch.empty_like(wire)
    c.reencode([wire, wire], 512, again, Key())
    c.decode(again, out)
    assert torch.isnan(out[128:256]).all() and torch.isfinite(out[256:]).all() and c.nonfinite == 2


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nonfinite_without_groups(bad):
    x = gauss(10)
    x[7] = bad
    for name, lost in (("fp8-cast", 1), ("int8-tensor", 10)):
        c = codec(name)
        assert torch.isnan(through(c, x)).sum() == lost and c.nonfinite == 1


def test_bytes():
    assert codec("taco").nbytes(1024) == 1024 * (1 + 4 / 128) == codec("int8-hadamard").nbytes(1024)
    assert codec("taco", mode="paper").nbytes(1024) == 1024 * (1 + 8 / 128)
    assert codec("taco", mode="coarse").nbytes(1024) == 1024 * (1 + 4 / 128) + 4
    assert codec("taco", group=32).nbytes(33) == 72
    assert [codec(n).nbytes(1024) for n in ("fp8-cast", "int8-tensor", "tahquant")] == [1024, 1028, 512 + 64]


def test_without_a_transform_lean_is_fp8():
    x = gauss(4096) * 3
    torch.testing.assert_close(through(codec("taco", hadamard=False), x), through(codec("fp8"), x), rtol=3e-7, atol=0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("on", [True, False])
def test_reduce_is_decode_sum_encode(mode, format, on):
    """In the transformed domain: the sum within rounding, its encoding but for a code in 1,000 that lies between two."""
    options = {"mode": mode, "format": format, "hadamard": on}
    x = torch.stack([gauss(4096, seed=s) * 10.0**s for s in range(3)])
    wires = taco_reference.taco_encode(x, **options)
    alone = taco_reference.taco_decode(wires, **options)
    total = (alone[0] + alone[1]) + alone[2]
    torch.testing.assert_close(taco_reference.taco_total(wires, **options), total, rtol=0, atol=2e-6 * float(total.abs().max()))
    got = reference.taco_reduce(wires, **options)
    want = reference.taco_encode(total, **options)
    assert (got[:4096] != want[:4096]).sum() <= 4
    y, z = (taco_reference.taco_decode(w, **options) for w in (got, want))
    assert error(y, z) < 2e-3


def test_stochastic_rounding_is_unbiased_and_keyed():
    x = torch.full((1 << 16,), 1.03)
    x[::128] = 448.0  # multiplier 1: codes next to 1.03 are 1 and 1.125
    key = Key(1, 2, 3, 0, SITE, "forward")
    c = codec("taco", hadamard=False, rounding="stochastic")
    wire = torch.empty(3, c.nbytes(len(x)), dtype=torch.uint8)
    for row, k in zip(wire, (key, key, Key(1, 2, 4, 0, SITE, "forward"))):
        c.encode(x, row, k)
    assert torch.equal(wire[0], wire[1]) and not torch.equal(wire[0], wire[2])
    out = torch.empty_like(x)
    c.decode(wire[0], out)
    near = out[x < 2]
    assert set(near.tolist()) == {1.0, 1.125} and near.mean() == pytest.approx(1.03, abs=1e-3)
    for format in ("e4m3", "e5m2"):  # numbers of the format stay
        exact = to_codes(gauss(4096) * torch.logspace(-6, 2, 4096), format).view(taco_reference.FORMATS[format].dtype).float()
        assert torch.equal(to_codes(exact, format, 5), to_codes(exact, format))


@pytest.mark.parametrize("options,words", [
    ({"group": 48}, "group 48: expected a power of two from 32 to 512"), ({"group": 1024}, "group 1024"),
    ({"target": 449.0}, "target 449: .* at most 448"), ({"format": "e5m2", "target": 57734.0}, "at most 57344"),
    ({"alpha": False}, "alpha: cannot be off in mode lean"), ({"mode": "fast"}, "mode 'fast'"),
    ({"format": "e3m4"}, "format 'e3m4'"), ({"rounding": "up"}, "rounding 'up'"),
    ({"axis": "layer"}, "axis 'layer'"), ({"min_bytes": -1}, "min_bytes -1"),
])
def test_options_that_do_not_fit(options, words):
    with pytest.raises(ValueError, match=words):
        codec("taco", **options)


@pytest.mark.parametrize("options,words", [
    ({"group": 48}, "group"), ({"target": 449.0}, "target: 449 is above 448"), ({"alpha": False}, "alpha: false needs mode"),
    ({"format": "e5m2", "target": 57734}, "above 57344"), ({"lambda": 1}, "lambda")])
def test_a_case_refuses_them_too(options, words):
    with pytest.raises(ValueError, match=words):
        Case(model="gpt-tiny", mesh={"tp": 2}, comm={"name": "taco", **options})


def test_a_competitors_options():
    with pytest.raises(ValueError, match="comm int8-hadamard: group 100: expected a power of two"):
        codec("int8-hadamard", group=100)
    with pytest.raises(ValueError, match="comm tahquant: group 127: expected an even number"):
        codec("tahquant", group=127)


def test_integers_and_lengths_that_are_no_groups_are_refused():
    c = codec("taco")
    with pytest.raises(ValueError, match=r"torch.int64: only floating-point"):
        c.encode(torch.arange(128), torch.empty(132, dtype=torch.uint8), Key())
    with pytest.raises(ValueError, match="131 bytes are no row of groups of 128 in mode lean"):
        c.decode(torch.empty(131, dtype=torch.uint8), torch.empty(128))
    with pytest.raises(ValueError, match="380 elements are no whole groups of 128"):
        c.reencode([torch.empty(396, dtype=torch.uint8)], 380, torch.empty(396, dtype=torch.uint8), Key())


# over several ranks


def two_shot(mesh, options):
    """The error of a two-shot all-reduce, its bits, and those of a repeat; what is counted is what crossed."""
    xs = everyones(mesh, 1 << 16)
    wire = wire_on(mesh, "taco", algorithm="two-shot", **options)
    with Audit(wire.counter) as audit:
        y, _ = wire.run("all_reduce", xs[mesh.rank], site=SITE)
    audit.check()
    again, _ = wire.run("all_reduce", xs[mesh.rank], site=SITE)
    row = wire.counter.snapshot()[0]
    return error(y, torch.stack(xs).sum(0)), y, torch.equal(y, again), row.wire_bytes / row.elements


@pytest.mark.parametrize("size,options", [(2, {}), (4, {}), (8, {}), (4, {"mode": "paper"}), (2, {"mode": "coarse"})])
def test_two_shot_all_reduce(size, options):
    found = run_ranks(two_shot, size, options)
    assert all(e == pytest.approx(0.036, abs=0.003) for e, *_ in found)
    assert all(torch.equal(found[0][1], y) and repeated for _, y, repeated, _ in found)
    if options.get("mode") != "coarse":
        per_element = 1 + (8 if options else 4) / 128
        assert all(sent == 2 * (size - 1) / size * per_element for *_, sent in found)


def every_op(mesh, name, options):
    """All ops on odd sizes, in both algorithms; returns the all-reduced tensors."""
    found = []
    for algorithm in ("one-shot", "two-shot"):
        wire = wire_on(mesh, name, algorithm=algorithm, **options)
        xs = everyones(mesh, 4 * mesh.size, 37, dtype=torch.bfloat16)
        full, x = torch.stack([v.float() for v in xs]).sum(0), xs[mesh.rank]
        for dim in (0, 1):
            whole, _ = wire.run("all_gather", x, dim=dim)
            assert whole.is_contiguous() and error(whole, torch.cat(xs, dim)) < 0.15
        part, _ = wire.run("reduce_scatter", x, dim=0)
        assert part.is_contiguous() and error(part, full.chunk(mesh.size)[mesh.rank]) < 0.15
        y, _ = wire.run("all_reduce", x)
        assert y.dtype == x.dtype and y.is_contiguous() and error(y, full) < 0.2
        assert int(wire.run("all_reduce", torch.tensor([7]))[0]) == 7 * mesh.size, "integers passed a codec"
        assert torch.equal(wire.run("max", x)[0], torch.stack(xs).amax(0)), "a maximum passed a codec"
        found.append(y)
    return found


@pytest.mark.parametrize("name,options", [
    ("taco", {}), ("taco", {"mode": "paper", "group": 32}), ("taco", {"axis": "token", "group": 32}), ("taco", {"mode": "coarse"}),
    ("taco", {"rounding": "stochastic"}), ("int8-hadamard", {}), ("int8-tensor", {}), ("fp8-cast", {}), ("tahquant", {})])
def test_every_op_and_equal_bits(name, options):
    found = run_ranks(every_op, 4, name, options)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other))


def lost(mesh):
    """A NaN on rank 1 reaches all ranks; each names the message."""
    wire = wire_on(mesh, "taco")
    x = mine(mesh, 512)
    if mesh.rank == 1:
        x[5] = math.nan
    y, _ = wire.run("all_reduce", x, site=SITE)
    return int(torch.isnan(y).sum()), {k: n for k, n in wire.nonfinite_at.items() if n}


def test_nonfinite_names_its_message():
    found = run_ranks(lost, 2)
    assert found == [(128, {}), (128, {(SITE, "forward all_reduce 1"): 1})]


def unlike_noise(mesh):
    """Ranks round their own parts by noise of their own: a sum of N has N variances, not N²."""
    wire = wire_on(mesh, "taco", rounding="stochastic", algorithm="one-shot")
    x = gauss(1 << 16)
    return error(wire.run("all_reduce", x)[0], mesh.size * x)


def test_ranks_draw_other_noise():
    alone = error(through(codec("taco", rounding="stochastic"), gauss(1 << 16)), gauss(1 << 16))
    assert all(e == pytest.approx(alone / 2, rel=0.1) for e in run_ranks(unlike_noise, 4))


def test_a_refusal_names_the_rank():
    with pytest.raises(RankError, match="group 48"):
        run_ranks(two_shot, 2, {"group": 48})


def diverging(mesh, folder):
    """A weight of the third layer becomes NaN before step 2 of a run; the reason that the record would hold."""
    ordinary = Trainer.step

    def poisoned(self, step):
        if step == 2:
            self.model.weights.leaves["layers.2.ffn.down.weight"].data.fill_(math.nan)
        return ordinary(self, step)

    Trainer.step = poisoned
    try:
        case = Case(model="gpt-tiny", mesh={"tp": mesh.size}, comm="taco", steps=4, data={"text": "random", "seq": 16, "batch": 2})
        execute(case, mesh, progress=lambda *_: None, folder=folder)
    except CaseFailed as failure:
        return str(failure)
    finally:
        Trainer.step = ordinary


def test_a_run_that_diverges_names_the_layer(tmp_path):
    for reason in run_ranks(diverging, 2, tmp_path):
        assert reason.startswith("loss is nan at step 2; NaN or Inf in layer 2, "), reason
