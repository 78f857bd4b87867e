"""OsciReset: it flags what oscillates, sets it onto its code, keeps its schedule, and goes on with the same bits."""
import math
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError

from suite.case import Case
from suite.precision.operand import nearness
from suite.precision.oscireset import OsciReset
from suite.precision.tetrajet import build
from suite.seams import Spec
from suite.weights import Member, Weights

PERIOD, WINDOW = 10, 4
LEAF = "layers.0.ffn.up.weight"
ALONE = SimpleNamespace(size=1, index=0)


def made(share=1.0, tau=4.0, start=0.0, control=None, d_out=16, d_in=128, steps=100, index=0, size=1):
    """(part, the leaf it watches) of a model that is one matrix."""
    spec = Spec(dim=0) if size > 1 else Spec()
    weights = Weights([Member(LEAF, (d_out, d_in), 0.02, spec)], {}, index=index, size=size, device=torch.device("cpu"),
                      dtype=torch.float32)
    weights.initialise(3)
    recipe = build(out=0.0, osci=tau)
    part = OsciReset(weights, SimpleNamespace(tp=ALONE), recipe, control, tau=tau, start=start, period=PERIOD, window=WINDOW,
                     share=share)
    part.begin(SimpleNamespace(steps=steps), None)
    return part, weights.leaves[LEAF].data


def edges(part, weight):
    """A weight moved to just below and just above the decision edge that is nearest to it."""
    scale = part.recipe.weight(weight, None, ALONE)[2]
    z = weight.abs() / scale
    low, high = (torch.full_like(z, n) for n in (0.249, 0.251))
    return low * scale, high * scale


def swing(part, weight, steps, where=(0, 5)):
    """One weight jumps over an edge and back at every step, its block's largest stays; one other drifts."""
    low, high = edges(part, weight)
    for step in steps:
        weight[where] = (high if step % 2 else low)[where]
        weight[3, 7] += 1e-7
        part.after_step(step, None)


def test_a_weight_that_swings_is_set_onto_its_code_and_no_other():
    part, weight = made()
    before = weight.clone()
    swing(part, weight, range(WINDOW + 2))
    value, _, scale = part.recipe.weight(weight, None, ALONE)
    assert weight[0, 5] == value[0, 5] and weight[0, 5] in (0.0, (0.5 * scale)[0, 5])
    others = torch.ones_like(weight, dtype=torch.bool)
    others[0, 5] = others[3, 7] = False
    assert torch.equal(weight[others], before[others])
    assert weight[3, 7] != before[3, 7]
    found = part.metrics()
    assert found["oscireset_windows"] == 1
    assert found["oscireset_flagged"] == 1 / weight.numel()
    assert found["oscireset_flips_per_flagged"] == WINDOW


def test_risk_is_jumps_over_moves():
    """Written out for one weight over one window, step by step."""
    part, weight = made()
    moved = jumped = 0.0
    trail = []
    generator = torch.Generator().manual_seed(0)
    for step in range(WINDOW + 1):
        if step:
            weight += 0.002 * torch.randn(weight.shape, generator=generator)
        trail.append((weight.clone(), part.recipe.weight(weight, None, ALONE)[0]))
        part.after_step(step, None)
    for (w0, q0), (w1, q1) in pairwise(trail):
        moved, jumped = moved + (w1 - w0).abs(), jumped + (q1 - q0).abs()
    flagged = part.windows[LEAF].flagged(part.tau)
    ratio = jumped / moved
    clear = (ratio - part.tau).abs() > 1e-3
    assert torch.equal(flagged[clear], (ratio >= part.tau)[clear])
    assert 0 < int(flagged.sum()) < flagged.numel() / 2


def test_a_reset_moves_no_neighbour():
    """Quantising the reset weights gives the same codes and, within rounding of the outer scale, the same values."""
    part, weight = made(tau=1e-3)
    swing(part, weight, range(WINDOW + 1))
    value, code, _ = part.recipe.weight(weight, None, ALONE)
    part.windows[LEAF].moved.fill_(1e-9)
    part.windows[LEAF].jumped.fill_(1.0)
    part.after_step(WINDOW + 1, None)
    assert torch.equal(weight, value)
    again = part.recipe.weight(weight, None, ALONE)
    assert torch.equal(again[1], code)
    assert torch.allclose(again[0], value, rtol=3e-7, atol=0)


@pytest.mark.parametrize(("start", "steps", "first"), [(0.64, 100, 64), (8000, 12505, 8000), (0.0, 100, 0)])
def test_schedule_is_scaled_to_the_run(start, steps, first):
    part, _ = made(start=start, steps=steps)
    assert part.first == first
    for step in range(max(0, first - PERIOD), first):
        part.after_step(step, None)
    assert not part.windows
    snapshot = math.ceil(first / PERIOD) * PERIOD
    part.after_step(snapshot, None)
    assert part.windows
    part.after_step(snapshot + WINDOW + 1, None)
    assert not part.windows and part.metrics()["oscireset_windows"] == 1


def test_the_memory_efficient_variant_waits_for_its_start_and_watches_a_share():
    part, weight = made(share=0.1, start=20)
    swing(part, weight, range(WINDOW + 2))
    assert not part.windows and part.metrics()["oscireset_windows"] == 0
    swing(part, weight, range(20, 20 + WINDOW + 1))
    window = part.windows[LEAF]
    assert len(window.index) == len(window.moved) == round(0.1 * weight.numel())
    part.after_step(20 + WINDOW + 1, None)
    value = part.recipe.weight(weight, None, ALONE)[0]
    assert weight[0, 5] == value[0, 5], "the weight at an edge is among those watched"


def test_nearness_is_one_at_every_edge_and_never_more():
    codes = torch.tensor([0, .5, 1, 1.5, 2, 3, 4, 6])
    edge = torch.tensor([.25, .75, 1.25, 1.75, 2.5, 3.5, 5])
    for side in (-1e-6, 1e-6):
        z = edge + side
        code = codes[(z[:, None] - codes).abs().argmin(1)]
        assert torch.allclose(nearness(z, 2 * code, torch.ones(7)), torch.ones(7), atol=1e-5)
    assert float(nearness(codes, 2 * codes, torch.ones(8)).max()) < 1e-6
    z = torch.linspace(0, 6.3, 1000)
    near = nearness(z, 2 * codes[(z[:, None] - codes).abs().argmin(1)], torch.ones(1000))
    assert float(near.min()) >= 0 and float(near.max()) <= 1


@pytest.mark.parametrize("share", [1.0, 0.1])
@pytest.mark.parametrize("cut", [0, 2, WINDOW, WINDOW + 1, PERIOD + 1])
def test_a_resume_within_a_window_gives_the_same_bits(cut, share):
    whole, weight = made(share)
    swing(whole, weight, range(2 * PERIOD))
    first, here = made(share)
    swing(first, here, range(cut + 1))
    saved = {name: tensor.clone() for name, (tensor, _) in first.state().items()}
    rest, there = made(share)
    there.copy_(here)
    rest.load(saved)
    swing(rest, there, range(cut + 1, 2 * PERIOD))
    assert torch.equal(there, weight)
    assert rest.metrics() == whole.metrics()


def test_where_the_state_is_missing_the_window_is_skipped():
    part, weight = made()
    part.load({})
    swing(part, weight, range(2, PERIOD))
    assert part.metrics()["oscireset_windows"] == 0
    swing(part, weight, range(PERIOD, PERIOD + WINDOW + 2))
    assert part.metrics()["oscireset_windows"] == 1


@pytest.mark.parametrize("share", [1.0, 0.1])
def test_state_lies_as_the_weights_do(share):
    """Two shards loaded from a whole one, and the reverse, track what they would have tracked."""
    part, weight = made(share)
    swing(part, weight, range(3))
    state = part.state()
    for index in range(2):
        shard, _ = made(share, index=index, size=2)
        shard.load({name: spec_of(name).local(tensor, index, 2) for name, (tensor, _) in state.items()})
        window = shard.windows[LEAF]
        mine = {name: tensor for name, (tensor, _) in shard.state().items()}
        for field in ("moved", "jumped", "flips", "first", "watched"):
            assert torch.equal(mine[f"{LEAF}.{field}"], state[f"{LEAF}.{field}"][0].chunk(2)[index]), field
        assert window.moved.shape == window.jumped.shape


def spec_of(name):
    return Spec(dim=0) if name.startswith("layers.") else Spec()


def test_a_window_in_which_channels_were_chosen_is_dropped():
    control = SimpleNamespace(chosen=False, chosen_at=None, sites={})
    part, weight = made(control=control)
    swing(part, weight, range(3))
    assert part.windows
    control.chosen_at = 3
    part.after_step(3, None)
    assert not part.windows
    part.after_step(WINDOW + 1, None)
    assert part.metrics()["oscireset_windows"] == 0


def test_a_period_shorter_than_its_window_is_refused():
    with pytest.raises(ValueError, match="period of 5 steps is too short for a window of 4: it takes 6"):
        OsciReset(None, None, None, tau=8.0, period=5, window=4)
    with pytest.raises(ValidationError, match="osci_period: 51 is too short for a window of 50: it takes 52 steps"):
        Case(model="gpt-tiny", precision={"name": "tetrajet", "osci_period": 51})
    Case(model="gpt-tiny", precision={"name": "tetrajet", "osci_period": 51, "osci": 0})
