"""The seams: what a value of an axis must be, as protocols. Model and training loop are written against these alone.

T tokens of this replica's micro-batch, D hidden, F feed-forward, R width of a factor, H heads, p ranks of a group.

    one sublayer = edge -> core -> edge          (attention with a norm over all heads: edge -> core -> edge -> core -> edge)
    one edge     = before -> meet -> after       ranks meet only in `meet`; between two meets lies one local segment

A value is loaded by name from its own file (`suite/<axis>/<name>.py`, dashes as underscores) by `load`; that file holds
a factory named `build`. `package.module:Name` loads from elsewhere.
"""
from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from suite.case import Choice

Op = Literal["none", "all_reduce", "reduce_scatter", "all_gather", "max"]  # "max" is never compressed
Way = Literal["forward", "backward", "step"]  # "step": once a step (gradients, norms), not once a micro-batch
Site = tuple[int, str]  # (layer, linear map): names a product in noise, masks, counters and FLOPs


@dataclass(frozen=True)
class Key:
    """Noise = Philox(key, site, operand, global element index). No process rank: replicas agree.

    `site`, `way` and `operand` are filled in by the wire for what codecs draw, so that no two messages of a micro-batch share
    noise; of a partial sum the operand says whose, so that errors of partial sums are independent.
    """

    seed: int = 0
    step: int = 0
    micro: int = 0
    dp: int = 0
    site: Site = (0, "")
    way: Way = "forward"
    operand: str = ""


@dataclass(frozen=True)
class Product:
    """Where the operands of one product lie in the unsharded model; the same in every layer.

    maps: the stacked maps as (first local row, rows, first row in the unsharded map) of the weight. columns: (first input
    feature held here, features of the whole map). x holds all tokens of the micro-batch. wire: over which its shards lie.
    """

    name: str
    maps: tuple[tuple[int, int, int], ...]
    columns: tuple[int, int]
    wire: Any


@dataclass(frozen=True)
class Spec:
    """Where a tensor lies over the tensor-parallel group. Initialisation, checkpoints, clipping and noise use only this.

    dim: the sharded dimension, None where every rank holds all of it.
    parts: shards along `dim`; fewer than ranks where neighbours hold the same shard (K/V heads, n_kv < tp); None: one a rank.
    partial: each rank's gradient covers only its own tokens, so the sum over the group is the gradient.
    """

    dim: int | None = None
    parts: int | None = None
    partial: bool = False

    def shard(self, index: int, size: int) -> tuple[int, int]:
        """(which shard, of how many) rank `index` of `size` holds; (0, 1) where replicated."""
        if self.dim is None:
            return 0, 1
        parts = min(self.parts or size, size)
        if size % parts:
            raise ValueError(f"{parts} shards do not divide over {size} ranks")
        return index // (size // parts), parts

    def copies(self, size: int) -> int:
        """How many ranks hold each element."""
        return size // self.shard(0, size)[1]

    def span(self, shape: Sequence[int], index: int, size: int) -> tuple[int, int]:
        """(start, length) of the local slice along `dim` of a tensor of global `shape`."""
        if self.dim is None:
            return 0, shape[0] if len(shape) else 1
        shard, parts = self.shard(index, size)
        if shape[self.dim] % parts:
            raise ValueError(f"dimension {self.dim} of {tuple(shape)} does not divide by {parts}")
        length = shape[self.dim] // parts
        return shard * length, length

    def local(self, full: Tensor, index: int, size: int) -> Tensor:
        """This rank's slice of a whole tensor (a view)."""
        if self.dim is None:
            return full
        return full.narrow(self.dim, *self.span(full.shape, index, size))


class Codec(Protocol):
    """comm/<name>.py: floats <-> bytes. Knows no process group and no autograd.

    `native`: the dtype that the transport itself can add and ship (such a codec needs no method below `nbytes`), or None
    where only bytes cross. Optional: `name`, `group` (elements that the wire pads a row to a multiple of), `route`
    (suite/comm/route.py: which messages cross so, and by which way), `nonfinite` (a count),
    `nonfinite_at` (counts by site and operand), `axis` (token: the wire moves the last dimension first before it cuts rows).
    Rows are what one rank gets: encode and decode take [n] and [r, n], and the bytes of a row may lie at any offset.
    """

    native: object | None

    def nbytes(self, numel: int) -> int: ...
    def encode(self, x: Tensor, out: Tensor, key: Key) -> None: ...  # x [..., n] float, out [..., nbytes(n)] uint8
    def decode(self, wire: Tensor, out: Tensor) -> None: ...  # out [..., n] of any float dtype
    def reduce(self, wires: Sequence[Tensor], out: Tensor) -> None: ...  # p wires [nbytes(n)] -> [n], rank order
    def reencode(self, wires: Sequence[Tensor], numel: int, out: Tensor, key: Key) -> None: ...  # encode(reduce(wires))


class Factor(Protocol):
    """factor/<name>.py: how a linear map is written. Part of the model: it changes the function, the parameters and the FLOPs.

    crosses: a latent of each factored map goes on to the next layer. plain_gate: a gated feed-forward layer's gate has no
    activation. between: what stands between A and B of a factored map, elementwise on [T, r].
    """

    crosses: bool
    plain_gate: bool

    def factored(self, site: Site) -> bool: ...
    def shapes(self, site: Site, d_in: int, d_out: int) -> Mapping[str, tuple[int, int]]: ...
    def std(self, site: Site, d_in: int, d_out: int, dense: float) -> float: ...
    def flops(self, site: Site, d_in: int, d_out: int, tokens: int) -> int: ...
    def between(self, y: Tensor, past: Tensor | None) -> Tensor: ...


class Precision(Protocol):
    """precision/<name>.py: forward, dX and dW of one product. x [T, d_in], w [d_out, d_in] -> [T, d_out].

    noise: int64 [4] on the device (seed, step, micro-batch, replica), an argument of the compiled block, so that a new step
    compiles nothing. p: the layer's leaves by name and the buffers that parts contribute.

    Optional, for `graph: true` (suite/recorded.py): `recordable`, whether a replay of its products is the step; `phase(step)`, the
    same where the host does the same in both steps, None where it must run; `drawn(device)`, what replays read their draws from.
    """

    compute: Any  # dtype of activations
    master: Any  # dtype of weights and optimizer states
    residual: Any  # dtype of the residual stream

    def matmul(self, x: Tensor, w: Tensor, site: Site, noise: Tensor, product: Product, p: Mapping[str, Tensor]) -> Tensor: ...


class Edge(Protocol):
    """Ranks meet once, between two local halves. `exact` statistics are summed in float32 and never compressed."""

    def before(self, *xs: Tensor) -> tuple[Sequence[Tensor], Tensor | None]: ...
    def meet(self, ys: Sequence[Tensor], exact: Tensor | None) -> tuple[Sequence[Tensor], Tensor | None]: ...
    def after(self, ys: Sequence[Tensor], exact: Tensor | None) -> Sequence[Tensor]: ...


class Layout(Protocol):
    """layout/<name>.py. Never changes the function: all layouts of one factor give one loss and one set of gradients.

    A sublayer is a chain of edges with local cores between them, given as a list edge, core, edge (, core, edge ...).
    """

    tp: Any  # the wire
    factor: Factor
    precision: Precision
    recompute: str  # none | segment | layer
    recompute_ends: bool  # whether segment also recomputes what lies before a sublayer's first meet and behind its last

    def refuse(self, tokens: int) -> str | None: ...  # reason, before anything is trained
    def spec(self, param: str, shape: Sequence[int]) -> Spec: ...
    def groups(self, names: Sequence[str]) -> Mapping[str, Sequence[str]]: ...  # leaf -> members stacked in it
    def attention(self, p: Mapping[str, Tensor], layer: int, noise: Tensor, core: Callable) -> list: ...
    def feed_forward(self, p: Mapping[str, Tensor], layer: int, noise: Tensor, core: Callable) -> list: ...
    def embed(self, p: Mapping[str, Tensor], ids: Tensor) -> Tensor: ...
    def head(self, p: Mapping[str, Tensor], x: Tensor, targets: Tensor, vocab: int) -> Tensor: ...  # loss
    def logits(self, p: Mapping[str, Tensor], x: Tensor) -> Tensor: ...
    def executed_flops(self, tokens: int, seq: int, vocab: int) -> int: ...  # with replicated and recomputed work


class Part(Protocol):
    """Whatever has state beside weights: OutControl, OsciReset, error feedback.

    A precision, layout or codec that has parts gives them by `parts(weights, layout)`. Their state is local and reshards by
    its Spec as weights do. buffers: tensors by full name (`layers.3.ffn.down.mask`) that products of that layer read.
    Optional: `begin(case, dp)`, called once before anything runs, with the data-parallel wire; `units` of metrics off "1".
    """

    name: str

    def after_step(self, step: int, weights: Any) -> None: ...
    def buffers(self) -> Mapping[str, Tensor]: ...
    def metrics(self) -> Mapping[str, float]: ...
    def state(self) -> Mapping[str, tuple[Tensor, Spec]]: ...
    def load(self, state: Mapping[str, Tensor]) -> None: ...  # local slices; what is absent starts anew


def load(axis: str, name: str) -> Callable:
    """The factory of a value: `build` of its file, or the named object of `package.module:Name`."""
    module, _, attribute = name.partition(":")
    if not attribute:
        module, attribute = module_of(axis, name), "build"
    return getattr(importlib.import_module(module), attribute)


def module_of(axis: str, name: str) -> str:
    """The module that holds a value: `suite.comm.int8`; a value from outside names its own."""
    return name.partition(":")[0] if ":" in name else f"suite.{axis}.{name.replace('-', '_')}"


def make(axis: str, choice: Choice, **context):
    """Builds the value that a case chose, its options and the surroundings as keyword arguments."""
    return load(axis, choice.name)(**choice.options, **context)
