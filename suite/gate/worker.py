"""Times the kernels of the revision that it is started in, a run at a time, as asked by lines of JSON.

    python worker.py DEVICE LARGEST     in the folder of a revision: that one's kernels, this file's harness, for both revisions
    -> {"kernels": [...]}               then, for each {"kernel", "loops"} on standard input, {"seconds"} or {"fault"}

On a CPU: `reference:NAME` is the plain-torch reference where a call moves at most LARGEST bytes, `host:NAME` what building the
launch costs. On a GPU: `NAME`, device time by events, and by graph replay below SHORT. On both what suite/gate/steps.py has. The
cache is flushed before each run. `loops` 0 checks, the first time, and warms up: results that are zeros, not finite, or the same
for other inputs are faults; on a GPU also what differs from the reference, what a graph of the call's stream does not write again
(another stream) and device time that does not cover the call (a sleep). Imports of suite only what is timed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

SHORT = 20e-6  # seconds of device time below which a launch shows
FLUSH = {"cpu": 8 << 20, "cuda": 256 << 20}  # bytes; on a CPU a core's own caches
COVER = {"cpu": 1, "cuda": 16}  # times that they are written: on a GPU a millisecond, in which a busy host queues the call
TARGET = 1e-3  # seconds that a run on the CPU takes at least
SLEEP = 1e-3  # seconds by which the host may be behind three times the device time
ASIDE = "does not run on the stream that it is called on"


def leaves(tree: Any) -> Iterator[Any]:
    import torch
    from torch import Tensor

    if isinstance(tree, Tensor):
        yield tree if tree.dtype.itemsize > 1 else tree.view(torch.uint8)
    elif is_dataclass(tree):
        yield from leaves(vars(tree))
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from leaves(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from leaves(value)


def bits(x: Any) -> Any:
    import torch

    return x.contiguous().flatten().view(torch.uint8)


def print_of(function: Callable, given: dict[str, Any]) -> tuple[list[Any], str | None]:
    """(what the call made or changed, or a fault)."""
    import torch

    before = {name: bits(x).clone() for name, x in given.items() if isinstance(x, torch.Tensor)}
    made = list(leaves(function(**given)))
    made += [given[name] for name, old in before.items() if not torch.equal(bits(given[name]), old)]
    if not made or not any(x.count_nonzero() for x in made):
        return made, "writes nothing but zeros"
    if any(x.is_floating_point() and x.isnan().any() for x in made if x.dtype.itemsize > 1):
        return made, "writes NaN"
    return made, None


def same(one: list[Any], other: list[Any]) -> bool:
    import torch

    return len(one) == len(other) and all(a.shape == b.shape and torch.equal(bits(a), bits(b)) for a, b in zip(one, other))


class Bench:
    """One thing to time: `call()` once; `check()` gives a fault or None."""

    def __init__(self, function: Callable, inputs: Callable[[str, int], dict[str, Any]], device: str,
                 reference: Callable | None = None) -> None:
        self.function, self.inputs, self.device, self.reference = function, inputs, device, reference
        self.given: dict[str, Any] = {}
        self.kept: dict[str, Any] = {}
        self.graph: Any = None
        self.short = False  # timed by replay of a graph

    def check(self) -> str | None:

        first, fault = print_of(self.function, self.inputs(self.device, 0))
        if fault:
            return fault
        first = [x.clone() for x in first]
        second, fault = print_of(self.function, self.inputs(self.device, 1))
        if fault or same(first, second):
            return fault or "gives the same result for other inputs"
        if self.reference is not None:
            want, _ = print_of(self.reference, self.inputs(self.device, 0))
            if len(want) != len(first):
                return "writes other tensors than its reference"
            for got, exact in zip(first, want):
                if (got.double() - exact.double()).norm() > 0.05 * exact.double().norm():
                    return "differs from its reference"
        self.prepare()
        return self.check_device(first) if self.device == "cuda" else None

    def prepare(self) -> None:
        """After `release`, what `seconds` needs; the faults were looked for by `check`."""
        self.given, self.kept = self.inputs(self.device, 0), self.inputs(self.device, 0)
        self.graph = self.captured()[0] if self.short else None

    def check_device(self, first: list[Any]) -> str | None:
        """Whether the call's own stream does the work, and how long it takes. first: what the call makes of these inputs."""
        import torch

        torch.cuda.synchronize()
        spans = []
        for _ in range(5):
            begun = time.perf_counter()
            device = self.events(self.call)
            spans.append((time.perf_counter() - begun, device))
        device = min(device for _, device in spans)
        if min(span for span, _ in spans) > 3 * device + SLEEP:
            return "device time does not cover the call: another stream, or a sleep"
        graph, made = self.captured()
        if graph is None:
            return made or ("cannot be captured in a graph, which is how so short a kernel is timed" if device < SHORT else None)
        for x in made:
            x.zero_()
        self.restore()
        graph.replay()
        torch.cuda.synchronize()
        pairs = [(x, self.given[name]) for name, x in self.kept.items() if isinstance(x, torch.Tensor)]
        changed = [now for old, now in pairs if not same([old], [now])]
        if not same(made + changed, first):
            return ASIDE
        self.short = device < SHORT
        self.graph = graph if self.short else None
        return None

    def captured(self) -> tuple[Any, Any]:
        """(graph of one call, what it makes), or (None, a fault or None) where it cannot be captured."""
        import torch

        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                made = list(leaves(self.function(**self.given)))
        except RuntimeError as error:
            return None, ASIDE if "unjoined" in str(error) else None
        return graph, made

    def call(self) -> None:
        self.function(**self.given)

    def events(self, call: Callable[[], Any]) -> float:
        import torch

        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3

    def restore(self) -> None:
        """Gives what works in place the same values at the start of every run, on both sides."""
        for name, x in self.kept.items():
            if hasattr(x, "copy_"):
                self.given[name].copy_(x)

    def release(self) -> None:
        """Lets go of what it holds; `prepare` comes before it is timed again."""
        self.given, self.kept, self.graph = {}, {}, None

    def seconds(self, loops: int) -> float:
        if self.device == "cuda":
            return self.events(self.graph.replay if self.graph is not None else self.call)
        begun = time.perf_counter()
        for _ in range(loops):
            self.call()
        return (time.perf_counter() - begun) / loops

    def loops(self) -> int:
        self.call()
        return max(1, round(TARGET / max(min(self.seconds(1) for _ in range(3)), 1e-7)))


class Host(Bench):
    """What the host does for one launch; it has no result to check."""

    def check(self) -> str | None:
        self.prepare()
        self.call()
        return None

    def prepare(self) -> None:
        self.given = self.inputs("meta", 0)


def benches(device: str, largest: int) -> dict[str, Any]:
    from kernels.registry import ENTRIES

    more = steps().benches(device)
    if device == "cuda":
        return {e.name: Bench(e.function, e.make, device, e.reference) for e in ENTRIES} | more
    found: dict[str, Any] = {f"reference:{e.name}": Bench(e.reference, e.make, device) for e in ENTRIES if e.traffic <= largest}
    for entry in ENTRIES:
        function = f"host:{entry.name.partition('/')[0]}"
        if function not in found and getattr(entry, "launch", None):
            found[function] = Host(entry.launch, entry.make, "cpu")
    return found | more


def steps() -> Any:
    """The neighbour of this file, which is no module of the revision."""
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("triaxis_gate_steps", Path(__file__).with_name("steps.py"))
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def serve(device: str, largest: int) -> None:
    import torch

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what kernels print is not an answer
    torch.set_num_threads(1)
    known = benches(device, largest)
    junk = torch.empty(FLUSH[device], dtype=torch.uint8, device=device)
    answers.write(json.dumps({"kernels": list(known)}) + "\n")
    answers.flush()
    last, good = None, set()
    for line in sys.stdin:
        ask = json.loads(line)
        bench = known[ask["kernel"]]
        if last is not None and last is not bench:
            last.release()
        last = bench
        try:
            if ask["loops"]:
                bench.restore()
                for _ in range(COVER[device]):
                    junk.zero_()
                answer: dict[str, Any] = {"seconds": bench.seconds(ask["loops"])}
            else:
                fault = bench.prepare() if bench in good else bench.check()
                answer = {"fault": fault} if fault else {"loops": bench.loops()}
                good |= set() if fault else {bench}
        except Exception as error:  # a benchmark that throws is a result
            answer = {"fault": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    sys.path[0] = str(Path.cwd())  # the revision's own modules, not this file's neighbours
    try:
        serve(sys.argv[1], int(sys.argv[2]))
    except KeyboardInterrupt:  # whoever asked says what it means
        sys.exit(130)
