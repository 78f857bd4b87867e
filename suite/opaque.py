"""Operations that torch.compile does not look into, at little cost a call.

Defined on the dispatcher directly: library.custom_op wraps every call in checks that take 160 microseconds of host time where
an argument is mutated (torch 2.13; here 8), and a training step makes hundreds. So nothing checks here that a result is no
view of an argument: functions given must not return one.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import library

_LIBRARY = library.Library("triaxis", "FRAGMENT")


def opaque(name: str, schema: str, function: Callable, fake: Callable, backward: Callable | None = None,
           keep: Callable | None = None) -> Any:
    """torch.ops.triaxis.<name>. schema: as `(Tensor(a!) x, SymInt n) -> Tensor`; fake: shapes and dtypes of what function gives.
    backward(ctx, *grads), keep(ctx, inputs, output): as torch gives them to a custom operation; without them: no gradient."""
    _LIBRARY.define(name + schema)
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    library.register_fake(f"triaxis::{name}", fake, lib=_LIBRARY)
    if backward is not None:
        library.register_autograd(f"triaxis::{name}", backward, setup_context=keep, lib=_LIBRARY)
    return getattr(torch.ops.triaxis, name).default
