"""Models that train under quantised products: compiled, recomputed, resumed, over ranks; and what their records say."""
from collections import Counter as Tally
from pathlib import Path

import pytest
import torch
from parity import case_of, everyone, train
from ranks import run_ranks
from safetensors import safe_open

from suite.assemble import assemble
from suite.case import Case
from suite.mesh import Mesh
from suite.record import CaseFailed
from suite.train import execute

TEXT = {"text": "random", "seq": 32, "batch": 4}
BASE = {"name": "tetrajet", "out": 0, "osci": 0}
# both parts within a dozen steps: channels scored over 1 and 2, windows 5 .. 8 and 10 .. 13
FULL = {"name": "tetrajet", "out": 0.1, "out_start": 1, "out_steps": 2, "osci": 1.0, "osci_start": 4, "osci_period": 5,
        "osci_window": 2}


@pytest.fixture
def words(tmp_path: Path) -> dict:
    """A small text of one's own with a small vocabulary."""
    lines = [f"{a} plus {b} is {a + b} and {b} plus {a} is {a + b} too.\n\n" for a in range(40) for b in range(40)]
    file = tmp_path / "sums.txt"
    file.write_text("".join(lines), encoding="utf-8")
    return {"text": str(file), "tokenizer": 300, "seq": 32, "batch": 4}


@pytest.fixture(autouse=True)
def little_validation(monkeypatch):
    monkeypatch.setattr("suite.trainer.VALIDATION", 4)


def run(case, folder, mesh=None, progress=lambda *_: None):
    return execute(case, mesh or Mesh(), progress=progress, folder=folder)


def metrics(outcome):
    return {metric.name: metric for metric in outcome.metrics}


def gradients(case, key=(0, 3, 1, 0), compile=False):
    """Loss and gradients of one micro-batch."""
    made = assemble(case.model_copy(update={"compile": compile}), Mesh(), 200)
    made.model.noise.copy_(torch.tensor(key))
    ids = torch.randint(0, 200, (4, 32), generator=torch.Generator().manual_seed(0))
    loss = made.model.loss(ids, ids)
    loss.backward()
    return loss.detach(), {name: leaf.grad for name, leaf in made.model.weights.leaves.items()}


@pytest.mark.parametrize("precision", [BASE, "nvfp4", "mxfp4", "fp8"])
def test_recomputed_gradients_are_the_same_bits(precision):
    loss, kept = gradients(Case(model="qwen-tiny", precision=precision, data=TEXT))
    again, other = gradients(Case(model="qwen-tiny", precision=precision, data=TEXT,
                                  layout={"name": "megatron", "recompute": "segment"}))
    assert torch.equal(loss, again)
    assert all(torch.equal(grad, other[name]) for name, grad in kept.items())


def test_compiled_is_eager():
    """One graph for all layers, one key a tensor: another step compiles nothing."""
    frames = []

    def backend(graph, inputs):
        frames.append(graph)
        return graph.forward

    case = Case(model="qwen-tiny", precision=BASE, data=TEXT)
    loss, eager = gradients(case)
    ordinary = torch.compile
    try:
        torch.compile = lambda f, **options: ordinary(f, backend=backend, **options)
        compiled, got = gradients(case, compile=True)
        graphs = len(frames)
        other, _ = gradients(case, key=(0, 4, 0, 0), compile=True)
    finally:
        torch.compile = ordinary
        torch.compiler.reset()
    assert torch.allclose(compiled, loss, rtol=1e-5) and torch.equal(other, compiled)
    assert 1 <= graphs <= 2
    for name, grad in eager.items():
        assert float((got[name] - grad).norm()) <= 0.02 * float(grad.norm()) + 1e-7, name


def test_a_cut_run_goes_on_with_the_same_bits(words, tmp_path):
    """Cut within a window: losses, channels and windows are those of the whole run."""
    case = Case(model="gpt-tiny", precision=FULL, data=words, steps=14)
    whole = run(case, tmp_path / "whole")
    assert metrics(whole)["oscireset_windows"].value == 2 and metrics(whole)["outcontrol_retained"].value > 0.09

    def stop(step, *_):
        if step == last:
            raise KeyboardInterrupt

    cut, last = case.model_copy(update={"save": 7}), 8
    with pytest.raises(KeyboardInterrupt):
        run(cut, tmp_path / "cut", progress=stop)
    rest = run(cut, tmp_path / "cut")
    assert rest.losses == whole.losses
    theirs, ours = metrics(whole), metrics(rest)
    assert all(ours[name] == theirs[name] for name in theirs if name.startswith(("outcontrol", "oscireset", "validation")))


def test_each_part_moves_the_loss(words, tmp_path):
    """Off by its option, on after its schedule and not before."""
    arms = {"base": BASE, "out": {**FULL, "osci": 0}, "osci": {**FULL, "out": 0}, "full": FULL}
    curves = {name: [row["loss"] for row in run(Case(model="gpt-tiny", precision=precision, data=words, steps=11), tmp_path).losses]
              for name, precision in arms.items()}
    assert curves["out"][:3] == curves["base"][:3] and curves["out"][3] != curves["base"][3]
    # a reset sets a weight onto what the forward used anyway: only the update after it differs
    assert curves["osci"][:9] == curves["base"][:9] and curves["osci"][10] != curves["base"][10]
    assert curves["full"][:9] == curves["out"][:9]
    assert len({tuple(curve) for curve in curves.values()}) == 4


def test_operands_are_in_the_record(words, tmp_path):
    found = metrics(run(Case(model="gpt-tiny", precision=BASE, data=words, steps=2), tmp_path))
    assert found["q1_snr"].unit == "dB" and 18 < found["q1_snr"].value < 23
    assert 13 < found["q6_snr"].value < 18
    assert found["q1_clipped"].value > 0.01 > found["q6_clipped"].value == 0
    assert abs(found["q6_bias"].value) < 0.002
    assert all(found[f"q{n}_nonfinite"].value == 0 for n in range(1, 7))
    assert "q1_snr" not in metrics(run(Case(model="gpt-tiny", data=words, steps=2), tmp_path))


def test_emulated_time_is_called_so(words, tmp_path):
    found = metrics(run(Case(model="gpt-tiny", precision=BASE, data=words, steps=2, measure="speed"), tmp_path))
    timed = "step_time", "tokens_per_second", "window_tokens_per_second", "model_tflops"
    assert {found[name].kind for name in timed} == {"emulated"}
    assert (found["wall_step_time"].kind, found["wall_step_time"].value) == ("measured", found["step_time"].value)
    assert found["mfu"].value is None and "q1_snr" not in found
    plain = metrics(run(Case(model="gpt-tiny", data=words, steps=2, measure="speed"), tmp_path))
    assert plain["tokens_per_second"].kind == "measured"


@pytest.mark.parametrize("precision", ["tetrajet", "nvfp4"])
def test_native_products_are_refused_where_the_hardware_is_not(precision):
    case = Case(model="gpt-tiny", precision={"name": precision, "level": "native"}, data=TEXT)
    with pytest.raises(CaseFailed, match=f"precision {precision}: level native needs FP4 tensor cores"):
        assemble(case, Mesh(), 200)


def test_nonfinite_weights_end_the_run_with_a_reason(words, tmp_path):
    case = Case(model="gpt-tiny", precision=BASE, data=words, steps=3, optim={"lr": 1e30, "warmup": 0})
    with pytest.raises(CaseFailed, match=r"(loss|gradient norm) is (nan|inf) at step"):
        run(case, tmp_path)


@pytest.mark.ranks
@pytest.mark.parametrize(("layout", "tp", "dp"), [
    ("megatron", 2, 1), ("megatron-sp", 2, 1), ("megatron-sp", 4, 1), ("megatron", 1, 2),
])
def test_over_ranks(layout, tp, dp):
    """Replicated parameters stay bit-equal; the loss is one process's within what FP4 blocks of other shards move it."""
    alone = train("qwen-tiny", "megatron", 1, "bf16", 6)
    ranks = everyone(case_of("qwen-tiny", layout, tp, BASE, dict.fromkeys(("tp", "dp"), "fp32"), dp=dp), 6)
    assert all(rank.replicated == ranks[0].replicated for rank in ranks)
    mean = [sum(losses) / len(losses) for losses in zip(*(rank.losses for rank in ranks[::tp]))]
    assert max(abs(a - b) for a, b in zip(alone.losses, mean)) < 0.05
    assert mean != alone.losses


def test_one_tensor_scale_is_a_counted_message():
    """NVIDIA's recipe at TP 2: maxima of sharded operands, uncompressed in float32, in both directions."""
    ranks = everyone(case_of("qwen-tiny", "megatron", 2, "nvfp4", "fp32"), 2)
    sent = Tally()
    for row in ranks[0].traffic:
        if row.purpose == "amax":
            sent[row.op, row.dtype, row.codec] += row.calls
            assert row.elements == row.calls
    assert sum(sent.values()) >= 4 * 4 * 2 and set(sent) == {("max", "float32", "exact")}
    assert not [row for row in everyone(case_of("qwen-tiny", "megatron", 2, BASE, "fp32"), 2)[0].traffic if row.purpose == "amax"]


def tensor_scales(mesh, row):
    made = assemble(Case(**row), mesh, 200)
    precision, found = made.model.layout.precision, {}

    class Watch:
        def operand(self, call, number, operand, x, given):
            if call.layer == 0 and number == 2:
                found[call.name] = float(given.outer.max())

    precision.watchers.append(Watch())
    ids = torch.arange(128).reshape(4, 32) % 200
    made.model.loss(ids, ids).backward()
    return found


@pytest.mark.ranks
def test_one_tensor_scale_is_that_of_the_unsharded_tensor():
    alone = tensor_scales(Mesh(), case_of("qwen-tiny", "megatron", 1, "nvfp4", "fp32").row())
    for found in run_ranks(tensor_scales, 2, case_of("qwen-tiny", "megatron", 2, "nvfp4", "fp32").row()):
        assert found == alone


def test_the_state_of_parts_is_in_the_checkpoint(words, tmp_path):
    """By member, unsharded."""
    case = Case(model="gpt-tiny", precision=FULL, data=words, steps=8, save=6)
    run(case, tmp_path)
    [file] = (tmp_path / "checkpoints").glob("step-000006/parts-*.safetensors")
    with safe_open(file, framework="pt") as handle:
        names = set(handle.keys())
    assert "outcontrol/layers.0.attention.q+k+v.mask" in names and "oscireset/layers.3.ffn.up.weight.moved" in names
