"""Each kernel against its plain-torch reference on any device; run as a program, in Triton's interpreter.

    TRITON_INTERPRET=1 python kernel_checks.py

The interpreter (seen with Triton 3.7.1) truncates where it casts to bfloat16, so there float32 alone is compared.

A check gives True, or an AssertionError says what differs.
"""
from __future__ import annotations

import math
import sys

import torch
from torch import Tensor

from kernels import adamw, bottleneck, bottleneck_reference, cross_entropy, reference, swiglu
from kernels.registry import bottleneck_inputs, logits_and_targets, step_inputs, swiglu_inputs

BF16, FLOAT32 = torch.bfloat16, torch.float32
NAN, INF = math.nan, math.inf
SHAPES = [(5, 64, 64), (3, 200, 200), (4, 320, 257), (2, 96, 0), (3, 64, 1), (1, 127, 100)]  # tokens, width, valid
GATES = [(5, 64), (3, 200), (2, 37), (4, 1), (1, 129)]  # tokens, width
ROWS = [(3, 64), (5, 100), (1, 1), (2, 333), (5, 384), (16, 384)]  # tokens, width
WEIGHTS = [((16, 24), True), ((7, 11), False)]  # shape, clipped


def close(got: Tensor, want: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=0.0, equal_nan=True)


def check_statistics(device: str, dtype: torch.dtype, tokens: int, width: int, valid: int) -> bool:
    logits, target = logits_and_targets(tokens, width, dtype, device, width)
    logits[:, valid:] = 1e4  # padding must not show
    before = logits.clone()
    got = cross_entropy.statistics(logits, target, valid)
    want = reference.cross_entropy_statistics(logits, target, valid)
    exact = reference.cross_entropy_statistics(logits.double(), target, valid)
    assert torch.equal(logits, before)
    assert [x.dtype for x in got] == [FLOAT32] * 3
    assert torch.equal(got[0], want[0]) and torch.equal(got[2], want[2])
    close(got[1], exact[1], 3e-6)
    assert all(torch.equal(a, b) for a, b in zip(got, cross_entropy.statistics(logits, target, valid)))
    return True


def check_gradient(device: str, dtype: torch.dtype, tokens: int, width: int, valid: int) -> bool:
    logits, target = logits_and_targets(tokens, width, dtype, device, width)
    logits[:, valid:] = 1e4
    target[0] = width // 2
    peak, total, _ = reference.cross_entropy_statistics(logits.double(), target, valid)
    exact = logits.double()
    reference.cross_entropy_gradient(exact, target, peak, total * 1.5, 0.125, valid)
    again = logits.clone()
    for tensor in (logits, again):
        cross_entropy.gradient(tensor, target, peak.float(), (total * 1.5).float(), 0.125, valid)
    assert torch.equal(logits, again)
    assert not logits[:, valid:].any()
    limit = {BF16: 2**-8, FLOAT32: 4e-6}[dtype]
    # p - 1 loses what p has below the rounding of 1: an absolute error in float32
    torch.testing.assert_close(logits.double(), exact, rtol=limit, atol=1e-8)
    return True


def check_nonfinite(device: str, dtype: torch.dtype) -> bool:
    logits = torch.zeros(6, 200, dtype=dtype, device=device)
    for row, value in enumerate([NAN, INF, -INF]):
        logits[row, 150] = value
    logits[3] = -INF
    logits[4, 190] = NAN  # padding: no logit
    logits[5, :100] = -INF
    target = torch.full((6,), 7, device=device)
    got = cross_entropy.statistics(logits, target, 180)
    want = reference.cross_entropy_statistics(logits, target, 180)
    for a, b in zip(got, want):
        close(a, b, 1e-6)
    assert got[1].isnan().tolist() == [True, True, False, False, False, False]
    cross_entropy.gradient(logits, target, *want[:2], 1.0, 180)
    assert logits[:, :180].isnan().any(1).tolist() == [True, True, False, True, False, False]
    return True


def check_step(device: str, shape: tuple[int, ...], dtype: torch.dtype, states: torch.dtype, clip: bool, steps: int = 10) -> bool:
    """Each step from the reference's state: within 1e-6 of the old and the new value in float32 (their difference may be
    small, the step's error is not), within one unit in the last place on top of that in bfloat16."""
    given = step_inputs(shape, dtype, states, device, 0) | ({} if clip else {"clip": None})
    names = ("param", "exp_avg", "exp_avg_sq")
    for step in range(1, steps + 1):
        given |= {"step": step, "lr": 1e-3 * step, "grad": torch.roll(given["grad"], 1)}
        old = {name: given[name].double() for name in names}
        mine = given | {name: given[name].clone() for name in names}
        grad = given["grad"].clone()
        adamw.step(**mine)
        reference.adamw_step(**given)
        assert torch.equal(given["grad"], grad)
        for name in names:
            got, want = mine[name].double(), given[name].double()
            place = 2**-7 if mine[name].dtype == BF16 else 0.0
            excess = (got - want).abs() - 1e-6 * (old[name].abs() + want.abs()) - place * want.abs()
            assert excess.max().item() <= 0, (name, step)
    return True


def _swiglu(device: str, gu: Tensor, dz: Tensor) -> Tensor:
    """Through the launch, whose output is all NaN before; on a GPU the operation must give the same bits."""
    out = torch.full_like(gu, NAN)
    swiglu.backward_launch(gu, dz, out).run()
    if device == "cuda":
        torch.testing.assert_close(swiglu.backward(gu, dz), out, rtol=0.0, atol=0.0, equal_nan=True)
    return out


def check_swiglu(device: str, dtype: torch.dtype, tokens: int, width: int) -> bool:
    """Within the rounding of what is summed: dg = dz·u·σ(g)(1 + g(1 - σ(g))) cancels near g = -1.28."""
    given = swiglu_inputs(tokens, width, dtype, device, width)
    gu, dz = given["gu"], given["dz"]
    gu[0, 0], gu[-1, width - 1] = 80.0, -80.0
    before = gu.clone(), dz.clone()
    got = _swiglu(device, gu, dz)
    assert got.dtype == dtype and torch.equal(gu, before[0]) and torch.equal(dz, before[1])
    assert torch.equal(got, _swiglu(device, gu, dz))
    exact = reference.swiglu_backward(gu.double(), dz.double())
    g, u = gu.double().chunk(2, dim=-1)
    size = dz.double().abs() * torch.sigmoid(g)
    summed = torch.cat([size * u.abs() * (1.0 + g.abs() * torch.sigmoid(-g)), size * g.abs()], dim=-1)
    place = 2**-8 if dtype == BF16 else 0.0
    for result in (got, reference.swiglu_backward(gu, dz)):
        excess = (result.double() - exact).abs() - 4e-6 * summed - place * exact.abs()
        assert excess.max().item() <= 1e-30  # below float32's normal numbers σ is flushed to zero
    return True


def check_swiglu_nonfinite(device: str, dtype: torch.dtype) -> bool:
    gu, dz = torch.ones(4, 2 * 50, dtype=dtype, device=device), torch.ones(4, 50, dtype=dtype, device=device)
    gu[0, 7], gu[1, 57], dz[2, 7], gu[3, 7] = NAN, INF, NAN, -INF
    got, want = _swiglu(device, gu, dz), reference.swiglu_backward(gu, dz)
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf())
    assert got.isfinite().sum().item() == 4 * 100 - 2 - 1 - 2 - 2
    return True


def check_bottleneck(device: str, dtype: torch.dtype, tokens: int, width: int) -> bool:
    """Within float32's rounding of what is summed (and the result's, in bfloat16); outputs are all NaN before."""
    place = 2**-8 if dtype == BF16 else 0.0

    def near(got: Tensor, exact: Tensor, size: Tensor, rounded: bool = True) -> None:
        excess = (got.double() - exact).abs() - 4e-6 * size - (place if rounded else 0.0) * exact.abs()
        assert excess.max().item() <= 1e-30

    def poisoned(*shapes: tuple) -> list[Tensor]:
        return [torch.full(shape, NAN, dtype=kind, device=device) for shape, kind in shapes]

    given = bottleneck_inputs(tokens, width, 2 * width, True, dtype, True, device, width)
    x, gain = given["p"], given["dh"][0].contiguous()
    for local in (True, False):
        y, square, rms = poisoned((x.shape, dtype), ((tokens,), FLOAT32), ((tokens,), FLOAT32))
        bottleneck.scale_launch(x, gain, 1e-5, local, y, square, rms).run()
        exact = bottleneck_reference.scale(x.double(), gain.double(), 1e-5, local)
        for got, want in zip((y, square, rms) if local else (y, square), exact):
            near(got, want, want.abs(), got is y)
    for silu in (True, False):
        given["silu"] = silu
        forward = {name: value for name, value in given.items() if name != "dh"}
        h, dp, ds = poisoned((x.shape, dtype), (x.shape, dtype), ((tokens,), FLOAT32))
        bottleneck.epilogue_launch(**forward, h=h).run()
        bottleneck.epilogue_backward_launch(**given, dp=dp, ds=ds).run()
        wide = {name: value.double() if isinstance(value, Tensor) else value for name, value in given.items()}
        exact = bottleneck_reference.epilogue(**{name: wide[name] for name in forward})
        near(h, exact, exact.abs() * (1.0 + wide["p"].abs()))
        want = bottleneck_reference.epilogue_backward(**wide)
        latent = wide["p"] * torch.rsqrt(wide["square"] / (2 * width) + 1e-6)[:, None]
        size = wide["dh"].abs() * (1.0 + latent.abs())
        scale = torch.rsqrt(wide["square"] / (2 * width) + 1e-6)
        near(dp, want[0], size * scale[:, None])
        near(ds, want[1], (size * latent.abs()).sum(1) / (4 * width) * scale.square(), False)
    return True


def check_bottleneck_nonfinite(device: str, dtype: torch.dtype) -> bool:
    """A NaN spoils its own row and no other."""
    given = bottleneck_inputs(4, 96, 192, True, dtype, True, device, 0)
    given["p"][1, 5], given["square"][2], given["dh"][3, 7] = NAN, NAN, INF
    dp, ds = torch.zeros_like(given["p"]), torch.zeros(4, device=device)
    bottleneck.epilogue_backward_launch(**given, dp=dp, ds=ds).run()
    want = bottleneck_reference.epilogue_backward(**given)
    assert torch.equal(dp.isfinite(), want[0].isfinite()) and torch.equal(ds.isfinite(), want[1].isfinite())
    assert ds.isfinite().tolist() == [True, False, False, False]
    return True


def interpret() -> None:
    """Small blocks, so that small tensors have several and a tail."""
    cross_entropy.BLOCK, adamw.BLOCK, swiglu.BLOCK = 64, 64, 64
    for shape in SHAPES:
        check_statistics("cpu", FLOAT32, *shape)
        check_gradient("cpu", FLOAT32, *shape)
    check_nonfinite("cpu", FLOAT32)
    for shape, clip in WEIGHTS:
        check_step("cpu", shape, FLOAT32, FLOAT32, clip, steps=3)
    for shape in GATES:
        check_swiglu("cpu", FLOAT32, *shape)
    check_swiglu_nonfinite("cpu", FLOAT32)
    for shape in ROWS:
        check_bottleneck("cpu", FLOAT32, *shape)
    check_bottleneck_nonfinite("cpu", FLOAT32)
    sys.stdout.write(f"{len(SHAPES)} shapes, {len(WEIGHTS)} weights, {len(GATES)} gates\n")


if __name__ == "__main__":
    interpret()
