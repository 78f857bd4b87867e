"""AdamW against torch's own, clipping in the same pass, states that resume; the peer's side keeps torch's optimizer."""
from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels import reference
from suite.assemble import assemble
from suite.case import Case, Optim
from suite.mesh import Mesh
from suite.optimizer import KINDS, AdamW
from suite.train import execute
from suite.trainer import Trainer, rate

BF16, FLOAT32, FLOAT64 = torch.bfloat16, torch.float32, torch.float64
OPTIM = Optim(lr=1e-2, decay=0.1)
SHAPES = [(24, 16), (8, 40), (40,), ()]


def leaves(dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(s, generator=generator, dtype=FLOAT64).mul_(0.1).to(device, dtype).requires_grad_() for s in SHAPES]


def gradients(step: int, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(s, generator=generator, dtype=FLOAT64).mul_(0.01 * (step + 1)).to(device, dtype) for s in SHAPES]


def give(parameters: list[Tensor], step: int, factor: Tensor | None = None) -> None:
    for leaf, gradient in zip(parameters, gradients(step, parameters[0].dtype, str(parameters[0].device))):
        leaf.grad = gradient if factor is None else gradient * factor.to(gradient.dtype)


def torchs(parameters: list[Tensor], **how) -> torch.optim.AdamW:
    groups = [{"params": [p for p in parameters if p.ndim > 1], "weight_decay": OPTIM.decay},
              {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=OPTIM.lr, betas=(OPTIM.beta1, OPTIM.beta2), eps=OPTIM.eps, **how)


def schedule(step: int) -> float:
    return rate(OPTIM, step, 10)


def side_by_side(dtype: torch.dtype, device: str = "cpu", clip: float | None = None, **how):
    """Ten steps of ours and of torch's from the same start; yields both after each."""
    mine, theirs = leaves(dtype, device), leaves(dtype, device)
    ours, other = AdamW(mine, OPTIM), torchs(theirs, **how)
    factor = None if clip is None else torch.tensor(clip, device=device, dtype=torch.promote_types(dtype, FLOAT32))
    for step in range(10):
        give(mine, step)
        give(theirs, step, factor)
        for group in other.param_groups:
            group["lr"] = schedule(step)
        ours.step(schedule(step), factor)
        other.step()
        yield [(a, b, [(ours.state[a][k], other.state[b][k]) for k in KINDS]) for a, b in zip(mine, theirs)]


def places(got: Tensor, want: Tensor) -> int:
    """Most units in the last place between two bfloat16 tensors of equal signs."""
    assert bool((got.sign() == want.sign()).all())
    return int((got.view(torch.int16).int() - want.view(torch.int16).int()).abs().max())


@pytest.mark.parametrize("clip", [None, 0.5])  # a power of two: torch's side scales its gradients without rounding
@pytest.mark.parametrize("dtype, limit", [(FLOAT64, 1e-14), (FLOAT32, 1e-6)])
def test_ten_steps_equal_torch(dtype, limit, clip):
    for leaf, other, states in (pair for pairs in side_by_side(dtype, clip=clip) for pair in pairs):
        for got, want in [(leaf, other), *states]:
            assert got.dtype == want.dtype == dtype
            assert float((got - want).norm().detach() / want.norm().detach()) < limit


@pytest.mark.parametrize("clip", [None, 0.5])
def test_bfloat16_is_rounded_once_a_step(clip):
    for leaf, other, states in (pair for pairs in side_by_side(BF16, clip=clip, fused=True) for pair in pairs):
        for got, want in [(leaf.detach(), other.detach()), *states]:
            assert got.dtype == BF16 and places(got, want) <= 1


@pytest.mark.parametrize("dtype", [FLOAT64, FLOAT32, BF16])
def test_the_kernels_reference_equals_torch(dtype):
    """Each of ten steps from torch's state, a factor of a quarter undoing fourfold gradients."""
    parameters = leaves(dtype)
    other = torchs(parameters, fused=True)
    states = [[torch.zeros_like(p) for _ in KINDS] for p in parameters]
    for step in range(10):
        mine = [(p.detach().clone(), 4 * g, *(m.clone() for m in s)) for p, g, s in zip(parameters, gradients(step, dtype), states)]
        give(parameters, step)
        other.step()
        states = [[other.state[p][k] for k in KINDS] for p in parameters]
        for p, moments, tensors in zip(parameters, states, mine):
            reference.adamw_step(*tensors, lr=OPTIM.lr, beta1=OPTIM.beta1, beta2=OPTIM.beta2, eps=OPTIM.eps,
                                 decay=OPTIM.decay if p.ndim > 1 else 0.0, step=step + 1, clip=torch.tensor(0.25))
            for got, want in zip((tensors[0], *tensors[2:]), (p.detach(), *moments)):
                if dtype == BF16:  # one unit in the last place, or what is left where two terms cancel
                    assert bool(((got - want).float().abs() <= 2**-7 * want.float().abs() + 1e-8).all())
                else:
                    assert float((got - want).norm() / want.norm()) < {FLOAT64: 1e-14, FLOAT32: 1e-6}[dtype]


def test_a_factor_that_float32_cannot_hold_is_applied_in_float64():
    factor = torch.tensor(1 / 3, dtype=FLOAT64)
    scaled, plain = leaves(FLOAT64), leaves(FLOAT64)
    for parameters, clip in ((scaled, factor), (plain, None)):
        optimizer = AdamW(parameters, Optim(beta1=0.0, beta2=0.0, eps=1.0, decay=0.0))
        give(parameters, 0, factor if clip is None else None)
        optimizer.step(1.0, clip)
    for a, b in zip(scaled, plain):
        torch.testing.assert_close(a, b, rtol=1e-15, atol=1e-16)


def test_decay_shrinks_matrices_only():
    parameters = leaves(FLOAT32)
    before = [p.detach().clone() for p in parameters]
    optimizer = AdamW(parameters, OPTIM)
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer.step(0.5)
    for p, old in zip(parameters, before):
        torch.testing.assert_close(p.detach(), old * 0.95 if p.ndim > 1 else old, rtol=1e-6, atol=0)


def test_states_and_steps_resume_bit_for_bit():
    through = leaves(FLOAT32)
    whole = AdamW(through, OPTIM)
    for step in range(8):
        if step == 4:
            kept = [p.detach().clone() for p in through]
            states = [{k: s.clone() for k, s in whole.state[p].items()} for p in through]
            assert whole.steps == 4
        give(through, step)
        whole.step(schedule(step))
    again = [p.requires_grad_() for p in kept]
    resumed = AdamW(again, OPTIM)
    resumed.steps = 4
    for p, saved in zip(again, states):
        for kind in KINDS:
            resumed.state[p][kind].copy_(saved[kind])
    for step in range(4, 8):
        give(again, step)
        resumed.step(schedule(step))
    assert all(torch.equal(a, b) for a, b in zip(through, again))


def test_a_missing_gradient_is_named_and_zero_drops_all():
    parameters = leaves(FLOAT32)
    optimizer = AdamW(parameters, OPTIM)
    give(parameters, 0)
    parameters[1].grad = None
    with pytest.raises(ValueError, match=r"a parameter of shape \(8, 40\) has no gradient"):
        optimizer.step(1e-3)
    assert optimizer.steps == 0
    optimizer.zero()
    assert all(p.grad is None for p in parameters)


def test_clip_finds_the_factor_and_leaves_the_gradients():
    made = assemble(Case(model="gpt-tiny", precision="float64", data={"text": "random", "seq": 16, "batch": 2}), Mesh(), 200)
    ids = torch.randint(200, (2, 16), generator=torch.Generator().manual_seed(0))
    made.model.loss(ids, ids.roll(1, 1)).backward()
    found = [leaf.grad for leaf in made.model.weights.leaves.values()]
    before = [g.clone() for g in found]
    want = math.sqrt(sum(float(g.square().sum()) for g in before))
    norm, factor = made.gradients.clip(want / 4)
    assert norm.item() == pytest.approx(want, rel=1e-12)
    assert factor.item() == pytest.approx(0.25, rel=1e-5) and factor.dtype == FLOAT64
    assert made.gradients.clip(2 * want)[1].item() == 1.0
    assert made.gradients.clip(0.0)[1] is None
    assert all(torch.equal(a, b) for a, b in zip(found, before))


def trainer(implementation: str) -> Trainer:
    # a large eps: the size of a gradient, and so clipping, shows in the update
    return Trainer(Case(model="gpt-tiny", precision="float32", implementation=implementation, steps=10,
                        optim={"clip": 0.01, "lr": 1e-3, "warmup": 0.0, "eps": 1.0, "decay": 0.0},
                        data={"text": "random", "seq": 16, "batch": 2}), Mesh())


@pytest.mark.parametrize("implementation, kind", [("triaxis", AdamW), ("transformers", torch.optim.AdamW)])
def test_a_training_step_clips_on_both_sides(implementation, kind):
    if implementation == "transformers":
        pytest.importorskip("transformers")
    made = trainer(implementation)
    assert type(made.optimizer) is kind
    parameters = list(made.model.weights.leaves.values()) if made.assembled else made.model.parameters()
    before = [p.detach().clone() for p in parameters]
    _, norm = made.step(0)
    assert norm.item() > 0.1, "there is something to clip"
    # first step: w - lr · g / (|g| + eps), and a clipped gradient has |g| of at most 0.01
    moved = math.sqrt(sum(float((p.detach() - old).double().square().sum()) for p, old in zip(parameters, before)))
    assert moved == pytest.approx(1e-3 * 0.01, rel=0.02)
    assert all(p.grad is None for p in parameters)


def test_a_cut_run_goes_on_bit_for_bit(tmp_path):
    """Weights, both moments and the number of steps come back from the checkpoint that a cut left."""
    case = Case(model="gpt-tiny", precision="float32", steps=6, save=3, data={"text": "random", "seq": 16, "batch": 2})

    def run(folder: str, stop: int = 0) -> list[float]:
        def progress(step: int, *rest: object) -> None:
            if step == stop:
                raise KeyboardInterrupt

        return [row["loss"] for row in execute(case, Mesh(), progress=progress, folder=tmp_path / folder).losses]

    with pytest.raises(KeyboardInterrupt):
        run("cut", stop=5)
    assert [p.name for p in (tmp_path / "cut" / "checkpoints").iterdir()] == ["step-000003"]
    assert run("cut") == run("whole")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FLOAT64, FLOAT32, BF16])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_ten_steps_equal_torch_on_a_device(dtype, clip):
    for leaf, other, states in (pair for pairs in side_by_side(dtype, "cuda", clip=clip, fused=True) for pair in pairs):
        for got, want in [(leaf.detach(), other.detach()), *states]:
            if dtype == BF16:
                # a weight near zero is the difference of larger ones: half an ulp of those (above 2^-6), not its own
                torch.testing.assert_close(got, want, rtol=2**-6, atol=2**-14)
            else:
                assert float((got - want).norm() / want.norm()) < {FLOAT64: 1e-14, FLOAT32: 1e-6}[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FLOAT32, BF16])
def test_a_step_on_a_device_waits_for_nothing(dtype):
    parameters = leaves(dtype, "cuda")
    optimizer = AdamW(parameters, OPTIM)
    factor = torch.tensor(0.5, device="cuda")
    give(parameters, 0)
    optimizer.step(1e-3, factor)  # compiles
    before = [leaf.detach().clone() for leaf in parameters]
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step(2e-3, factor)
        with pytest.raises(RuntimeError, match="synchroniz"):
            factor.item()  # what would be seen
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert optimizer.steps == 2 and not any(map(torch.equal, before, parameters))
