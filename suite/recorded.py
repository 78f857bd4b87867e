"""A training step's passes recorded once as a CUDA graph and replayed: one call of the host where it issued thousands.

A step of a few thousand tokens takes the host longer to issue than the GPU to run: its time is then Python's, and how ranks wait
for each other. A recorded step is the GPU's alone, of the plain wire as of a codec.

    call 1 to EAGER     run as they are, which compiles, calibrates and makes the memory that messages lie in
    the next one        recorded: forward and backward passes, messages, settling and clipping of gradients. Then replayed
    later ones          new inputs are copied to where the recorded ones lay, and the graph is replayed

The update of the weights stays outside, as its rate is a number of the host. What crosses is counted at every replay as it was
while the step was recorded.

What the host draws or decides in a step would be the same at every replay. Codecs and precisions whose passes hold nothing of that
kind say so (`recordable`); a step with another one is not recorded. FP4 recipes draw keys: these are read from the device, where
`before` writes them ahead of every replay (suite/precision/draws.py).

Between two replays lies a collective of the library over each group whose ranks read each other's memory (suite/comm/direct.py):
the sum of the gradients' norm over tp, at the end of the recorded step, and the mean of the loss over dp behind it. So no rank
writes what a peer still reads.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from suite.comm.counter import Counter

EAGER = 3


_alive: WeakValueDictionary[torch.device, CudaGraph] = WeakValueDictionary()
_streams: dict[torch.device, torch.cuda.Stream] = {}  # one a device: cuBLAS keeps a workspace for every stream it ever saw


class CudaGraph:
    """How a function of no arguments is run, recorded and replayed, in a stream beside the usual one.

    Graphs of one device that live at once share it and their memory, so that two models hold the activations of one: they are never
    replayed at once, and what a replay gives must be used up before another graph's, which may write over it."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.graph = device, torch.cuda.CUDAGraph()
        other = _alive.get(device)
        # kept: the memory is given back with the last graph that records into it. The first one, so that those between can go
        self.owner = other and (other.owner or other)
        self.stream = _streams.get(device) or _streams.setdefault(device, torch.cuda.Stream(device))
        self.pool = other.pool if other else torch.cuda.graph_pool_handle()
        _alive[device] = self

    def run(self, function: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
        here = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            found = function()
        here.wait_stream(self.stream)
        return found

    def record(self, function: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
        # thread_local: the library's own threads ask for events meanwhile
        with torch.cuda.graph(self.graph, self.pool, self.stream, capture_error_mode="thread_local"):
            return function()

    def replay(self) -> None:
        self.graph.replay()


class Recorded:
    """`passes(inputs)` for tensors of the same shapes at every call, on the device or in pinned memory; others are a ValueError.
    It must leave gradients at `leaves`, which are dropped between calls, and give tensors; both hold until the next replay of any
    graph of the device. around: what lies around the passes that the host issues, given whether they run or are recorded; before:
    called ahead of every replay."""

    def __init__(self, passes: Callable[[Sequence[Tensor]], Sequence[Tensor]], leaves: Iterable[Tensor], counter: Counter,
                 graph: CudaGraph, around: Callable[[bool], AbstractContextManager] = nullcontext,
                 before: Callable[[], object] = lambda: None) -> None:
        self.passes, self.leaves, self.counter, self.graph = passes, list(leaves), counter, graph
        self.around, self.before = around, before
        self.calls = 0
        self.counted = Counter()
        self.inputs: list[Tensor] = []
        self.gradients: list[Tensor | None] = []
        self.outputs: Sequence[Tensor] = ()

    def __call__(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        self.calls += 1
        if self.calls <= EAGER:
            with self.around(True):
                return self.graph.run(lambda: self.passes(inputs))
        if not self.inputs:
            held = [one.to(self.leaves[0].device, copy=True) for one in inputs]
            with self.counter.aside() as self.counted, self.around(False):
                self.outputs = self.graph.record(lambda: self.passes(held))
            self.inputs, self.gradients = held, [leaf.grad for leaf in self.leaves]
        for number, (mine, one) in enumerate(zip(self.inputs, inputs, strict=True)):
            if mine.shape != one.shape or mine.dtype != one.dtype:
                raise ValueError(f"recorded step: input {number}: {one.dtype} {tuple(one.shape)}, recorded with {mine.dtype} "
                                 f"{tuple(mine.shape)}")
            mine.copy_(one, non_blocking=True)
        self.before()
        self.graph.replay()
        self.counter.include(self.counted)
        for leaf, gradient in zip(self.leaves, self.gradients):
            leaf.grad = gradient
        return self.outputs


