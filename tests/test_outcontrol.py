"""OutControl: it finds the loud channels, keeps them in FP8 as the equations say, and keeps its choice."""
from types import SimpleNamespace

import pytest
import torch
from ranks import run_ranks
from tetrajet_checks import free, noise, recipe, whole

from kernels.nvfp4_reference import nvfp4_rounded
from suite.assemble import assemble
from suite.case import Case
from suite.mesh import Mesh
from suite.precision.linear import _backward, _forward
from suite.precision.operand import MXFP8, Operand, Place, fused, quantise
from suite.precision.outcontrol import OutControl, count_of
from suite.record import CaseFailed
from suite.seams import Key, Spec
from suite.workload import models

LOUD = (3, 40, 77, 90, 111, 125)
RATIO = 6 / 128


def case_of(tp=1, dp=1, recompute="none", **options):
    precision = {"name": "tetrajet", "osci": 0, "out": RATIO, "out_start": 1, "out_steps": 2, **options}
    return Case(model="gpt-tiny", layout={"name": "megatron", "recompute": recompute}, mesh={"tp": tp, "dp": dp},
                precision=precision, comm={} if tp * dp == 1 else dict.fromkeys(("tp", "dp"), "fp32"), steps=8,
                data={"text": "random", "seq": 32, "batch": 4})


def build(case, mesh=None):
    made = assemble(case, mesh or Mesh(), 200)
    # the norm before the first sublayer of each layer makes some channels loud
    for name, leaf in made.model.weights.leaves.items():
        if name.endswith("attention.norm.weight"):
            leaf.data[list(LOUD)] = 6.0
    return made, next(part for part in made.parts if part.name == "outcontrol")


def train(made, case, mesh, steps, first=0, micros=1):
    """Forward, backward and the parts' step, as the trainer does; weights stay."""
    generator = torch.Generator().manual_seed(first)
    local = case.data.batch // mesh.dp
    for step in range(first, first + steps):
        for micro in range(micros):
            ids = torch.randint(0, 200, (case.data.batch, 32), generator=generator)[mesh.dp_index * local:][:local]
            key = Key(0, step, micro, mesh.dp_index)
            made.model.noise.copy_(torch.tensor([key.seed, key.step, key.micro, key.dp]))
            for wire in (made.tp, made.dp):
                wire.key = key
            made.model.loss(ids, ids).backward()
        for leaf in made.model.weights.leaves.values():
            leaf.grad = None
        for part in made.parts:
            part.after_step(step, made.model.weights)


def test_it_retains_the_loud_channels_after_its_steps():
    case = case_of()
    made, part = build(case)
    site = part.sites["layers.2.attention.q+k+v"]
    train(made, case, Mesh(), 2)
    assert not part.chosen and len(site.retained) == 0
    train(made, case, Mesh(), 1, first=2)
    assert part.chosen_at == 2
    assert sorted(site.retained.tolist()) == list(LOUD)
    assert sorted([*site.retained.tolist(), *site.rest.tolist()]) == list(range(128))
    assert site.score[site.rest].diff().max() <= 0, "FP4 channels lie in falling order of score"
    kept = {name: one.retained.clone() for name, one in part.sites.items()}
    train(made, case, Mesh(), 2, first=3)
    assert all(torch.equal(kept[name], one.retained) for name, one in part.sites.items())
    assert part.metrics()["outcontrol_retained"] == pytest.approx(RATIO, abs=0.01)
    assert part.metrics()["outcontrol_score_held"] > 1.5 * RATIO


@pytest.mark.parametrize("recompute", ["none", "segment"])
def test_the_score_is_the_sum_of_norms_over_training_forwards(recompute):
    """Every micro-batch once, recomputed or not; validation not at all."""
    case = case_of(recompute=recompute, out_steps=3)
    made, part = build(case)
    inputs = []
    made.model.layout.precision.listeners.append(SimpleNamespace(
        input=lambda call, x: inputs.append((call.wire.key, call.layer, call.name, x.detach().clone()))))
    train(made, case, Mesh(), 3, micros=2)
    with torch.no_grad():
        made.model.loss(torch.zeros(4, 32, dtype=torch.int64), torch.zeros(4, 32, dtype=torch.int64))
    seen = {}
    for key, layer, name, x in inputs:
        if key.step >= 1 and (layer, name) == (1, "ffn.up"):
            seen[key.step, key.micro] = x.float().norm(dim=0)
    assert len(seen) == 4
    assert torch.allclose(part.sites["layers.1.ffn.up"].score, sum(seen.values()), rtol=1e-5)


@pytest.mark.parametrize("level", ["emulated", "slab"])
def test_products_are_those_of_the_equations(level):
    """Y, dX and dW with retained channels, written out from quantised operands."""
    case = case_of(compute="float32", rounding="nearest", hadamard="none", level=level)
    made, part = build(case)
    train(made, case, Mesh(), 3)
    recipe, layout = made.model.layout.precision, made.model.layout
    site = part.sites["layers.1.ffn.up"]
    r, f = site.retained, site.rest
    product, w = layout.product("ffn", ("up",)), made.model.weights.leaves["layers.1.ffn.up.weight"]
    x = torch.randn(64, 128, requires_grad=True)
    y = recipe.matmul(x, w, (1, "ffn.up"), made.model.noise, product, made.model.blocks[1])
    dy = torch.randn(y.shape)
    y.backward(dy)

    def q(number, t):
        return quantise(t, recipe.six[number], torch.float32).values

    def m(t):
        return quantise(t, MXFP8, torch.float32).values

    xr, xf, wr, wf = m(x[:, r]), q(1, x[:, f]), m(w[:, r]), q(2, w[:, f])
    assert torch.allclose(y, xr @ wr.t() + xf @ wf.t(), atol=1e-5)
    dx = torch.empty_like(x)
    dx[:, torch.cat([r, f])] = q(3, dy) @ q(4, torch.cat([wr, wf], 1).t()).t()
    assert torch.allclose(x.grad, dx, atol=1e-5)
    dw = torch.empty_like(w)
    dw[:, f] = q(5, dy.t()) @ q(6, xf.t()).t()
    dw[:, r] = m(dy.t()) @ m(xr.t()).t()
    assert torch.allclose(w.grad, dw, atol=1e-4)
    assert (x - torch.zeros_like(x).index_copy(1, r, xr))[:, r].abs().max() < 0.07 * x[:, r].abs().max()


@pytest.mark.parametrize("operand", [Operand("nvfp4"), MXFP8], ids=lambda one: one.format)
def test_an_operand_is_written_where_it_is_to_lie(operand):
    """On a CPU, and as kernels are asked to."""
    x, place = torch.randn(8, 60).to(torch.bfloat16), Place([(0, 8, 0)], [(0, 60, 0)])
    want = quantise(x, operand, torch.bfloat16, place=place).values
    among = torch.zeros(8, 70, dtype=torch.bfloat16)
    found = [quantise(x, operand, torch.bfloat16, place=place, out=among[:, 5:65])]
    if operand.fusible:
        by, out = SimpleNamespace(rounded=nvfp4_rounded), torch.zeros_like(among)[:, 5:65]
        found.append(fused(x, operand, torch.bfloat16, None, None, place, lambda amax: amax, by=by, out=out))
    for one in found:
        assert one.values.stride() == (70, 1) and torch.equal(one.values, want)
    assert not among[:, :5].any() and not among[:, 65:].any()


@pytest.mark.gpu
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("shape", [(96, 256, 384), (64, 130, 70)], ids=str)
def test_products_by_kernels_are_those_of_plain_torch(shape, rounding):
    """What is kept of X and W bit for bit, Y and gradients within the rounding of sums in another order."""
    t, d_in, d_out = shape
    x, w, dy = (one.cuda() for one in whole(t, d_in, d_out, torch.bfloat16))
    order = torch.randperm(d_in, generator=torch.Generator().manual_seed(0)).cuda()
    place, found = free(d_in, d_out), []
    for quantiser in ("kernels", "eager"):
        made = recipe(rounding=rounding, quantiser=quantiser)
        at = noise().cuda(), order[:d_in // 10], order[d_in // 10:]
        call = *at, 1, place.name, list(place.maps[0]), list(place.columns), place.wire.id, made.id
        y, xq, wq = _forward(x, w, *call, True)
        found.append([xq, wq, y, *_backward(dy, xq, wq, *call)])
    for mine, theirs in zip(found[0][:2], found[1][:2]):
        plain = (x if mine.shape == x.shape else w)[:, order]
        assert torch.equal(mine, theirs) and not torch.equal(mine, plain.to(mine.dtype))
    for mine, theirs in zip(found[0][2:], found[1][2:]):
        assert (mine - theirs).float().norm() < 4e-3 * theirs.float().norm()


@pytest.mark.parametrize(("width", "ratio", "how", "count"), [
    (512, 0.1, "round", 51), (768, 0.1, "round", 77), (1024, 0.1, "round", 102), (512, 0.05, "round", 26),
    (512, 0.1, "pad128", 128), (1024, 0.1, "pad128", 128), (768, 0.1, "pad128", 128), (1536, 0.1, "pad128", 256),
    (4096, 0.1, "pad128", 512), (64, 0.1, "pad128", 0),
])
def test_counts_are_the_papers_and_the_releases(width, ratio, how, count):
    """pad128: the fractions that the release's rule gives at the widths of its three models."""
    assert count_of(width, ratio, how) == count


def test_a_resume_keeps_scores_and_choice():
    """Cut while scoring and after choosing."""
    case = case_of()
    made, part = build(case)
    saved = {}
    for step in range(4):
        train(made, case, Mesh(), 1, first=step)
        saved[step + 1] = {name: tensor.clone() for name, (tensor, _) in part.state().items()}
    for cut in (2, 4):
        made, again = build(case)
        again.load(saved[cut])
        assert again.chosen == (cut == 4)
        for step in range(cut, 4):
            train(made, case, Mesh(), 1, first=step)
        assert again.chosen_at == part.chosen_at == 2
        for name, one in part.sites.items():
            assert torch.equal(one.retained, again.sites[name].retained) and torch.equal(one.rest, again.sites[name].rest)


@pytest.mark.parametrize(("change", "fault"), [
    (lambda s: {k: v for k, v in s.items() if "layers.3" not in k}, "layers.3.attention.o: the frozen channels are of another"),
    (lambda s: {k: v[:64] if "ffn.up.mask" in k else v for k, v in s.items()}, r"shape \(64,\), the map has 128 inputs here"),
    (lambda s: {**s, "layers.9.ffn.up.score": torch.zeros(128)}, "layers.9.ffn.up: the frozen channels are of another model"),
])
def test_a_frozen_set_of_another_model_is_refused(change, fault):
    case = case_of()
    made, part = build(case)
    train(made, case, Mesh(), 3)
    state = {name: tensor.clone() for name, (tensor, _) in part.state().items()}
    with pytest.raises(CaseFailed, match=fault):
        build(case)[1].load(change(state))


def choice(mesh, row):
    case = Case(**row)
    made, part = build(case, mesh)
    train(made, case, mesh, 4)
    return {name: (one.retained.tolist(), one.rest.tolist(), one.score.tolist()) for name, one in part.sites.items()}


@pytest.mark.ranks
def test_replicas_choose_alike_and_as_one_process_with_all_their_tokens():
    """dp 2: scores are sums over both replicas' micro-batches."""
    found = run_ranks(choice, 2, case_of(dp=2).row(), dp=2)
    assert found[0] == found[1]
    alone = choice(Mesh(), case_of().row())
    assert sorted(found[0]["layers.1.attention.q+k+v"][0]) == sorted(alone["layers.1.attention.q+k+v"][0]) == list(LOUD)


@pytest.mark.ranks
@pytest.mark.parametrize("select", ["shard", "global"])
def test_over_tensor_parallel_ranks(select):
    """Inputs that every rank has: one choice. Sharded inputs: k of the local width, or k of the whole."""
    ranks = run_ranks(choice, 2, case_of(tp=2, out_select=select, out=0.1).row())
    for name, one in ranks[0].items():
        if not name.endswith((".o", ".down")):
            assert one == ranks[1][name]
    counts = [[len(rank[f"layers.{layer}.ffn.down"][0]) for layer in range(4)] for rank in ranks]
    whole = models()["gpt-tiny"]["ffn"]
    if select == "shard":
        assert counts == [[round(0.1 * whole / 2)] * 4] * 2
    else:
        assert [a + b for a, b in zip(*counts)] == [round(0.1 * whole)] * 4
        scores = torch.tensor([rank["layers.0.ffn.down"][2] for rank in ranks]).reshape(-1)
        chosen = [*ranks[0]["layers.0.ffn.down"][0], *(whole // 2 + c for c in ranks[1]["layers.0.ffn.down"][0])]
        assert set(chosen) == set(scores.argsort(descending=True)[:round(0.1 * whole)].tolist())


def test_state_reshards():
    """The choice of one process, loaded by each of two ranks: the union is the same."""
    case = case_of(out=0.1)
    made, part = build(case)
    train(made, case, Mesh(), 3)
    whole = part.sites["layers.0.ffn.down"]
    recipe = SimpleNamespace(listeners=[], matrices=lambda weights: {"layers.0.ffn.down.weight": SimpleNamespace(
        spec=Spec(dim=1), shape=(128, 512))})
    union = []
    for index in range(2):
        weights = SimpleNamespace(leaves={"layers.0.ffn.down.weight": torch.zeros(128, 256)})
        shard = OutControl(weights, SimpleNamespace(tp=SimpleNamespace(size=2, index=index)), recipe, ratio=0.1)
        kinds = {"score": whole.score, "mask": whole.mask()}
        state = {f"layers.0.ffn.down.{k}": Spec(dim=0).local(v, index, 2) for k, v in kinds.items()}
        shard.load({"progress": part.state()["progress"][0], **state})
        union += [index * 256 + c for c in shard.sites["layers.0.ffn.down"].retained.tolist()]
    assert sorted(union) == sorted(whole.retained.tolist())


def test_bad_options_are_named():
    with pytest.raises(ValueError, match="outcontrol: order 'size': expected one of norm, index"):
        OutControl(None, None, None, ratio=0.1, order="size")
    with pytest.raises(ValueError, match=r"outcontrol: ratio 1.5: expected a share from 0 to 1"):
        OutControl(None, None, None, ratio=1.5)


def test_a_channel_in_fp8_is_closer_than_in_fp4():
    x = torch.randn(64, 64)
    y = quantise(x, MXFP8, torch.float32).values
    assert float((y - x).norm() / x.norm()) < 0.04
