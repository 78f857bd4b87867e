"""Trains a tiny model on one or several ranks and brings home its losses and whole gradients, for tests of equality."""
from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, field

import torch
from ranks import run_ranks

from suite.assemble import assemble
from suite.case import Case, Optim
from suite.checkpoint import whole
from suite.mesh import Mesh
from suite.optimizer import AdamW
from suite.workload import models

WIRE = {"float64": "fp64", "float32": "fp32", "bf16": "bf16"}
VOCAB = 200  # padded to 256: the last rank's columns hold padding
LR = 3e-4  # at 3e-3 Adam turns rounding of near-zero gradients into whole steps, and float32 losses part by 8e-6


@dataclass
class Trained:
    losses: list[float]
    first: dict[str, torch.Tensor] = field(repr=False)  # whole gradients of the first step
    last: dict[str, torch.Tensor] = field(repr=False)
    traffic: list = field(repr=False)
    replicated: dict[str, str] = field(repr=False)  # digest of replicated parameters at the end

    def furthest(self, other: Trained, step: str = "last") -> float:
        """Largest ‖Δg‖ / max(‖g‖, 1e-3·‖all g‖) over tensors."""
        mine, theirs = getattr(self, step), getattr(other, step)
        assert mine.keys() == theirs.keys()
        total = torch.stack([g.norm() for g in mine.values()]).norm()
        return max(float((g - theirs[n]).norm() / torch.maximum(g.norm(), 1e-3 * total)) for n, g in mine.items())


def case_of(model: str, layout, tp: int, precision: str, comm=None, dp: int = 1, **more) -> Case:
    return Case(model=model, layout=layout, mesh={"tp": tp, "dp": dp}, precision=precision, comm=comm or WIRE[precision],
                data={"text": "random", "seq": 32, "batch": 4}, **more)


def _train(mesh: Mesh, row: dict, steps: int, layers: int | None = None) -> tuple:
    case = Case(**row)
    card = models()[case.model]
    made = assemble(case, mesh, VOCAB, {**card, "layers": layers or card["layers"]})
    model, weights = made.model, made.model.weights
    optimizer = AdamW(weights.leaves.values(), Optim(lr=LR, clip=1.0))
    generator = torch.Generator().manual_seed(1)
    table = torch.randint(0, VOCAB, (VOCAB,), generator=generator)
    local = case.data.batch // mesh.dp
    losses, kept, traffic = [], {}, []
    for step in range(steps):
        ids = torch.randint(0, VOCAB, (case.data.batch, case.data.seq), generator=generator)
        ids = ids[mesh.dp_index * local:(mesh.dp_index + 1) * local]
        made.counter.reset()
        loss = model.loss(ids, table[ids])  # a rule that a model can learn: the next token is a fixed function of this one
        loss.backward()
        made.gradients.settle()
        if step in (0, steps - 1):
            kept[step] = {m.name: whole(weights.gradient(m.name), m.spec, made.tp).clone() for m in weights.members.values()}
        _, factor = made.gradients.clip(optimizer.optim.clip)
        optimizer.step(LR, factor)
        optimizer.zero()
        losses.append(loss.item())
        traffic = traffic or [row for row in made.counter.snapshot() if row.purpose != "checkpoint"]
    replicated = {m.name: hashlib.sha256(weights.local(m.name).detach().numpy().tobytes()).hexdigest()
                  for m in weights.members.values() if m.spec.dim is None}
    return losses, kept[0], kept[steps - 1], traffic, replicated


@functools.lru_cache
def _cached(text: str, steps: int, layers: int | None) -> list[Trained]:
    row = Case.model_validate_json(text)
    if row.mesh.ranks == 1:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        found = [_train(Mesh(), row.row(), steps, layers)]
        torch.set_num_threads(threads)
    else:
        found = run_ranks(_train, row.mesh.ranks, row.row(), steps, layers, dp=row.mesh.dp)
    return [Trained(*parts) for parts in found]


def everyone(case: Case, steps: int, layers: int | None = None) -> list[Trained]:
    """What every rank brings home. layers: of the model, as many as its card says where None."""
    return _cached(case.model_dump_json(), steps, layers)


def train(model: str, layout, tp: int, precision: str, steps: int, layers: int | None = None, **more) -> Trained:
    """Rank 0's."""
    return everyone(case_of(model, layout, tp, precision, **more), steps, layers)[0]


def counts(trained: Trained) -> dict[tuple[str, str, str], tuple[int, int]]:
    """(way, op, purpose) -> (calls, elements) of the first step."""
    found: dict[tuple[str, str, str], tuple[int, int]] = {}
    for row in trained.traffic:
        key = row.way, row.op, row.purpose
        calls, elements = found.get(key, (0, 0))
        found[key] = calls + row.calls, elements + row.elements
    return found
