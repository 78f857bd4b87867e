"""What NVFP4's kernels do with a tile: 16 tensors [A, B], the elements of a block of 16 each, so that a thread holds whole blocks.

Rotation, largest magnitudes of a block, codes and packing stay within a thread; 8 threads share an outer scale. The formulas
stand in kernels/nvfp4_reference.py, the kernels in kernels/nvfp4.py. To nearest, what costs a division an element is one a block:

    r = 1 / d, rounded down         e = 1 - r d         l = e r (1 + e), up         z = x r + x l        products fused into sums

which falls to the same code as x / d rounded once, whatever the divisor (tests/test_nvfp4_kernels.py goes through E2M1's decision
edges). Both terms have the sign of x, which a z of 0 keeps. x and d are multiplied by a power of two before where r or l would
leave float32's normal numbers. The interpreter has no fused sum, it divides. By chance, z is x times 1 / d rounded, both brought
near 1 by a power of two of d's size: two products an element.

Codes are read off float32's bits. z · 2^-126 moves E2M1's smallest exponent onto float32's: the bits are then the code and 22 bits
of fraction, sign apart, on which rounding by chance is an integer sum; the power of two is part of the second product. To nearest,
adding 1.5 · 2^23 steps leaves the multiple of the step in the lowest bits, ties to even.
"""
# Triton has no starred tuples:
# ruff: noqa: RUF005
from __future__ import annotations

import triton
import triton.language as tl

from kernels.float8 import from_code, to_code_apart
from kernels.nvfp4_reference import SMALL, SMALLEST, TOP_SCALE

_SMALL, _SMALLEST, _TOP_SCALE = tl.constexpr(SMALL), tl.constexpr(SMALLEST), tl.constexpr(TOP_SCALE)
INFINITE = tl.constexpr(0x7F800000)
MAGIC = tl.constexpr(12582912.0)  # 1.5 · 2^23: added to a small number, it leaves the nearest integer in the lowest bits
HALF_MAGIC = tl.constexpr(6291456.0)
DOWN, UP = tl.constexpr(2.0**-126), tl.constexpr(2.0**116)  # into E2M1's place in float32, and most of the way back
TOP_DOWN = tl.constexpr(6.0 * 2.0**-126)
REST = tl.constexpr(2.0**10)
VALUE = tl.constexpr(0x81C00000 - (1 << 32))  # sign and code in such a number
SIGNS, ODD = tl.constexpr(0x80008000 - (1 << 32)), tl.constexpr(0xF0F0F0F0 - (1 << 32))


@triton.jit
def number(code):
    """E2M1 codes, integers 0 to 15 -> float32."""
    e, m = (code >> 1) & 3, code & 1
    bits = tl.where(e > 0, ((e + 126) << 23) | (m << 22), m * 0x3F000000)
    return (bits | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def halves(x):
    """[A, B, 2 n] -> (elements 0, 2, ..., elements 1, 3, ...)."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2] // 2, 2)))


@triton.jit
def four(x):
    """[A, B, 4] -> 4 of [A, B]."""
    even, odd = halves(x)
    a, c = tl.split(even)
    b, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def eight(x):
    """[A, B, 8] -> 8 of [A, B]."""
    even, odd = halves(x)
    a, c, e, g = four(even)
    b, d, f, h = four(odd)
    return a, b, c, d, e, f, g, h


@triton.jit
def _pairs(a, b):
    """[A, B, n] twice, or [A, B] -> [A, B, 2 n]: elements of a and b in turn."""
    joined = tl.join(a, b)
    if len(joined.shape) == 4:
        joined = tl.reshape(joined, (joined.shape[0], joined.shape[1], 2 * joined.shape[2]))
    return joined


@triton.jit
def joined(v):
    """16 of [A, B] -> [A, B, 16]."""
    even = _pairs(_pairs(_pairs(v[0], v[8]), _pairs(v[4], v[12])), _pairs(_pairs(v[2], v[10]), _pairs(v[6], v[14])))
    odd = _pairs(_pairs(_pairs(v[1], v[9]), _pairs(v[5], v[13])), _pairs(_pairs(v[3], v[11]), _pairs(v[7], v[15])))
    return _pairs(even, odd)


@triton.jit
def turned(v, signs, EXACT: tl.constexpr):
    """Rotated: diag(±1) H16 / 4. EXACT: a quarter of an element is a number, so that a product may be fused into the first sum."""
    f = ()
    for i in tl.static_range(16):
        f = f + (((signs >> i << 31) ^ 0x3E800000).to(tl.float32, bitcast=True),)
    w = ()
    for i in tl.static_range(8):
        b = v[2 * i + 1] * f[2 * i + 1]
        if EXACT:
            factor = tl.full(b.shape, f[2 * i], tl.float32)
            w = w + (tl.fma(v[2 * i], factor, b), tl.fma(v[2 * i], factor, b * -1.0))
        else:
            a = v[2 * i] * f[2 * i]
            w = w + (a + b, a - b)
    for k in tl.static_range(1, 4):
        y = ()
        for i in tl.static_range(16):
            if (i >> k) & 1:
                y = y + (w[i - (1 << k)] - w[i],)
            else:
                y = y + (w[i] + w[i + (1 << k)],)
        w = y
    return w


@triton.jit
def largest(v):
    """Largest magnitude as bits, whose order is that of the numbers; NaN above all."""
    m = tl.abs(v[0])
    for i in tl.static_range(1, 16):
        m = tl.maximum(m, tl.abs(v[i]), propagate_nan=tl.PropagateNan.ALL)
    return m.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def shared(bits, ALONG: tl.constexpr):
    """Largest of the 8 blocks under an outer scale, as [A, B] again. ALONG: they lie along B, else A is 8."""
    A: tl.constexpr = bits.shape[0]
    B: tl.constexpr = bits.shape[1]
    if ALONG:
        most = tl.max(tl.reshape(bits, (A, B // 8, 8)), 2)
        most = tl.reshape(tl.broadcast_to(most[:, :, None], (A, B // 8, 8)), (A, B))
    else:
        most = tl.broadcast_to(tl.max(bits, 0)[None, :], (A, B))
    return most


@triton.jit
def tall(bits, ALONG: tl.constexpr):
    """Largest over 16 rows of the operand: down A where blocks lie along B, else along B."""
    A: tl.constexpr = bits.shape[0]
    B: tl.constexpr = bits.shape[1]
    if ALONG:
        most = tl.max(tl.reshape(bits, (A // 16, 16, B)), 1)
        most = tl.reshape(tl.broadcast_to(most[:, None, :], (A // 16, 16, B)), (A, B))
    else:
        most = tl.max(tl.reshape(bits, (A, B // 16, 16)), 2)
        most = tl.reshape(tl.broadcast_to(most[:, :, None], (A, B // 16, 16)), (A, B))
    return most


@triton.jit
def over(x, NUMBER: tl.constexpr, INVERSE: tl.constexpr, FUSED: tl.constexpr):
    """x / NUMBER rounded once, x not negative and 0 or at least 2^-64; INVERSE: 1 / NUMBER rounded."""
    if FUSED:
        q = x * INVERSE
        q = tl.fma(tl.fma(q * -1.0, tl.full(x.shape, NUMBER, tl.float32), x), tl.full(x.shape, INVERSE, tl.float32), q)
    else:
        q = tl.div_rn(x, tl.full(x.shape, NUMBER, tl.float32))
    return q


@triton.jit
def near_inverse(d):
    """What rcp.rn begins with: near + near (1 - d near), products fused into sums, is 1 / d rounded; without its detour for other
    exponents than d may have here."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [d], tl.float32, True, 1)


@triton.jit
def inverse(d):
    """(1 / d rounded down, what is missing from it rounded up), of a d between 2^-100 and 2^100."""
    one = tl.full(d.shape, 1.0, tl.float32)
    near = near_inverse(d)
    part = tl.fma(near, d * -1.0, one)
    r = tl.inline_asm_elementwise("fma.rm.f32 $0, $1, $2, $1;", "=f,f,f", [near, part], tl.float32, True, 1)
    rest = tl.fma(r, d * -1.0, one)
    low = tl.inline_asm_elementwise("fma.rp.f32 $0, $1, $2, $1;", "=f,f,f", [rest * r, rest], tl.float32, True, 1)
    return r, tl.maximum(low, 0.0)


@triton.jit
def scales(bits, most, ALL: tl.constexpr, PART: tl.constexpr, SIX: tl.constexpr, SIXTH: tl.constexpr, MARGIN: tl.constexpr,
           HARDWARE: tl.constexpr, FUSED: tl.constexpr):
    """(good, outer scale, inner scale as code and as number, a power of two) of blocks, from the bits of largest magnitudes. The
    power takes a block's values and scales to where quotients of them are float32's normal numbers."""
    good = most < INFINITE
    top = tl.where(good, most, 0).to(tl.float32, bitcast=True)
    amax = tl.where(good, bits, 0).to(tl.float32, bitcast=True)
    power = tl.where(top < 2.0**-60, 2.0**64, tl.where(top > 2.0**60, 2.0**-64, 1.0))
    back = tl.where(top < 2.0**-60, 2.0**-64, tl.where(top > 2.0**60, 2.0**64, 1.0))
    o = tl.maximum(over(top * power, ALL, PART, FUSED) * back, _SMALLEST)
    o = tl.where(top == 0.0, 1.0, o)
    if FUSED:
        r, low = inverse(o * power)
        amax *= power
        t = tl.fma(amax, r, amax * low)
    else:
        t = tl.div_rn(amax, o)
    t = tl.minimum(over(t, SIX, SIXTH, FUSED), _TOP_SCALE)
    code = to_code_apart(t, HARDWARE)
    if MARGIN:
        # a subnormal number is its code in steps of 2^-9
        shifted = t * 512.0 + MAGIC
        up = (shifted - MAGIC < t * 512.0).to(tl.int32)
        code = tl.where(t < _SMALL, (shifted.to(tl.int32, bitcast=True) & 15) + up, code)
    code = tl.maximum(code, 1)
    return good, o, code, from_code(code.to(tl.uint8), tl.float32, 3, -6, HARDWARE), power


@triton.jit
def divided(v, d, power, FUSED: tl.constexpr):
    """16 of x / d."""
    z = ()
    if FUSED:
        r, low = inverse(d * power)
        for i in tl.static_range(16):
            x = v[i] * power
            z = z + (tl.fma(x, r, x * low),)
    else:
        for i in tl.static_range(16):
            z = z + (tl.div_rn(v[i], d),)
    return z


@triton.jit
def _spread(word, middle, HIGH: tl.constexpr, FUSED: tl.constexpr):
    """16 bits of a word as the highest ones; the next, of `middle`, is set."""
    if HIGH:
        piece = word & 0xFFFF0000 | middle
    elif FUSED:
        # by the multiplier, which waits for less than shifts and logic; 2^16 as a number that the assembler does not know
        piece = tl.inline_asm_elementwise("mad.lo.u32 $0, $1, $2, $3;", "=r,r,r,r", [word, middle + middle, middle], tl.uint32,
                                          True, 1)
    else:
        piece = word << 16 | middle
    return piece


@triton.jit
def _bytes(a, b, c, d, TOP: tl.constexpr, FUSED: tl.constexpr):
    """A word of the top or lowest bytes of four words."""
    if FUSED:
        if TOP:
            word = tl.inline_asm_elementwise(
                "{ .reg .b32 t, u; prmt.b32 t, $1, $2, 0x73; prmt.b32 u, $3, $4, 0x73; prmt.b32 $0, t, u, 0x5410; }",
                "=&r,r,r,r,r", [a, b, c, d], tl.int32, True, 1)
        else:
            word = tl.inline_asm_elementwise(
                "{ .reg .b32 t, u; prmt.b32 t, $1, $2, 0x40; prmt.b32 u, $3, $4, 0x40; prmt.b32 $0, t, u, 0x5410; }",
                "=&r,r,r,r,r", [a, b, c, d], tl.int32, True, 1)
    else:
        shift: tl.constexpr = 24 if TOP else 0
        word = (a >> shift & 255) | (b >> shift & 255) << 8 | (c >> shift & 255) << 16 | (d >> shift & 255) << 24
    return word


@triton.jit
def _tops(a, b, FUSED: tl.constexpr):
    """Of two words with sign and code as `VALUE` has them: those of the first in bits 12 to 15, of the second in 28 to 31."""
    if FUSED:
        w = tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x7632;", "=r,r,r", [a, b], tl.int32, True, 1)
    else:
        w = (a >> 16 & 0xFFFF) | (b & -65536)
    return (w << 6 & 0x7FFF7FFF) | (w & SIGNS)


@triton.jit
def _fours(a, b, FUSED: tl.constexpr):
    """Four of those, each in the high half of a byte."""
    if FUSED:
        word = tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x7531;", "=r,r,r", [a, b], tl.int32, True, 1)
    else:
        word = (a >> 8 & 255) | (a >> 24 & 255) << 8 | (b >> 8 & 255) << 16 | (b >> 24 & 255) << 24
    return word


@triton.jit
def philox(k0, k1, c0, c1):
    """Four words of Philox4x32-10 at counter (c0, c1, 0, 0); kernels/philox.py. The product of a round is one of 64 bits."""
    c2, c3 = c0 * 0, c0 * 0
    for _ in tl.static_range(10):
        p, q = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0, c1 = (q >> 32).to(tl.uint32) ^ c1 ^ k0, q.to(tl.uint32)
        c2, c3 = (p >> 32).to(tl.uint32) ^ c3 ^ k1, p.to(tl.uint32)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def noise(seed_low, seed_high, row, group, middle, FUSED: tl.constexpr):
    """Of 16 elements a word each, see `_spread`. row [A, B]; group [A, B]: of 8 columns, even."""
    low, high = seed_low.to(tl.uint32, bitcast=True), seed_high.to(tl.uint32, bitcast=True)
    middle = middle.to(tl.uint32)
    u = ()
    for n in tl.static_range(2):
        w0, w1, w2, w3 = philox(low, high, (group + n).to(tl.uint32), row.to(tl.uint32))
        for top in tl.static_range(2):
            u = u + (_spread(w0, middle, top, FUSED), _spread(w1, middle, top, FUSED))
            u = u + (_spread(w2, middle, top, FUSED), _spread(w3, middle, top, FUSED))
    return u


@triton.jit
def by_chance(v, d, CLIP: tl.constexpr, FUSED: tl.constexpr):
    """Bits of 16 quotients by d: sign, then from bit 22 on the code."""
    power = (0x7E800000 - (d.to(tl.int32, bitcast=True) & INFINITE)).to(tl.float32, bitcast=True)
    e = d * power
    one = tl.full(d.shape, 1.0, tl.float32)
    if FUSED:
        near = near_inverse(e)
        r = tl.fma(near, tl.fma(near, e * -1.0, one), near)
    else:
        r = tl.div_rn(one, e)
    r *= DOWN
    n = ()
    for i in tl.static_range(16):
        a = v[i] * power * r
        if CLIP:
            a = tl.minimum(tl.maximum(a, -TOP_DOWN), TOP_DOWN)
        n = n + (a.to(tl.int32, bitcast=True),)
    return n


@triton.jit
def nearest(z):
    """(sum with 1.5 · 2^23 steps, step / .5) of 16 magnitudes."""
    t, p = (), ()
    for i in tl.static_range(16):
        a = tl.minimum(tl.abs(z[i]), 6.0)
        power = (tl.maximum(a, 1.0).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        t = t + (tl.fma(power, tl.full(a.shape, HALF_MAGIC, tl.float32), a),)
        p = p + (power,)
    return t, p


@triton.jit
def _nearest_codes(z, t, FIRST: tl.constexpr, FUSED: tl.constexpr):
    """A word of 8 codes from element FIRST on, of what `nearest` gave."""
    code, sign = (), ()
    for i in tl.static_range(8):
        # code - 5 in the lowest three bits: those of the nearest multiple, and twice the exponent
        bits = t[FIRST + i].to(tl.int32, bitcast=True)
        code = code + ((bits >> 22) + bits,)
        sign = sign + (z[FIRST + i].to(tl.int32, bitcast=True),)
    half = ()
    for i in tl.static_range(2):
        low = (_bytes(code[i], code[i + 2], code[i + 4], code[i + 6], False, FUSED) & 0x07070707) + 0x05050505
        top = _bytes(sign[i], sign[i + 2], sign[i + 4], sign[i + 6], True, FUSED)
        half = half + ((low & 0x07070707) | (top >> 4 & 0x08080808),)
    return half[0] | half[1] << 4


@triton.jit
def _chance_codes(n, p, FIRST: tl.constexpr, FUSED: tl.constexpr):
    """A word of 8 codes from element FIRST on, of what `by_chance` gave and its noise."""
    t = ()
    for i in tl.static_range(8):
        t = t + (n[FIRST + i] + (p[FIRST + i] >> 10).to(tl.int32),)
    even = _fours(_tops(t[0], t[2], FUSED), _tops(t[4], t[6], FUSED), FUSED)
    odd = _fours(_tops(t[1], t[3], FUSED), _tops(t[5], t[7], FUSED), FUSED)
    return (even >> 4 & 0x0F0F0F0F) | (odd & ODD)


@triton.jit
def words(z, n, p, good, CHANCE: tl.constexpr, FUSED: tl.constexpr):
    """Codes of a block in two words, [A, B, 2], element 0 in the lowest bits. n, p: what `by_chance` gave and its noise, or what
    `nearest` gave."""
    if CHANCE:
        first, second = _chance_codes(n, p, 0, FUSED), _chance_codes(n, p, 8, FUSED)
    else:
        first, second = _nearest_codes(z, n, 0, FUSED), _nearest_codes(z, n, 8, FUSED)
    return tl.join(tl.where(good, first, 0), tl.where(good, second, 0))


@triton.jit
def values(z, n, p, s, o, type: tl.constexpr, CHANCE: tl.constexpr):
    """What 16 codes stand for, [A, B, 16]; arguments as of `words`."""
    found = ()
    for i in tl.static_range(16):
        if CHANCE:
            v = (n[i] + (p[i] >> 10).to(tl.int32) & VALUE).to(tl.float32, bitcast=True) * (s * UP) * (o * REST)
        else:
            v = tl.fma(p[i], tl.full(s.shape, -HALF_MAGIC, tl.float32), n[i])
            bits = v.to(tl.int32, bitcast=True) | (z[i].to(tl.int32, bitcast=True) & -2147483648)
            v = bits.to(tl.float32, bitcast=True) * s * o
        found = found + (v.to(type),)
    return joined(found)
