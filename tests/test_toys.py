"""The seams hold: a codec, a layout and a precision written here alone, chosen by name, train to what one process gives.

    codec        `test_toys:Plain4`             float32 as its four bytes: nothing is lost, sums in rank order
    layout       `test_toys:FeedForwardOnly`    only the feed-forward and the vocabulary are split, attention is replicated
    precision    `test_toys:Halves`             float64, each product in two halves of the inner dimension

Nothing in `suite/` knows them; a case names them as anybody's own value: `package.module:Name`.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from parity import VOCAB, case_of, counts, everyone, train
from torch import Tensor

from suite.assemble import assemble
from suite.case import Case
from suite.comm.route import Route
from suite.layout.megatron import Enter, Leave, Megatron
from suite.mesh import Mesh
from suite.seams import Key, Product, Spec
from suite.workload import models

CODEC, LAYOUT, PRECISION = "test_toys:Plain4", "test_toys:FeedForwardOnly", "test_toys:Halves"
STEPS = 20

pytestmark = pytest.mark.ranks


class Plain4:
    """float32 by its bytes. `algorithm` is an option of a case, as those of the built-in codecs are."""

    native = None
    name = "plain4"
    group = 1

    def __init__(self, algorithm: str = "auto"):
        self.route = Route(algorithm=algorithm)

    def nbytes(self, numel: int) -> int:
        return 4 * numel

    def encode(self, x: Tensor, out: Tensor, key: Key) -> None:
        out.copy_(x.to(torch.float32).contiguous().view(torch.uint8))

    def decode(self, wire: Tensor, out: Tensor) -> None:
        out.copy_(self._floats(wire))

    def reduce(self, wires: Sequence[Tensor], out: Tensor) -> None:
        out.copy_(sum(self._floats(wire) for wire in wires))

    def reencode(self, wires: Sequence[Tensor], numel: int, out: Tensor, key: Key) -> None:
        self.encode(sum(self._floats(wire) for wire in wires), out, key)

    @staticmethod
    def _floats(wire: Tensor) -> Tensor:
        return wire.clone(memory_format=torch.contiguous_format).view(torch.float32)  # its bytes may lie at any offset


class Wrong(Plain4):
    """Loses the sign of one element in a thousand."""

    def encode(self, x: Tensor, out: Tensor, key: Key) -> None:
        x = x.clone()
        x[..., ::1000].abs_()
        super().encode(x, out, key)


class Halves:
    """y = x[:, :h] w[:, :h]ᵀ + x[:, h:] w[:, h:]ᵀ, h half of the inner dimension."""

    compute = master = residual = torch.float64

    def matmul(self, x: Tensor, w: Tensor, site, noise: Tensor, product: Product, p: Mapping[str, Tensor]) -> Tensor:
        h = x.shape[-1] // 2
        return x[:, :h] @ w[:, :h].T + x[:, h:] @ w[:, h:].T


class FeedForwardOnly(Megatron):
    """Each rank computes all of attention, so nobody meets there: half of Megatron's all-reduces, more work and memory."""

    def __init__(self, **context):
        super().__init__(**context)
        if self.card["qk_norm"]:
            raise ValueError("layout FeedForwardOnly: a norm over all heads is not split here")
        kv = self.card["kv_heads"] * self.head_size
        self.widths |= {"q": self.card["hidden"], "k": kv, "v": kv}

    def spec(self, param: str, shape: Sequence[int]) -> Spec:
        return Spec() if ".attention." in param else super().spec(param, shape)

    def enter(self, p: Mapping[str, Tensor], layer: int, noise: Tensor, sub: str, names: Sequence[str]) -> Enter:
        return (EnterAlone if sub == "attention" else Enter)(self, p, layer, noise, sub, names)

    def leave(self, p: Mapping[str, Tensor], layer: int, noise: Tensor, sub: str, name: str) -> Leave:
        return (LeaveAlone if sub == "attention" else Leave)(self, p, layer, noise, sub, name)


class EnterAlone(Enter):
    def meet(self, ys, exact):
        return ys, exact


class LeaveAlone(Leave):
    def meet(self, ys, exact):
        return ys, exact


def values(case: Case) -> tuple:
    """(codec, layout, precision) that the case gets."""
    made = assemble(case, Mesh(), VOCAB)
    return made.tp.codecs["forward"], made.model.layout, made.model.layout.precision


def test_a_case_gets_what_it_names():
    case = case_of("gpt-tiny", LAYOUT, 2, PRECISION, {"name": CODEC, "algorithm": "two-shot"})
    codec, layout, precision = values(case)
    assert (type(codec).__name__, type(layout).__name__, type(precision).__name__) == ("Plain4", "FeedForwardOnly", "Halves")
    assert codec.route.algorithm == "two-shot"
    assert "Plain4-algorithm=two-shot" in case.id and "FeedForwardOnly" in case.id and "Halves" in case.id


@pytest.mark.parametrize(
    ("layout", "algorithm", "tp"), [("megatron", "one-shot", 2), ("megatron", "two-shot", 4), ("megatron-sp", "auto", 2)]
)
def test_codec_equals_one_process(layout, algorithm, tp):
    """float32: gradients of step 1 within 1e-5 per tensor, loss within 1e-6 relative over 20 steps."""
    alone = train("qwen-tiny", "megatron", 1, "float32", STEPS)
    split = train("qwen-tiny", layout, tp, "float32", STEPS, comm={"name": CODEC, "algorithm": algorithm})
    assert_equal32(alone, split)
    sent = [row for row in split.traffic if row.purpose == "activations"]
    assert sent and all((row.codec, row.dtype, row.kind) == ("plain4", "uint8", "counted") for row in sent)


@pytest.mark.parametrize(("model", "tp"), [("gpt-tiny", 2), ("qwen-tiny", 4)])
def test_layout_equals_one_process(model, tp):
    """float64: loss within 1e-9 over 20 steps, gradients of the last step within 1e-9 per tensor; half of the meets."""
    alone = train(model, "megatron", 1, "float64", STEPS)
    split = train(model, LAYOUT, tp, "float64", STEPS)
    assert_equal64(alone, split)
    layers = models()[model]["layers"]
    assert [counts(split)[way, "all_reduce", "activations"][0] for way in ("forward", "backward")] == [layers + 1] * 2
    ranks = everyone(case_of(model, LAYOUT, tp, "float64"), STEPS)
    assert any("attention.q" in name for name in ranks[0].replicated)
    assert all(rank.replicated == ranks[0].replicated for rank in ranks)


def test_precision_equals_the_built_in():
    """float64 in another order of summation."""
    alone = train("gpt-tiny", "megatron", 1, "float64", STEPS)
    split = train("gpt-tiny", "megatron", 2, PRECISION, STEPS, comm="fp64")
    assert_equal64(alone, split)
    assert split.losses != alone.losses, "the order of summation shows in the last bits, unless the toy never ran"


def test_all_three_at_once():
    """What crosses is float32, so the loss is judged as float32."""
    alone = train("gpt-tiny", "megatron", 1, "float64", STEPS)
    split = train("gpt-tiny", LAYOUT, 2, PRECISION, STEPS, comm=CODEC)
    assert_equal32(alone, split)
    assert {row.codec for row in split.traffic if row.purpose == "activations"} == {"plain4"}


def assert_equal32(alone, split) -> None:
    assert alone.furthest(split, "first") < 1e-5
    assert max(abs(a - b) / abs(a) for a, b in zip(alone.losses, split.losses)) < 1e-6


def assert_equal64(alone, split) -> None:
    assert alone.furthest(split) < 1e-9
    assert max(abs(a - b) for a, b in zip(alone.losses, split.losses)) < 1e-9
    assert alone.losses[-1] < alone.losses[0] - 0.2, "the model does not learn, so equality would say little"


def test_a_wrong_codec_is_seen():
    """The equality above can fail."""
    alone = train("qwen-tiny", "megatron", 1, "float32", STEPS)
    split = train("qwen-tiny", "megatron", 2, "float32", 2, comm="test_toys:Wrong")
    assert alone.furthest(split, "first") > 1e-5
