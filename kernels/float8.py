"""FP8 numbers inside Triton kernels: float32 -> code and code -> float32, E4M3 and E5M2, on any architecture.

A format is (BITS of mantissa, LOWEST exponent of a normal number): (3, -6) is E4M3, (2, -14) is E5M2. From sm_89 on, E4M3
is converted by one instruction (`HARDWARE`); below, and in the interpreter, by arithmetic on integers with the same result:

    e = max(exponent of |v|, LOWEST)        k = |v| · 2^(BITS - e), rounded        code = (e - LOWEST) · 2^BITS + k

A k that reaches the next power of two carries into the exponent by itself. Codes of NaN and Inf are never made and not
decoded: a group that held one says so in its scale. Plain torch: kernels.taco_reference.to_codes.
"""
from __future__ import annotations

import triton
import triton.language as tl

MAGIC = tl.constexpr(12582912.0)  # 1.5 · 2^23: added to a small number, it leaves the nearest integer in the lowest bits


@triton.jit
def to_code(v, BITS: tl.constexpr, LOWEST: tl.constexpr, HARDWARE: tl.constexpr):
    """float32, at most the format's largest -> uint8, nearest, ties to even."""
    if HARDWARE and BITS == 3:
        code = v.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = v.to(tl.int32, bitcast=True)
        exponent = tl.maximum(((bits >> 23) & 0xFF) - 127, LOWEST)
        scaled = tl.abs(v) * ((127 + BITS - exponent) << 23).to(tl.float32, bitcast=True)
        steps = (scaled + MAGIC).to(tl.int32, bitcast=True) & 0x3F
        code = (((exponent - LOWEST) << BITS) + steps | ((bits >> 24) & 0x80)).to(tl.uint8)
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
    if HARDWARE and BITS == 3:
        value = code.to(tl.float8e4nv, bitcast=True).to(type)
    else:
        # the code's exponent and mantissa in float32's places are the value times a power of two
        wide = code.to(tl.int32)
        bits = ((wide & 0x80) << 24) | ((wide & 0x7F) << (23 - BITS))
        power: tl.constexpr = (127 + 127 + LOWEST - 1) << 23
        value = (bits.to(tl.float32, bitcast=True) * tl.full([], power, tl.int32).to(tl.float32, bitcast=True)).to(type)
    return value
