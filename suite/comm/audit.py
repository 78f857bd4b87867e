"""Sees every collective below the seam, whoever called it, and compares what was seen with what the counter says.

    with Audit(counter) as audit:
        train_a_step()
    audit.check()              # AuditError where a collective passed no wire, or a row claims bytes that did not cross

It watches torch's dispatcher (`torch.ops.c10d`), so it works for every backend, in forward and backward. Inside
torch.compile the seam is opaque to it: audit eager steps. Tried with torch 2.13.
"""
from __future__ import annotations

from collections import defaultdict

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from suite.comm.counter import Counter, difference

# operation of the dispatcher -> (its name in the ledger, whether its first argument is the result and holds the payload)
_OPERATIONS = {
    "allreduce_": ("all_reduce", True),
    "_allgather_base_": ("all_gather", True),
    "_reduce_scatter_base_": ("reduce_scatter", False),
    "alltoall_base_": ("all_to_all", True),
    "barrier": ("barrier", True),
}
_QUIET = {"wait_tensor", "monitored_barrier_"}


class AuditError(AssertionError):
    """What crossed is not what was counted; one line."""


class Audit(TorchDispatchMode):
    """Between entry and exit: `seen`, operation -> [calls, payload bytes], beside what the counter took up meanwhile."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self.counter = counter
        self.seen: dict[str, list[int]] = defaultdict(lambda: [0, 0])

    def __enter__(self) -> Audit:
        self._before = ({op: list(sums) for op, sums in self.counter.messages.items()}, self.counter.snapshot())
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
            name = func._schema.name.split("::")[1]
            if name not in _QUIET:
                op, result = _OPERATIONS.get(name, (name, True))
                tensors = [t for t in tree_leaves(args[0] if result else args[1]) if isinstance(t, Tensor)]
                self.seen[op][0] += 1
                self.seen[op][1] += 0 if op == "barrier" else sum(t.nbytes for t in tensors)
        return func(*args, **(kwargs or {}))

    def check(self) -> None:
        """Raises AuditError where seen and counted differ, in calls, in bytes, or between ledger and rows."""
        messages, rows = self._before
        sent = 0.0
        told: dict[str, list[int]] = {}
        for op, sums in self.counter.messages.items():
            calls, payload, wire = (a - b for a, b in zip(sums, messages.get(op, [0, 0, 0.0])))
            sent += wire
            if calls:
                told[op] = [calls, payload]
        for op in sorted({*self.seen, *told}):
            seen, counted = self.seen.get(op, [0, 0]), told.get(op, [0, 0])
            if seen != counted:
                raise AuditError(f"audit: {op}: {seen[0]} calls with {seen[1]} bytes seen, {counted[0]} with {counted[1]} counted")
        claimed = sum(row.wire_bytes for row in difference(self.counter.snapshot(), rows))
        if abs(claimed - sent) > 1e-6 * max(sent, 1.0):
            raise AuditError(f"audit: rows claim {claimed:g} bytes sent by this rank, its messages carried {sent:g}")
