"""Bytes and launches of one call of a kernel, counted without a GPU.

The entry's function runs on tensors without memory (`meta`) while Triton's launches are caught before they reach a driver and
torch's operations are listened to. One call gives

    launches   Triton kernels started             launched   bytes of the tensors that they were given
    passes     torch operations that move memory  passed     bytes that those read and write

so a cast, a copy or a second launch that was not there before shows as more of one of them. What a kernel does inside is in
its IR: `traffic` of suite.gate.resources. Private: Triton's JITFunction.run (seen with 3.7.1 and 3.6.0), and torch's switch by
which a triton_op launches directly (2.13 and 2.11).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch._library.triton import set_wrap_triton_enabled
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction

from kernels.entry import Entry

QUANTITIES = ("launches", "launched", "passes", "passed")
FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias", "_reshape_alias", "lift_fresh"}


def _bytes(tree: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


class _Passes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.passes = self.passed = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        free = function.namespace != "aten" or function.is_view or function._schema.name.partition("::")[2] in FREE
        if not free and (moved := _bytes((args, kwargs)) + _bytes(result)):
            self.passes += 1
            self.passed += moved
        return result


@contextmanager
def _caught() -> Iterator[list[int]]:
    """Launches do nothing but add the bytes of their tensors to the list."""
    caught: list[int] = []

    def run(self, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> None:
        caught.append(_bytes((args, kwargs)))

    original = JITFunction.run
    JITFunction.run = run
    try:
        with set_wrap_triton_enabled(False):
            yield caught
    finally:
        JITFunction.run = original


def calls(entry: Entry) -> dict[str, int]:
    """The four counts of one call. Raises what the function raises; RuntimeError where it launches nothing."""
    given = entry.inputs("meta")
    with _caught() as caught, _Passes() as heard:
        entry.function(**given)
    if not caught:
        raise RuntimeError(f"{entry.name}: one call launches no kernel")
    return dict(zip(QUANTITIES, (len(caught), sum(caught), heard.passes, heard.passed)))
