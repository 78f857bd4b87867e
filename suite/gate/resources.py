"""What a compiled kernel takes of a GPU, read from its machine code and from Triton's own IR; no GPU needed.

    registers    a thread                      instructions   without padding (NOP)
    spills       bytes a thread, with stack    global, wide   loads and stores of global memory, those of 16 bytes and more
    shared       bytes a block                 double, local  operations in float64, loads and stores of local memory
    occupancy    warps a multiprocessor holds  traffic        bytes that loads and stores of one tile move, over its elements
    code         a digest of the machine code: equal where nothing changed

`traffic` is read from the IR, where a tile is one tensor: it does not change with block size or warps, and an extra pass over
memory shows in it. Limits of a multiprocessor: CUDA C++ Programming Guide, table of compute capabilities.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from kernels.entry import Entry
from kernels.launch import Launch
from kernels.sass import bare, disassembled, stale
from kernels.sass import code as machine_code

# compute capability -> (warps, blocks, bytes of shared memory) of a multiprocessor
LIMITS = {80: (64, 32, 164 << 10), 86: (48, 16, 100 << 10), 89: (48, 24, 100 << 10), 90: (64, 32, 228 << 10),
          100: (64, 32, 228 << 10), 120: (48, 24, 100 << 10)}
REGISTERS, UNIT, RESERVED = 65536, 256, 1024  # a multiprocessor; a warp's registers come in units; shared bytes kept a block
BITS = {"f64": 64, "i64": 64, "f32": 32, "i32": 32, "f16": 16, "bf16": 16, "i16": 16, "i8": 8, "i1": 8}
GLOBAL = re.compile(r"^(?:LDG|STG|LDGSTS|ATOMG?|RED|REDG|UBLKCP|UTMALDG|UTMASTG)\b")
WIDE = re.compile(r"\.(?:128|256|ENL2)\b|^U")
DOUBLE = re.compile(r"^(?:DADD|DMUL|DFMA|DSETP|DMNMX|DMMA)\b|\.F64\b")
LOCAL = re.compile(r"^(?:LDL|STL)\b")
ACCESS = re.compile(r"\btt\.(?:load|store|atomic_rmw|atomic_cas|descriptor_load|descriptor_store)\b(.*)$", re.MULTILINE)


def launches(entry: Entry) -> list[Launch]:
    """The launches of one call, with shapes and dtypes alone; an entry's `launch` gives one or a sequence of them."""
    made = entry.launch(**entry.inputs("meta"))
    return [made] if isinstance(made, Launch) else list(made)


def identity(launch: Launch, arch: int) -> tuple[Any, ...]:
    """Equal for launches that compile to the same code."""
    return launch.kernel.__module__, launch.kernel.__name__, str(launch.signature(arch)), launch.warps, launch.registers, arch


def resources(launch: Launch, arch: int) -> dict[str, Any]:
    """Compiles, and reads the quantities above. Where the architecture lacks the types: {"refused": the compiler's line}."""
    held, code = compiled(launch, arch)
    return held if code is None else held | counted(disassembled([code], arch)[0])


def compiled(launch: Launch, arch: int) -> tuple[dict[str, Any], bytes | None]:
    """(the quantities that need no disassembler, machine code), or what refused and None."""
    try:
        made = launch.compile(arch)
    except Exception as error:  # Triton raises a dozen kinds, ptxas another
        return {"refused": _line(error)}, None
    code = machine_code(made.cubin)
    return {"registers": made.registers, "spills": made.spills, "shared": made.shared,
            "occupancy": occupancy(made.registers, made.shared, launch.warps, arch), "traffic": traffic(made.ir),
            "code": hashlib.sha256(code).hexdigest()[:12]}, code


def counted(instructions: Sequence[str]) -> dict[str, Any]:
    """The quantities that count instructions, and a `fault` where the assembler's code is wrong."""
    lines = [bare(line) for line in instructions]
    words = [line.split()[0] for line in lines if not line.startswith("NOP")]
    accesses = [word for word in words if GLOBAL.match(word)]
    wrong = stale(lines)
    fault = {"fault": f"{wrong} conversions to 8 bits take a stale register (kernels.sass.stale)"} if wrong else {}
    return fault | {"instructions": len(words), "global": len(accesses), "wide": sum(1 for word in accesses if WIDE.search(word)),
            "double": sum(1 for word in words if DOUBLE.search(word)), "local": sum(1 for word in words if LOCAL.match(word))}


def occupancy(registers: int, shared: int, warps: int, arch: int) -> int:
    """Warps that one multiprocessor holds at once. Raises ValueError for an architecture that LIMITS does not know."""
    if arch not in LIMITS:
        raise ValueError(f"sm_{arch}: no limits known; those of {', '.join(f'sm_{a}' for a in LIMITS)} are")
    most, blocks, memory = LIMITS[arch]
    a_warp = math.ceil(max(registers, 1) * 32 / UNIT) * UNIT
    held = min(most // warps, blocks, REGISTERS // a_warp // warps, memory // (shared + RESERVED))
    return held * warps


def traffic(ir: str) -> float:
    """Bytes that the loads and stores in the text move, each counted once, over the elements of the largest of them."""
    found = [_size(rest) for rest in ACCESS.findall(ir)]
    return round(sum(count * size for count, size in found) / max((count for count, _ in found), default=1), 4)


def _size(rest: str) -> tuple[int, float]:
    """(elements, bytes of one) of an access: the type behind the last colon, or what a descriptor gives."""
    text = re.sub(r"\s+loc\(.*$", "", rest).rpartition(" : ")[2].rpartition("->")[2]
    text = re.sub(r"^\s*!?(?:tt\.)?(?:tensor|tensordesc)<", "", text)
    shape, kind = re.search(r"((?:\d+x)*)(?:!tt\.ptr<)?([a-z]+\w*)", text).groups()
    bits = BITS.get(kind) or (8 if kind.startswith("f8") else 32)
    return math.prod(map(int, shape.split("x")[:-1])), bits / 8


def merged(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of a call with several launches: the worst of what a kernel holds, the sum of what kernels do."""
    for row in rows:
        if "refused" in row or "fault" in row:
            return row
    if len(rows) == 1:
        return dict(rows[0])
    worst = {"registers": max, "spills": max, "shared": max, "occupancy": min}
    found = {name: worst.get(name, sum)(row[name] for row in rows) for name in rows[0] if name != "code"}
    return found | {"code": "+".join(row["code"] for row in rows) if all(row["code"] for row in rows) else ""}


def _line(error: BaseException) -> str:
    lines: Iterable[str] = (line.strip() for line in str(error).splitlines())
    text = next((line for line in lines if re.search(r"error|support|expect|invalid", line, re.IGNORECASE)), type(error).__name__)
    return re.sub(r"(?<![\w.])/[^\s:,;\"']*", "<path>", text)[:160]
