"""Checkpoints: unsharded names, one tensor a projection, safetensors; no pickle.

    <folder>/step-000200/
        weights-00001.safetensors ...    every member by name and whole shape
        optimizer-00001.safetensors ...  exp_avg/<name>, exp_avg_sq/<name>
        parts-00001.safetensors          <part>/<tensor>: state of OutControl, OsciReset ...
        state.json                       step, case, losses so far, which file holds which tensor

Another tp or layout of the same factor reads the same files: each rank takes its slices by `Spec`. A checkpoint is written
beside and renamed when whole, so that a cut leaves the one before.
"""
from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from suite.optimizer import KINDS
from suite.record import CaseFailed
from suite.seams import Spec
from suite.weights import Weights

FILE_BYTES = 4 << 30


class CheckpointError(CaseFailed):
    """One line: the file, the tensor, what is wrong."""


class Reader:
    """Tensors of a folder (or one file) of safetensors by name, a slice at a time. Raises CheckpointError."""

    def __init__(self, path: Path):
        self.path = path
        files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{path.name}: no checkpoint: no safetensors file")
        self.where: dict[str, Path] = {}
        for file in files:
            with self._open(file) as handle:
                self.where |= dict.fromkeys(handle.keys(), file)

    def _open(self, file: Path):
        try:
            return safe_open(file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file.name}: truncated or not a safetensors file: {error}") from None

    def shape(self, name: str) -> tuple[int, ...]:
        with self._open(self._file(name)) as handle:
            return tuple(handle.get_slice(name).get_shape())

    def read(self, name: str, shape: tuple[int, ...], spec: Spec = Spec(), index: int = 0, size: int = 1) -> Tensor:  # noqa: B008
        """The slice that rank `index` of `size` holds of a tensor of whole `shape`."""
        file = self._file(name)
        with self._open(file) as handle:
            found = handle.get_slice(name)
            if tuple(found.get_shape()) != tuple(shape):
                raise CheckpointError(f"{file.name}: {name}: shape {tuple(found.get_shape())}, expected {tuple(shape)}")
            if spec.dim is None:
                return handle.get_tensor(name)
            start, length = spec.span(shape, index, size)
            cut = [slice(None)] * len(shape)
            cut[spec.dim] = slice(start, start + length)
            return found[tuple(cut)].contiguous()

    def _file(self, name: str) -> Path:
        if name not in self.where:
            raise CheckpointError(f"{self.path.name}: no tensor {name!r}")
        return self.where[name]


class _Writer:
    """Collects tensors on the first rank and writes a file whenever `FILE_BYTES` are full."""

    def __init__(self, folder: Path, stem: str):
        self.folder, self.stem, self.held, self.bytes, self.files = folder, stem, {}, 0, 0

    def add(self, name: str, tensor: Tensor) -> None:
        self.held[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self.bytes += self.held[name].nbytes
        if self.bytes >= FILE_BYTES:
            self.flush()

    def flush(self) -> None:
        if self.held:
            self.files += 1
            path = self.folder / f"{self.stem}-{self.files:05d}.safetensors"
            save_file(self.held, path)
            _sync(path)
            self.held, self.bytes = {}, 0


def _sync(path: Path) -> None:
    """To the disk, so that what is renamed later is whole after a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def whole(local: Tensor, spec: Spec, tp: Any) -> Tensor:
    """A sharded tensor gathered over the group, exactly; every rank calls it."""
    if spec.dim is None or tp.size == 1:
        return local
    gathered, _ = tp.run("all_gather", local.contiguous(), dim=spec.dim, site=(-1, "checkpoint"), way="step", purpose="checkpoint")
    pieces = gathered.chunk(tp.size, spec.dim)
    return torch.cat(pieces[::spec.copies(tp.size)], spec.dim)


def initialise(weights: Weights, path: Path, card: Any, vocab: int) -> None:
    """Weights from a checkpoint: ours by its names, else Hugging Face's. Raises CheckpointError or PretrainedError."""
    from suite.pretrained import load_into

    if not path.exists():
        raise CheckpointError(f"init: {path}: no such file or folder")
    if path.is_dir() and any(path.glob("weights-*.safetensors")):
        load_weights(weights, path)
    else:
        load_into(weights, path, card, vocab)


def load_weights(weights: Weights, path: Path) -> None:
    """Our own checkpoint into the weights of this rank, whatever mesh wrote it. Raises CheckpointError."""
    reader = Reader(path)
    with torch.no_grad():
        for member in weights.members.values():
            weights.local(member.name).copy_(reader.read(member.name, member.shape, member.spec, weights.index, weights.size))


def save_weights(weights: Weights, folder: Path, tp: Any, first: bool) -> None:
    """Weights alone, as `init:` reads them. Every rank of one replica calls it; `first` writes."""
    _save(folder, "weights", ((m.name, weights.local(m.name), m.spec) for m in weights.members.values()), tp, first)


def _save(folder: Path, stem: str, tensors: Iterator[tuple[str, Tensor, Spec]], tp: Any, first: bool) -> None:
    writer = _Writer(folder, stem)
    if first:
        folder.mkdir(parents=True, exist_ok=True)
    for name, local, spec in tensors:
        tensor = whole(local, spec, tp)
        if first:
            writer.add(name, tensor)
    if first:
        writer.flush()


class Checkpoint:
    """Saves and resumes one trainer. `folder` belongs to one case."""

    def __init__(self, folder: Path, trainer: Any):
        self.folder, self.trainer = folder, trainer
        self.weights: Weights = trainer.assembled.model.weights
        self.tp = trainer.assembled.tp
        self.first = trainer.mesh.rank == 0

    def write(self, step: int, losses: list[dict[str, float]]) -> None:
        """After `step` steps. Every rank calls it."""
        if self.trainer.mesh.dp_index == 0:
            part = self.folder / f".step-{step:06d}"
            try:
                if self.first:
                    shutil.rmtree(part, ignore_errors=True)
                    part.mkdir(parents=True)
                save_weights(self.weights, part, self.tp, self.first)
                _save(part, "optimizer", self._states(), self.tp, self.first)
                _save(part, "parts", self._parts(), self.tp, self.first)
                if self.first:
                    self._publish(part, step, losses)
            except BaseException:
                if self.first:
                    shutil.rmtree(part, ignore_errors=True)
                raise
        self.trainer.barrier()

    def _publish(self, part: Path, step: int, losses: list[dict[str, float]]) -> None:
        specs = {f"{one.name}/{key}": [spec.dim, spec.parts]
                 for one in self.trainer.parts for key, (_, spec) in one.state().items()}
        state = {"step": step, "case": self.trainer.case.row(), "losses": losses, "parts": specs}
        (part / "state.json").write_text(json.dumps(state), encoding="utf-8")
        _sync(part / "state.json")
        _sync(part)
        done = self.folder / f"step-{step:06d}"
        shutil.rmtree(done, ignore_errors=True)
        part.rename(done)
        _sync(self.folder)
        for old in sorted(self.folder.glob("step-*"))[:-1]:
            shutil.rmtree(old)

    def _states(self) -> Iterator[tuple[str, Tensor, Spec]]:
        for kind in KINDS:
            for member in self.weights.members.values():
                yield f"{kind}/{member.name}", self.weights.local(member.name, self._state_of(kind)), member.spec

    def _state_of(self, kind: str) -> Callable[[str], Tensor]:
        return lambda leaf: self.trainer.optimizer.state[self.weights.leaves[leaf]][kind]

    def _parts(self) -> Iterator[tuple[str, Tensor, Spec]]:
        for part in self.trainer.parts:
            for name, (tensor, spec) in part.state().items():
                yield f"{part.name}/{name}", tensor, spec

    def resume(self) -> tuple[int, list[dict[str, float]]]:
        """(first step to run, losses so far) from the newest checkpoint; (0, []) where there is none."""
        found = sorted(self.folder.glob("step-*"))
        newest = self.folder / f"step-{self._agreed(int(found[-1].name.partition('-')[2]) if found else 0):06d}"
        if not found:
            return 0, []
        try:
            state = json.loads((newest / "state.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{newest.name}/state.json: {error}") from None
        kept, now = ({k: v for k, v in row.items() if k != "save"} for row in (state["case"], self.trainer.case.row()))
        if kept != now:
            key = next(k for k in now if kept.get(k) != now[k])
            raise CheckpointError(f"{newest.name}: written by a case with another {key}: {kept.get(key)} instead of {now[key]}")
        reader = Reader(newest)
        self.trainer.optimizer.steps = state["step"]
        with torch.no_grad():
            for member in self.weights.members.values():
                where = member.shape, member.spec, self.weights.index, self.weights.size
                self.weights.local(member.name).copy_(reader.read(member.name, *where))
                for kind in KINDS:
                    self.weights.local(member.name, self._state_of(kind)).copy_(reader.read(f"{kind}/{member.name}", *where))
        for part in self.trainer.parts:
            slices = {}
            for name, (dim, parts) in state["parts"].items():
                if name.startswith(f"{part.name}/"):
                    where = Spec(dim, parts), self.weights.index, self.weights.size
                    slices[name.partition("/")[2]] = reader.read(name, reader.shape(name), *where)
            part.load(slices)
        return state["step"], state["losses"]

    def _agreed(self, step: int) -> int:
        """The step that every rank has found. Raises CheckpointError where machines do not share the folder."""
        ends = torch.tensor([step, -step], dtype=torch.float64, device=self.trainer.device)
        for wire in (self.tp, self.trainer.assembled.dp):
            ends, _ = wire.run("max", ends, site=(-1, "checkpoint"), way="step", purpose="checkpoint")
        newest, oldest = int(ends[0]), -int(ends[1])
        if newest != oldest:
            raise CheckpointError(f"checkpoints: one rank finds step {newest}, another step {oldest}: the folder must be shared")
        return newest
