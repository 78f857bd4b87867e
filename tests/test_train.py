"""Training: it learns real text, repeats bit for bit, resumes bit for bit, moves between meshes, and fails in one line."""
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from ranks import RankError, run_ranks

from suite.assemble import assemble
from suite.case import Case, Optim
from suite.checkpoint import CheckpointError, Reader, save_weights
from suite.mesh import Mesh
from suite.precision.plain import Plain
from suite.record import CaseFailed
from suite.seams import Spec
from suite.train import _numerics, execute
from suite.trainer import Trainer, rate

TEXT = {"text": "random", "seq": 32, "batch": 4}


@pytest.fixture
def words(tmp_path: Path) -> dict:
    """A small text of one's own: a rule that can be learnt."""
    lines = [f"{a} plus {b} is {a + b} and {b} plus {a} is {a + b} too.\n\n" for a in range(60) for b in range(60)]
    file = tmp_path / "sums.txt"
    file.write_text("".join(lines), encoding="utf-8")
    return {"text": str(file), "tokenizer": 300, "seq": 32, "batch": 8}


def small(**more) -> Case:
    return Case(model="gpt-tiny", precision="float32", **more)


def run(case: Case, folder: Path, mesh: Mesh | None = None):
    return execute(case, mesh or Mesh(), progress=lambda *_: None, folder=folder)


def run_rank(mesh: Mesh, row: dict, folder: str):
    outcome = run(Case(**row), Path(folder), mesh)
    return outcome.losses, {m.name: m.value for m in outcome.metrics}


def test_it_learns_and_repeats_bit_for_bit(words, tmp_path):
    case = small(data=words, steps=40)
    first, second = run(case, tmp_path), run(case, tmp_path)
    assert first.losses == second.losses
    assert [m for m in first.metrics if m.name.endswith("_loss")] == [m for m in second.metrics if m.name.endswith("_loss")]
    assert first.losses[0]["loss"] == pytest.approx(math.log(300), abs=0.3)
    valid = next(m for m in first.metrics if m.name == "validation_loss")
    assert valid.value < first.losses[0]["loss"] - 1.5
    assert first.facts["deterministic"] is True
    assert run(small(data=words, steps=40, seed=1), tmp_path).losses != first.losses


def test_a_cut_run_goes_on_with_the_same_bits(words, tmp_path):
    whole = run(small(data=words, steps=12), tmp_path / "whole")
    case = small(data=words, steps=12, save=5)
    with pytest.raises(KeyboardInterrupt):
        execute(case, Mesh(), progress=_stop_at(8), folder=tmp_path / "cut")
    saved = [p.name for p in (tmp_path / "cut" / "checkpoints").iterdir()]
    assert saved == ["step-000005"]
    rest = run(case, tmp_path / "cut")
    assert rest.losses == whole.losses
    assert _validation(rest) == _validation(whole)


def _validation(outcome) -> float:
    return next(m.value for m in outcome.metrics if m.name == "validation_loss")


def _stop_at(last: int):
    def progress(step: int, *_: object) -> None:
        if step == last:
            raise KeyboardInterrupt

    return progress


def test_a_checkpoint_of_another_case_is_refused_by_key(words, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        execute(small(data=words, steps=12, save=5), Mesh(), progress=_stop_at(8), folder=tmp_path)
    with pytest.raises(CheckpointError, match="another steps: 12 instead of 14"):
        run(small(data=words, steps=14, save=5), tmp_path)


@pytest.mark.parametrize("damage", ["cut", "lost", "state"])
def test_a_damaged_checkpoint_is_named(words, tmp_path, damage):
    case = small(data=words, steps=12, save=5)
    with pytest.raises(KeyboardInterrupt):
        execute(case, Mesh(), progress=_stop_at(8), folder=tmp_path)
    folder = tmp_path / "checkpoints" / "step-000005"
    weights = folder / "weights-00001.safetensors"
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    elif damage == "lost":
        weights.unlink()
    else:
        (folder / "state.json").write_text("{", encoding="utf-8")
    named = {"cut": "weights-00001.safetensors: truncated", "lost": "no tensor 'embed.weight'", "state": "state.json"}[damage]
    with pytest.raises(CheckpointError, match=named) as caught:
        run(case, tmp_path)
    assert "\n" not in str(caught.value)


def _save(mesh: Mesh, row: dict, folder: str) -> None:
    made = assemble(Case(**row), mesh, 300)
    save_weights(made.model.weights, Path(folder), made.tp, mesh.rank == 0)


@pytest.mark.ranks
@pytest.mark.parametrize("model", ["qwen-tiny", "olmo2-tiny"])
def test_weights_move_between_meshes_and_layouts(words, tmp_path, model):
    """Saved by four ranks, of which two hold the same K/V heads; read by one rank and by two in another layout."""
    saved = tmp_path / "weights"
    common = {"model": model, "precision": "float64", "data": words, "steps": 3, "optim": {"lr": 1e-4}}
    run_ranks(_save, 4, Case(**common, mesh={"tp": 4}, comm="fp64", seed=7).row(), str(saved))
    names = Reader(saved).where
    assert "layers.0.attention.q.weight" in names and not any("+" in name for name in names)
    alone = run(Case(**common, init=str(saved)), tmp_path / "one")
    split = Case(**common, init=str(saved), mesh={"tp": 2}, comm="fp64", layout="megatron-sp")
    losses, _ = run_ranks(run_rank, 2, split.row(), str(tmp_path / "two"))[0]
    assert [row["loss"] for row in losses] == pytest.approx([row["loss"] for row in alone.losses], abs=1e-9)
    drawn = run(Case(**common, seed=7), tmp_path / "drawn")
    assert drawn.losses[0]["loss"] != alone.losses[0]["loss"], "another data order, so another batch"


def test_a_checkpoint_of_another_shape_names_the_tensor(words, tmp_path):
    run_save = Case(model="gpt-tiny", precision="float32", data=words)
    _save(Mesh(), run_save.row(), str(tmp_path / "gpt"))
    with pytest.raises(CheckpointError, match=r"embed.weight: shape \(384, 128\), expected \(512, 128\)"):
        run(Case(model="gpt-tiny", precision="float32", data={**words, "tokenizer": 400}, init=str(tmp_path / "gpt")), tmp_path)
    with pytest.raises(CheckpointError, match="no such file"):
        run(Case(model="gpt-tiny", precision="float32", data=words, init=str(tmp_path / "none")), tmp_path)


def test_a_loss_that_is_no_number_names_the_step(words, tmp_path, monkeypatch):
    ordinary = Trainer.step

    def poisoned(self, step):
        if step == 3:
            self.model.weights.leaves["norm.weight"].data[0] = math.nan
        return ordinary(self, step)

    monkeypatch.setattr(Trainer, "step", poisoned)
    with pytest.raises(CaseFailed, match="loss is nan at step 3"):
        run(small(data=words, steps=8), tmp_path)


@pytest.mark.ranks
def test_accumulation_and_replicas_see_the_same_batch(words, tmp_path):
    """One pass, four micro-batches, and two replicas of two micro-batches: one loss."""
    common = {"model": "qwen-tiny", "precision": "float64", "steps": 4, "optim": {"lr": 1e-4}}
    whole = run(Case(**common, data=words), tmp_path)
    pieces = run(Case(**common, data={**words, "micro": 2}), tmp_path)
    case = Case(**common, data={**words, "micro": 2}, mesh={"dp": 2}, comm={"dp": "fp64"})
    losses, _ = run_ranks(run_rank, 2, case.row(), str(tmp_path / "dp"), dp=2)[0]
    for other in (pieces.losses, losses):
        assert [row["loss"] for row in other] == pytest.approx([row["loss"] for row in whole.losses], abs=1e-9)
        assert [row["grad_norm"] for row in other] == pytest.approx([row["grad_norm"] for row in whole.losses], rel=1e-9)


@pytest.mark.ranks
def test_a_speed_run_measures_what_it_says(words, tmp_path):
    case = Case(model="gpt-tiny", precision="bf16", data=words, mesh={"tp": 2}, comm="int8", measure="speed", steps=4)
    _, metrics = run_ranks(run_rank, 2, case.row(), str(tmp_path))[0]
    assert metrics["tokens_per_second"] == pytest.approx(8 * 32 / (metrics["step_time"] / 1e3))
    assert metrics["wall_step_time"] == metrics["step_time"]
    assert 0 < metrics["comm_share"] <= 100 and metrics["validation_loss"] is None and metrics["mfu"] is None
    elements = 9 * 8 * 32 * 128  # embedding and twice a layer, four layers
    assert metrics["payload_bytes_forward"] >= elements * (1 + 4 / 128)


def test_the_rate_warms_up_and_falls_to_its_floor():
    optim = Optim(lr=1.0, floor=0.1, warmup=0.1)
    rates = [rate(optim, step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and max(rates) == pytest.approx(1.0) and rates[-1] == pytest.approx(0.1)
    assert rates[9] == pytest.approx(1.0) and all(a > b for a, b in pairwise(rates[10:]))


class Tally:
    """A part with one number a weight of one map (sharded as the map is) and one for all: it counts steps."""

    name = "tally"

    def __init__(self, weights):
        self.member = weights.members["layers.1.ffn.up.weight"]
        self.seen = torch.zeros_like(weights.local(self.member.name))
        self.steps = torch.zeros(1)

    def after_step(self, step, weights):
        self.seen += weights.local(self.member.name).detach().abs()
        self.steps += 1

    def buffers(self):
        return {"layers.1.ffn.up.tally": self.seen}

    def metrics(self):
        return {"tally_steps": float(self.steps)}

    def state(self):
        return {"seen": (self.seen, self.member.spec), "steps": (self.steps, Spec())}

    def load(self, state):
        for name, tensor in state.items():
            getattr(self, name).copy_(tensor)


class Tallied(Plain):
    """float64 with a part; its products find the part's buffer in the layer that has one."""

    def __init__(self):
        super().__init__(torch.float64, torch.float64)
        self.found = set()

    def parts(self, weights, layout):
        return [Tally(weights)]

    def matmul(self, x, w, site, noise, product, p):
        if "ffn.up.tally" in p:
            self.found.add(site)
        first, rows, start = product.maps[-1]
        assert rows <= len(w) - first and product.columns[1] >= x.shape[1] and start % rows == 0
        return super().matmul(x, w, site, noise, product, p)


def _resume(mesh: Mesh, row: dict, folder: str, stop: int | None):
    case = Case(**row)
    try:
        outcome = execute(case, mesh, progress=_stop_at(stop) if stop and mesh.rank == 0 else lambda *_: None, folder=Path(folder))
    except KeyboardInterrupt:
        return None
    return {m.name: m.value for m in outcome.metrics}, outcome.losses


def test_a_part_is_saved_sharded_and_read_back_on_another_mesh(words, tmp_path):
    """Saved by one rank after step 4; two ranks each take their slice."""
    common = {"model": "gpt-tiny", "precision": "test_train:Tallied", "data": words, "steps": 6, "save": 4, "optim": {"lr": 1e-4}}
    whole, _ = _resume(Mesh(), Case(**common).row(), str(tmp_path / "whole"), None)
    assert whole["tally_steps"] == 6.0
    assert _resume(Mesh(), Case(**common).row(), str(tmp_path / "cut"), 5) is None
    again, losses = _resume(Mesh(), Case(**common).row(), str(tmp_path / "cut"), None)
    assert again == whole and len(losses) == 6
    folder = tmp_path / "cut" / "checkpoints" / "step-000004"
    reader = Reader(folder)
    member = assemble(Case(**common), Mesh(), 300).parts[0].member
    half = reader.read("tally/seen", member.shape, member.spec, 1, 2)
    assert half.shape[0] * 2 == member.shape[0] and float(half.sum()) > 0


def test_buffers_of_a_part_reach_the_products_of_their_layer():
    data = {"text": "random", "seq": 16, "batch": 2}
    made = assemble(Case(model="gpt-tiny", precision="test_train:Tallied", data=data), Mesh(), 300)
    ids = torch.zeros(2, 16, dtype=torch.int64)
    made.model.loss(ids, ids).backward()
    assert {layer for layer, _ in made.model.layout.precision.found} == {1}


def test_tokens_that_do_not_divide_are_refused_before_training(words):
    odd = {**words, "seq": 33, "batch": 1}
    with pytest.raises(RankError, match="layout megatron-sp: 33 tokens of a micro-batch do not divide over 2 ranks"):
        run_ranks(run_rank, 2, small(data=odd, mesh={"tp": 2}, layout="megatron-sp").row(), "unused")


def test_each_case_says_what_does_not_repeat():
    """Of several in one process; torch and Python warn once where they can. Timed cases take any algorithm."""
    def ran(measure):
        with _numerics(Case(model="gpt-tiny", measure=measure)) as warned:
            torch.zeros(4).put_(torch.tensor([1]), torch.ones(1))
            attention = torch.backends.cuda.cudnn_sdp_enabled()
        return warned, attention

    usual, always = torch.backends.cuda.cudnn_sdp_enabled(), torch.is_warn_always_enabled()
    assert usual
    assert [ran("loss"), ran("speed"), ran("loss")] == [({"put_"}, False), (set(), True), ({"put_"}, False)]
    assert torch.backends.cuda.cudnn_sdp_enabled() == usual and torch.is_warn_always_enabled() == always
    assert not torch.are_deterministic_algorithms_enabled()
