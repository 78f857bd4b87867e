"""One model under training on one rank.

A step: gradient accumulation over micro-batches -> gradients settled over ranks -> clipped by the global norm -> AdamW under
a cosine schedule with warm-up. Weights are kept in the precision's `master` dtype.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from suite import data as text
from suite.assemble import assemble
from suite.case import Case, Optim
from suite.checkpoint import initialise
from suite.mesh import Mesh
from suite.optimizer import AdamW
from suite.record import CaseFailed
from suite.recorded import EAGER, CudaGraph, Recorded
from suite.seams import Key
from suite.workload import models

VALIDATION = 64  # sequences


def rate(optim: Optim, step: int, steps: int) -> float:
    """Learning rate of a step (0-based): linear warm-up, then a cosine down to `floor`."""
    warm = optim.warmup * steps
    if step < warm:
        return optim.lr * (step + 1) / math.ceil(warm)
    along = (step - warm) / max(1.0, steps - 1 - warm)
    return optim.lr * (optim.floor + (1 - optim.floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, along))))


def _usual_adamw(parameters: list[Tensor], o: Optim) -> torch.optim.AdamW:
    """torch's own, fused, decay on matrices only."""
    groups = [{"params": [p for p in parameters if p.ndim > 1], "weight_decay": o.decay},
              {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, fused=True)


class Trainer:
    """One model under training on this rank. `step` enqueues a whole step and returns its loss and gradient norm as tensors."""

    def __init__(self, case: Case, mesh: Mesh):
        self.case, self.mesh, self.device = case, mesh, mesh.device
        self.card = models()[case.model]
        prepared = text.prepare(case.data, self.card["vocab"])
        self.tokens, self.vocab, self.digest = prepared.open(), prepared.vocab_size, prepared.digest
        self.parts: list = []
        if case.implementation == "transformers":
            from suite import peer

            self.model = peer.build(case, self.card, self.vocab, self.device)
            self.assembled, self.optimizer = None, _usual_adamw(self.model.parameters(), case.optim)
        else:
            self.assembled = assemble(case, mesh, self.vocab)
            self.model, weights = self.assembled.model, self.assembled.model.weights
            if case.init is not None:
                initialise(weights, Path(case.init), self.card, self.vocab)
            self.parts = self.assembled.parts
            self.optimizer = AdamW(weights.leaves.values(), case.optim)
        self.micro_batches = case.data.batch // (case.mesh.dp * case.micro)

        self.recorded: Recorded | None = None
        self.phase: Hashable = None
        self.still = False  # steps at rate 0: weights stay what they are
        if case.graph:
            self._recordable()

    def batch(self, step: int, micro: int) -> tuple[Tensor, Tensor]:
        """(ids, targets) [micro, seq] of this replica."""
        first = (self.mesh.dp_index * self.micro_batches + micro) * self.case.micro
        rows = self.tokens.batch(step, self.case.seed, range(first, first + self.case.micro), self.case.data.seq)
        return self._pair(torch.from_numpy(rows))

    def _pair(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        if self.device.type == "cuda":
            rows = rows.pin_memory().to(self.device, non_blocking=True)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def step(self, step: int) -> tuple[Tensor, Tensor]:
        lr = 0.0 if self.still else rate(self.case.optim, min(step, self.case.steps - 1), self.case.steps)
        micros = range(self.micro_batches)
        if not self.assembled:
            total = None
            for micro in micros:
                total = self._pass(*self.batch(step, micro), total)
            return total, self._usual_update(lr)
        self.keys = [Key(self.case.seed, step, micro, self.mesh.dp_index) for micro in micros]
        inputs = [t for micro, key in zip(micros, self.keys) for t in (*self.batch(step, micro), self._named(key))]
        passes = self._played(step) if self.case.graph else self._passes
        total, norm, factor = passes(inputs)
        if self.recorded:
            total, norm = total.clone(), norm.clone()  # the next replay writes over them
        total = self._mean(total)
        self.optimizer.step(lr, factor)
        self.optimizer.zero()
        for part in self.parts:
            part.after_step(step, self.model.weights)
        return total, norm

    def _played(self, step: int) -> Callable[[Sequence[Tensor]], Sequence[Tensor | None]]:
        """The passes of a step as a graph, or as they are where the precision says so. A graph serves the steps of one phase of the
        precision, in which the host does the same in each: channels are chosen between two phases."""
        precision = self.model.layout.precision
        phase = getattr(precision, "phase", lambda step: 0)(step)
        if phase != self.phase:
            self.recorded, self.phase = None, phase
        if phase is None:
            return self._passes
        if self.recorded is None:
            more = {}
            if hasattr(precision, "drawn"):
                draws = precision.drawn(self.device)
                more = {"around": lambda runs: draws.read(self.keys if runs else None), "before": lambda: draws.fill(self.keys)}
            self.recorded = Recorded(self._passes, self.model.weights.leaves.values(), self.assembled.counter,
                                     CudaGraph(self.device), **more)
        return self.recorded

    @property
    def replays(self) -> bool:
        """Whether the last step was a replay, or a recording that was then replayed."""
        return self.recorded is not None and self.recorded.calls > EAGER

    def _passes(self, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
        """(loss, gradient norm, clipping factor), the gradients at the leaves. inputs: ids, targets, name of each micro-batch."""
        total = None
        for ids, targets, named, key in zip(inputs[::3], inputs[1::3], inputs[2::3], self.keys):
            self.model.noise.copy_(named, non_blocking=True)
            for wire in (self.assembled.tp, self.assembled.dp):
                wire.key = key
            total = self._pass(ids, targets, total)
        self.assembled.gradients.settle()
        return total, *self.assembled.gradients.clip(self.case.optim.clip)

    def _pass(self, ids: Tensor, targets: Tensor, total: Tensor | None) -> Tensor:
        """The sum of losses so far, one micro-batch more."""
        loss = self.model.loss(ids, targets) / self.micro_batches
        loss.backward()
        return loss.detach() if total is None else total + loss.detach()

    def _usual_update(self, lr: float) -> Tensor:
        """Clipping and AdamW as users of transformers have them; returns the gradient norm."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.case.optim.clip or math.inf, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def barrier(self) -> None:
        """Returns once every rank has come here."""
        if self.assembled:
            for wire in (self.assembled.tp, self.assembled.dp):
                wire.barrier()

    def _named(self, key: Key) -> Tensor:
        """The micro-batch's name in the noise of products on the CPU; on a GPU those too take the key itself."""
        # in pinned memory: a copy from pageable memory would wait for the device
        return torch.tensor([key.seed, key.step, key.micro, key.dp], pin_memory=self.device.type == "cuda")

    def _recordable(self) -> None:
        """Raises CaseFailed where a replayed step would not be the step."""
        codecs = [codec for wire in (self.assembled.tp, self.assembled.dp) for codec in wire.codecs.values()]
        for one in (*codecs, self.model.layout.precision):
            if not getattr(one, "recordable", False):
                name = getattr(one, "name", type(one).__name__)
                raise CaseFailed(f"graph: {name}: what it draws or decides on the host would be the same at every replay")

    def nonfinite(self) -> str:
        """The first message of this rank that held a NaN or Inf when it was encoded, for people; empty where none did."""
        found = self.assembled.tp.nonfinite_at if self.assembled else {}
        named = [f"; NaN or Inf in layer {layer}, {name}, {operand}" for ((layer, name), operand), count in found.items() if count]
        return named[0] if named else ""

    def _mean(self, loss: Tensor) -> Tensor:
        """Mean over replicas."""
        dp = self.assembled.dp
        if dp.size == 1:
            return loss
        total, _ = dp.run("all_reduce", loss.reshape(1), site=(-1, "loss"), way="step", purpose="loss")
        return total.reshape(()) / dp.size

    @torch.no_grad()
    def validate(self) -> tuple[float, int]:
        """(mean loss over fixed windows of the validation split, how many windows). The same windows for every case."""
        rows = torch.from_numpy(self.tokens.validation(self.case.data.seq, VALIDATION))
        if len(rows) > self.case.micro:  # whole micro-batches, as in training
            rows = rows[:len(rows) // self.case.micro * self.case.micro]
        losses = [self.model.loss(*self._pair(piece)) * len(piece) for piece in rows.split(self.case.micro)]
        return (torch.stack(losses).sum() / len(rows)).item(), len(rows)
