"""What the registry says of a kernel at one shape: how to call it, its reference, its launch and the bytes that it must move."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.launch import Compiled, Launch

BF16, FLOAT32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Entry:
    """function and reference take what `inputs` makes, by name; those that work in place return None. traffic: bytes that
    one call must move between memory and the chip. aligned: every row starts at a multiple of 16 elements. registers: at most
    so many a thread."""

    name: str
    function: Callable
    reference: Callable
    make: Callable[[str, int], dict[str, Any]]
    launch: Callable[..., Launch]
    traffic: int
    aligned: bool = True
    registers: int = 64

    def inputs(self, device: str, seed: int = 0) -> dict[str, Any]:
        """New arguments, the same for the same device and seed; on `meta` shapes and dtypes alone."""
        return self.make(device, seed)


def compile(entry: Entry, arch: int) -> Compiled:
    """Compiles one entry for an architecture as its launcher would, without a GPU; see Launch.compile."""
    return entry.launch(**entry.inputs("meta")).compile(arch)


def normal(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int, scale: float = 1.0) -> Tensor:
    if device == "meta":
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.randn(shape, dtype=dtype, device=device, generator=torch.Generator(device).manual_seed(seed)).mul_(scale)
