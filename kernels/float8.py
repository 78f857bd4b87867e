"""Numbers of one byte inside Triton kernels: float32 -> code and code -> float32, E4M3, E5M2 and INT8, on any architecture.

A format is (BITS of mantissa, LOWEST exponent of a normal number): (3, -6) is E4M3, (2, -14) is E5M2. No BITS: INT8, whose code
is what a large constant, added to the number, leaves in the lowest byte; back, the code is put there. From sm_89 on, E4M3
is converted by one instruction (`HARDWARE`); below, and in the interpreter, by arithmetic on integers with the same result:

    e = max(exponent of |v|, LOWEST)        k = |v| · 2^(BITS - e), rounded        code = (e - LOWEST) · 2^BITS + k

A k that reaches the next power of two carries into the exponent by itself. Codes of NaN and Inf are never made and not
decoded: a group that held one says so in its scale. Plain torch: kernels.taco_reference.to_codes.
"""
from __future__ import annotations

import triton
import triton.language as tl

E4M3_FROM = 89  # the architecture from which E4M3 is converted by an instruction
MAGIC = tl.constexpr(12582912.0)  # 1.5 · 2^23: added to a small number, it leaves the nearest integer in the lowest bits


@triton.jit
def to_code(v, BITS: tl.constexpr, LOWEST: tl.constexpr, HARDWARE: tl.constexpr):
    """float32, at most the format's largest -> uint8, nearest, ties to even."""
    if BITS == 0:
        code = (v + MAGIC).to(tl.int32, bitcast=True).to(tl.uint8)
    elif HARDWARE and BITS == 3:
        code = v.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = v.to(tl.int32, bitcast=True)
        exponent = tl.maximum(((bits >> 23) & 0xFF) - 127, LOWEST)
        scaled = tl.abs(v) * ((127 + BITS - exponent) << 23).to(tl.float32, bitcast=True)
        steps = (scaled + MAGIC).to(tl.int32, bitcast=True) & 0x3F
        code = (((exponent - LOWEST) << BITS) + steps | ((bits >> 24) & 0x80)).to(tl.uint8)
    return code


@triton.jit
def to_code_apart(v, HARDWARE: tl.constexpr):
    """As `to_code` of E4M3, but int32, each code in a register of its own: for codes that are worked on. Where the two codes of one
    instruction are parted and joined again, the assembler of CUDA 12.8 takes the upper one from a register's former content
    (sm_89, sm_90; `kernels.sass.stale` sees it)."""
    if HARDWARE:
        code = tl.inline_asm_elementwise(
            "{ .reg .b16 t; cvt.rn.satfinite.e4m3x2.f32 t, 0f00000000, $1; cvt.u32.u16 $0, t; }", "=r,f", [v], tl.int32, True, 1)
    else:
        code = to_code(v, 3, -6, HARDWARE).to(tl.int32)
    return code


@triton.jit
def to_code_by_chance(v, word, BITS: tl.constexpr, LOWEST: tl.constexpr):
    """As `to_code`, rounded up with the probability of the distance from the code below. word: 32 random bits."""
    bits = v.to(tl.int32, bitcast=True)
    exponent = tl.maximum(((bits >> 23) & 0xFF) - 127, LOWEST)
    scaled = tl.abs(v) * ((127 + BITS - exponent) << 23).to(tl.float32, bitcast=True)
    steps = scaled.to(tl.int32)
    chance = (word >> 8).to(tl.int32).to(tl.float32) * (1.0 / 16777216.0)
    steps += (chance < scaled - steps.to(tl.float32)).to(tl.int32)
    return (((exponent - LOWEST) << BITS) + steps | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def from_code(code, type: tl.constexpr, BITS: tl.constexpr, LOWEST: tl.constexpr, HARDWARE: tl.constexpr):
    """uint8 -> float16, bfloat16 or float32, exact."""
    if BITS == 0:
        value = _from_int8(code, type, HARDWARE)
    elif HARDWARE and BITS == 3:
        value = code.to(tl.float8e4nv, bitcast=True).to(type)
    else:
        # the code's exponent and mantissa in float32's places are the value times a power of two
        wide = code.to(tl.int32)
        bits = ((wide & 0x80) << 24) | ((wide & 0x7F) << (23 - BITS))
        power: tl.constexpr = (127 + 127 + LOWEST - 1) << 23
        value = (bits.to(tl.float32, bitcast=True) * tl.full([], power, tl.int32).to(tl.float32, bitcast=True)).to(type)
    return value


@triton.jit
def _from_int8(code, type: tl.constexpr, HARDWARE: tl.constexpr):
    """The code, its sign turned, as the lowest byte of a number whose unit is 1, less that number; four codes at a time."""
    if HARDWARE and type == tl.float16:
        value = tl.inline_asm_elementwise("""{
            .reg .b32 t, low, high, bias;
            mov.b32 bias, 0xE480E480;
            xor.b32 t, $2, 0x80808080;
            prmt.b32 low, t, 0x64646464, 0x4140;
            prmt.b32 high, t, 0x64646464, 0x4342;
            add.rn.f16x2 $0, low, bias;
            add.rn.f16x2 $1, high, bias;
            }""", "=r,=r,r", [code], tl.float16, True, 4)
    elif HARDWARE:
        value = tl.inline_asm_elementwise("""{
            .reg .b32 t, a, b, c, d;
            xor.b32 t, $4, 0x80808080;
            prmt.b32 a, t, 0x4B000000, 0x7650;
            prmt.b32 b, t, 0x4B000000, 0x7651;
            prmt.b32 c, t, 0x4B000000, 0x7652;
            prmt.b32 d, t, 0x4B000000, 0x7653;
            add.rn.f32 $0, a, 0fCB000080;
            add.rn.f32 $1, b, 0fCB000080;
            add.rn.f32 $2, c, 0fCB000080;
            add.rn.f32 $3, d, 0fCB000080;
            }""", "=f,=f,=f,=f,r", [code], tl.float32, True, 4).to(type)
    else:
        value = (((code ^ 0x80).to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0).to(type)
    return value
