"""The sampler's cost: the interval is Student's, and a planted cost is found."""
import math

import pytest
import torch

from suite.measure import nvml
from suite.measure import overhead as measured


def test_the_bound_is_students():
    """Two pairs with ratios 1.02 and 0.98: mean of logs near 0, t(1, 0.95) = 6.3138."""
    ratio, upper = measured.bound([(1.02, 1.0), (0.98, 1.0)])
    logs = math.log(1.02), math.log(0.98)
    assert ratio == pytest.approx(math.exp(sum(logs) / 2))
    assert upper == pytest.approx(ratio * math.exp(6.313752 * (logs[0] - logs[1]) / 2), rel=1e-6)
    with pytest.raises(ValueError, match="1 pairs"):
        measured.bound([(1.0, 1.0)])


class Running:
    """A sampler that says whether it samples."""

    now = False
    reason = None

    def __init__(self, *_: object, **__: object):
        self.started = True

    def __bool__(self) -> bool:
        return self.started

    def __enter__(self):
        Running.now = True
        return self

    def __exit__(self, *_: object) -> None:
        Running.now = False


class Trainer:
    """A step takes one tick, and 10 % more while something samples."""

    device, mesh = torch.device("cpu"), None

    def __init__(self, clock):
        self.clock = clock

    def barrier(self) -> None:
        pass

    def step(self, number: int) -> None:
        self.clock.now += 1.1 if Running.now else 1.0


class Ticks:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_a_planted_cost_is_found_and_both_blocks_start_a_sampler(monkeypatch):
    ticks = Ticks()
    monkeypatch.setattr(nvml, "Sampler", Running)
    monkeypatch.setattr("suite.measure.clock.time", ticks)
    ratio, upper = measured.overhead(Trainer(ticks), pairs=4, steps=5)
    assert ratio.value == pytest.approx(1.1) and upper.value == pytest.approx(1.1) and ratio.n == 4
    assert not Running.now


def test_without_a_gpu_there_is_a_reason(monkeypatch):
    monkeypatch.setattr(nvml, "Sampler", type("None", (Running,), {"__bool__": lambda self: False, "reason": "no GPU"}))
    [metric] = measured.overhead(Trainer(Ticks()), pairs=2, steps=1)
    assert metric.value is None and metric.reason == "no GPU"
