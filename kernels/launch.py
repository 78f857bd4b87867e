"""One launch of a Triton kernel, to run or to compile without a GPU: what a budget is read from is what runs.

    launch = Launch(kernel, (rows,), {"x": x, "width": 1024}, {"BLOCK": 4096}, warps=8)
    launch.run()
    launch.compile(90) -> Compiled(registers=40, spills=0, shared=32)

Tensors may lie on the device `meta` where a launch is only compiled. Triton's ASTSource and its attribute `tt.divisibility`
are private and move: they are touched here alone (seen with 3.7.1 and 3.6.0); the tools inside its wheel in sass.py.
Floating-point contraction is off in every launch that passes here, so that a kernel rounds as its plain-torch reference does.
A kernel that torch.compile launches (a triton_op) gets no such option: it must have nothing to contract. Tests compile it
with contraction on (`fusion`) and compare.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from kernels import sass

ARCHITECTURES = (80, 89, 90, 100, 120)
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64", torch.int64: "i64",
         torch.int32: "i32", torch.uint8: "u8"}
ALIGNED = 16  # bytes of a pointer, or a divisor of an integer, from which Triton makes wide accesses


@dataclass(frozen=True)
class Compiled:
    """Of one kernel on one architecture. registers a thread, spills in bytes a thread, shared memory in bytes a block;
    ir: Triton's own, ptx: NVIDIA's assembly, cubin: the machine code as a file."""

    registers: int
    spills: int
    shared: int
    ir: str = field(repr=False)
    ptx: str = field(repr=False)
    cubin: bytes = field(repr=False)
    arch: int

    @property
    def instructions(self) -> list[str]:
        """What the GPU runs, one instruction each with its operands, without addresses and encodings."""
        return sass.disassembled([sass.code(self.cubin)], self.arch)[0]


class Kept(dict):
    """Constants that many launches share: what was derived from them, and compiled with them, is found again by identity."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


# (kernel, kept constants, warps, registers, grid, device, what Triton specialises on) -> how it is launched
_compiled: dict[tuple, Any] = {}


@dataclass(frozen=True)
class Launch:
    """arguments: tensors, numbers or None (left out of the kernel), by name; constants: its tl.constexpr, and those of
    `by_arch`, functions of the architecture (0 in the interpreter). registers: that a thread may hold, so that more programs
    run at once; the assembler decides where it is None."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    constants: Mapping[str, Any]
    warps: int = 4
    by_arch: Mapping[str, Callable[[int], Any]] = field(default_factory=dict)
    registers: int | None = None

    def run(self) -> None:
        """Triton's launcher looks at every argument anew, which costs the host more than a short kernel takes. With kept constants
        that is done once for each combination of what it would look at."""
        arch = _present() if self.by_arch else 0
        if not isinstance(self.constants, Kept) or not arch:
            self._first(self.constants_at(arch))
            return
        # an address in place of a tensor: Triton's launcher would ask for it, and the driver whether it is the device's
        given, place = [], [self.kernel, self.constants, self.warps, self.registers, self.grid, torch.cuda.current_device()]
        for value in self.arguments.values():
            if isinstance(value, Tensor):
                place.append(value.dtype)
                value = value.data_ptr()
                place.append(value % ALIGNED == 0)
            elif type(value) is int:
                place.append((value == 1, value % ALIGNED == 0, -2**31 <= value < 2**31))
            else:
                place.append((type(value), value))
            given.append(value)
        key = tuple(place)
        found = _compiled.get(key)
        if found is None:
            constants = self.constants_at(arch)
            made = self._first(constants)
            names = list(self.arguments)
            order = [(p.name, p.is_constexpr) for p in self.kernel.params]
            _compiled[key] = (made[self.grid if len(self.grid) == 3 else (*self.grid, 1, 1)[:3]],
                              [constants[name] if fixed else None for name, fixed in order],
                              [(at, names.index(name)) for at, (name, fixed) in enumerate(order) if not fixed])
            return
        launch, fixed, free = found
        values = list(fixed)
        for at, index in free:
            values[at] = given[index]
        launch(*values)

    def _first(self, constants: Mapping[str, Any]) -> Any:
        return self.kernel[self.grid](**self.arguments, **constants, num_warps=self.warps, maxnreg=self.registers,
                                      enable_fp_fusion=False)

    def constants_at(self, arch: int) -> dict[str, Any]:
        """All of the kernel's tl.constexpr on an architecture."""
        return {**self.constants, **{name: value(arch) for name, value in self.by_arch.items()}}

    def signature(self, arch: int = 0) -> tuple[dict[str, str], dict[str, Any], list[str]]:
        """(type by name, constants by name, names that divide by 16), as Triton's own launcher would derive them."""
        types, constants, wide = {}, self.constants_at(arch), []
        for param in self.kernel.params:
            value = constants[param.name] if param.is_constexpr else self.arguments[param.name]
            types[param.name] = "constexpr"
            if param.is_constexpr:
                continue
            if value is None or (type(value) is int and value == 1 and not param.do_not_specialize):
                constants[param.name] = value
                continue
            if isinstance(value, Tensor):
                types[param.name] = "*" + TYPES[value.dtype]
                address = value.storage_offset() * value.element_size() if value.is_meta else value.data_ptr()
            else:
                types[param.name] = "fp32" if isinstance(value, float) else "i32" if -2**31 <= value < 2**31 else "i64"
                address = value
            if not isinstance(value, float) and not param.do_not_specialize and address % ALIGNED == 0:
                wide.append(param.name)
        return types, constants, wide

    def compile(self, arch: int, fusion: bool = False) -> Compiled:
        """arch: compute capability without the dot (90 is sm_90). fusion: as without our option, with contraction on.
        Raises what Triton raises where it does not compile."""
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        types, constants, wide = self.signature(arch)
        attributes = {(self.kernel.arg_names.index(name),): [["tt.divisibility", ALIGNED]] for name in wide}
        source = ASTSource(self.kernel, types, constants, attributes)
        options = {"num_warps": self.warps, "maxnreg": self.registers, "enable_fp_fusion": fusion}
        made = triton.compile(source, GPUTarget("cuda", arch, 32), options)
        code = made.asm["cubin"]
        return Compiled(*sass.resources(code), made.metadata.shared, made.asm["ttir"], made.asm["ptx"], code, arch)


def _present() -> int:
    """The architecture of the current GPU, 0 where there is none."""
    return _architecture(torch.cuda.current_device()) if _available() else 0


@cache
def _available() -> bool:
    return torch.cuda.is_available() and not triton.knobs.runtime.interpret


@cache
def _architecture(device: int) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
