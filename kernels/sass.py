"""What lies in a cubin: the machine code of its kernel, registers and spills; many disassembled at once. No GPU needed.

nvdisasm needs a quarter of a second to begin and a hundredth for a kernel, so that the code of many is laid end to end. Tools
inside Triton's wheel are private: they are touched here alone (seen with 3.7.1 and 3.6.0). The assembler for sm_100 and later
orders some instructions by the addresses of its own memory: `steady` before it is started gives the same code each time.
"""
from __future__ import annotations

import ctypes
import re
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import triton

SIZE = 16  # bytes of an instruction since sm_70
NO_RANDOM_ADDRESSES, ASK = 0x0040000, 0xFFFFFFFF  # personality(2)


def _tool(name: str, content: bytes, *options: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(content)
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
        return subprocess.run([tool, *options, file.name], capture_output=True, text=True, check=True).stdout


def code(cubin: bytes) -> bytes:
    """The instructions of the one kernel in an ELF file: its section .text.NAME. Raises ValueError where there is not one."""
    begin, = struct.unpack_from("<Q", cubin, 0x28)
    size, count, strings = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<I20xQQ", cubin, begin + i * size) for i in range(count)]
    names = sections[strings][1]
    found = [cubin[at:at + length] for name, at, length in sections if cubin.startswith(b".text.", names + name)]
    if len(found) != 1:
        raise ValueError(f"{len(found)} kernels in a cubin, expected one")
    return found[0]


def disassembled(codes: Sequence[bytes], arch: int) -> list[list[str]]:
    """Of each kernel its instructions with their operands. A jump's target is an address within all of them."""
    if not codes:
        return []
    lines = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", _tool("nvdisasm", b"".join(codes), "--binary", f"SM{arch}"))
    if len(lines) != sum(map(len, codes)) // SIZE:
        raise ValueError(f"{len(lines)} instructions in {sum(map(len, codes))} bytes, expected one in {SIZE}")
    rest = iter(lines)
    return [[next(rest) for _ in range(len(one) // SIZE)] for one in codes]


def bare(instruction: str) -> str:
    """Without the predicate that it stands under."""
    return re.sub(r"^@!?U?P\w+\s+", "", instruction.strip())


def stale(instructions: Sequence[str]) -> int:
    """How many conversions to 8 bits, of `bare` instructions, merge a register's former content instead of their own result.

    `F2FP..MERGE_C d, a, b, c` leaves two new codes in the lower half of d and c's lower half above them. Where the two codes of one
    conversion are parted and joined again (code, code >> 8), ptxas of CUDA 12.8 takes the instruction's own d for c, shifted before
    it is written (sm_89 and sm_90): the upper code is what the register held. A right use has another conversion's result for c."""
    found, written = 0, {}
    for line in instructions:
        word, _, rest = line.partition(" ")
        registers = [one.strip().removesuffix(".reuse") for one in rest.split(",")]
        if word.startswith("F2FP") and word.endswith("MERGE_C"):
            found += written.get(registers[-1], "").startswith("SHF.R")
        if not word.startswith(("ST", "RED", "BRA")):
            written[registers[0]] = word
    return found


def resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of local memory) a thread. Our kernels have no local arrays, so that local memory is spills."""
    text = _tool("cuobjdump", cubin, "--dump-resource-usage")
    registers, stack, local = (int(re.search(rf"\b{word}:(\d+)", text)[1]) for word in ("REG", "STACK", "LOCAL"))
    return registers, stack + local


def steady() -> bool:
    """Programs that this thread starts from now on find their memory at the same addresses each time; False where the system
    forbids it (some containers do)."""
    personality = ctypes.CDLL(None).personality
    personality.argtypes = [ctypes.c_ulong]
    now = personality(ASK)
    return now != -1 and personality(now | NO_RANDOM_ADDRESSES) != -1
