"""What TACO's kernels do with a tile of whole groups, [ROWS, G] in float32: transform, factors, scales, codes.

The formulas stand in kernels/taco_reference.py, the kernels in kernels/taco.py. Quotients and roots are correctly rounded.
Groups with a NaN or Inf are found on the bits of |y|, whose order as integers is that of the numbers.
"""
from __future__ import annotations

import triton
import triton.language as tl

from kernels.float8 import from_code, to_code, to_code_by_chance
from kernels.taco_reference import ALPHA_MAX, ALPHA_MIN, FLOOR, LAMBDA, SCALE_MAX, SMALLEST

LEAN, PAPER, COARSE, QUOTIENT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
_LAMBDA, _FLOOR, _SCALE_MAX = tl.constexpr(LAMBDA), tl.constexpr(FLOOR), tl.constexpr(SCALE_MAX)
_ALPHA_MIN, _ALPHA_MAX, _SMALLEST = tl.constexpr(ALPHA_MIN), tl.constexpr(ALPHA_MAX), tl.constexpr(SMALLEST)
INFINITE = tl.constexpr(0x7F800000)


@triton.jit
def butterflies(x, ROWS: tl.constexpr, G: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr):
    """Strides 2^FIRST, ..., 2^(LAST - 1) of [ROWS, G]."""
    for k in tl.static_range(FIRST, LAST):
        x = tl.reshape(x, (ROWS, G >> (k + 1), 2, 1 << k))
        a, b = tl.split(tl.permute(x, (0, 1, 3, 2)))
        x = tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2))
    return tl.reshape(x, (ROWS, G))


@triton.jit
def beside(a, b):
    """[ROWS, W] twice -> [ROWS, 2 W]."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (a.shape[0], 2 * a.shape[1]))


@triton.jit
def placed(tile, groups, ROWS: tl.constexpr, G: tl.constexpr):
    """A tile of a row -> (its groups [ROWS], which of them exist, its first element)."""
    start = tile * ROWS
    place = start + tl.arange(0, ROWS)
    return place, place < groups, start.to(tl.int64) * G


@triton.jit
def fetched(x, here, left, inside, WHOLE: tl.constexpr, FULL: tl.constexpr):
    """Elements at x + here: those of groups that exist, and before `left` where a row ends within a group. Others are 0."""
    if FULL:
        found = tl.load(x + here)
    elif WHOLE:
        found = tl.load(x + here, mask=inside[:, None], other=0)
    else:
        found = tl.load(x + here, mask=here < left, other=0)
    return found


@triton.jit
def product(x, here, left, inside, h, FLOAT: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, WHOLE: tl.constexpr,
            FULL: tl.constexpr, BITS: tl.constexpr, LOWEST: tl.constexpr, HARDWARE: tl.constexpr, FOLD: tl.constexpr):
    """Values, or codes where not FLOAT, at x, times H: [ROWS, PARTS · K]. here [ROWS, K]: the first of the PARTS."""
    if FOLD:
        y = folded(x, here, left, h, FLOAT, K, FULL, BITS, LOWEST, HARDWARE)
    else:
        y = unfolded(x, here, left, inside, h, FLOAT, K, PARTS, WHOLE, FULL, BITS, LOWEST, HARDWARE)
    return y


@triton.jit
def unfolded(x, here, left, inside, h, FLOAT: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, WHOLE: tl.constexpr,
             FULL: tl.constexpr, BITS: tl.constexpr, LOWEST: tl.constexpr, HARDWARE: tl.constexpr):
    """`product` of one part after the other."""
    y = tl.dot(operand(x, here, left, inside, h, FLOAT, WHOLE, FULL, BITS, LOWEST, HARDWARE), h, input_precision="ieee")
    if PARTS > 1:
        z = tl.dot(operand(x + K, here, left - K, inside, h, FLOAT, WHOLE, FULL, BITS, LOWEST, HARDWARE), h, input_precision="ieee")
        low = beside(y + z, y - z)
        y = low
        if PARTS > 2:
            x += 2 * K
            left -= 2 * K
            u = tl.dot(operand(x, here, left, inside, h, FLOAT, WHOLE, FULL, BITS, LOWEST, HARDWARE), h, input_precision="ieee")
            v = tl.dot(operand(x + K, here, left - K, inside, h, FLOAT, WHOLE, FULL, BITS, LOWEST, HARDWARE), h,
                       input_precision="ieee")
            high = beside(u + v, u - v)
            y = beside(low + high, low - high)
    return y


@triton.jit
def folded(x, here, left, h, FLOAT: tl.constexpr, K: tl.constexpr, FULL: tl.constexpr, BITS: tl.constexpr, LOWEST: tl.constexpr,
           HARDWARE: tl.constexpr):
    """`product` of two parts as one, of [2 ROWS, K]: first halves of 8 groups, their second halves, and so on. Rows that lie 8
    apart are the same thread's in a product of tensor cores. left: elements from x on that exist."""
    ROWS: tl.constexpr = here.shape[0]
    row = tl.arange(0, 2 * ROWS)
    place = (row // 16 * 8 + row % 8) * (2 * K) + row // 8 % 2 * K
    halves = place[:, None] + tl.arange(0, K)[None, :]
    y = tl.dot(operand(x, halves, left, None, h, FLOAT, False, FULL, BITS, LOWEST, HARDWARE), h, input_precision="ieee")
    a, b = tl.split(tl.permute(tl.reshape(y, (ROWS // 8, 2, 8, K)), (0, 2, 3, 1)))
    return beside(tl.reshape(a + b, (ROWS, K)), tl.reshape(a - b, (ROWS, K)))


@triton.jit
def operand(x, here, left, inside, h, FLOAT: tl.constexpr, WHOLE: tl.constexpr, FULL: tl.constexpr, BITS: tl.constexpr,
            LOWEST: tl.constexpr, HARDWARE: tl.constexpr):
    """What a product reads, in the type of H, which holds it exactly.

    Codes come in the order of columns in which a thread's share of the product is 4 neighbouring bytes; H's rows stand in
    that order too (kernels.taco.matrix).
    """
    found = fetched(x, here, left, inside, WHOLE, FULL)
    if not FLOAT:
        found = tl.reshape(found, (found.shape[0], found.shape[1] // 16, 4, 2, 2))
        found = tl.reshape(tl.permute(found, (0, 1, 3, 2, 4)), (found.shape[0], found.shape[1] * found.shape[2] * 4))
        found = from_code(found, h.dtype, BITS, LOWEST, HARDWARE)
    return found.to(h.dtype)


@triton.jit
def _mean_square(x, G: tl.constexpr):
    return tl.sum(x * x, 1) * (1.0 / G)


@triton.jit
def factors(x, MODE: tl.constexpr, ALPHA: tl.constexpr, TOP: tl.constexpr, G: tl.constexpr):
    """x [ROWS, G] -> (alpha, what is sent of it), each [ROWS]."""
    if not ALPHA:
        pre = tl.full([x.shape[0]], 1.0, tl.float32)
        sent = pre
    elif MODE == PAPER:
        pre = tl.div_rn(tl.full([x.shape[0]], TOP, tl.float32), tl.sqrt_rn(tl.maximum(_mean_square(x, G) + _LAMBDA, _FLOOR)))
        pre = tl.minimum(tl.maximum(pre, _ALPHA_MIN), _ALPHA_MAX)
        sent = pre
    else:
        exponent = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1) >> 23
        exponent = tl.minimum(tl.maximum(exponent, 27), 253)
        power = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        spread = tl.sqrt_rn(_mean_square(x * power[:, None], G))
        spread = tl.where(spread == 0.0, 1.0, spread)
        pre = power * tl.div_rn(tl.full([x.shape[0]], TOP, tl.float32), spread)
        sent = tl.div_rn(tl.div_rn(spread, tl.full([x.shape[0]], TOP, tl.float32)), power)
    return pre, sent


@triton.jit
def transformed(x, here, part, left, inside, h, ROWS: tl.constexpr, G: tl.constexpr, LOG_G: tl.constexpr, K: tl.constexpr,
                HADAMARD: tl.constexpr, PRODUCT: tl.constexpr, WHOLE: tl.constexpr, NORM: tl.constexpr, MODE: tl.constexpr,
                ALPHA: tl.constexpr, TOP: tl.constexpr, BITS: tl.constexpr, LOWEST: tl.constexpr, FULL: tl.constexpr,
                HARDWARE: tl.constexpr, FOLD: tl.constexpr):
    """The tile that begins at x -> (alpha H x / √G, or in one step with its scale H x / G; what is sent of alpha)."""
    sent = 0.0
    if MODE != PAPER and MODE != COARSE:
        if PRODUCT:
            y = product(x, part, left, inside, h, True, K, G // K, WHOLE, FULL, BITS, LOWEST, HARDWARE, FOLD)
        else:
            y = fetched(x, here, left, inside, WHOLE, FULL).to(tl.float32)
            if HADAMARD:
                y = butterflies(y * NORM, ROWS, G, 0, LOG_G)
    else:
        y = fetched(x, here, left, inside, WHOLE, FULL).to(tl.float32)
        pre, sent = factors(y, MODE, ALPHA, TOP, G)
        pre *= NORM
        if PRODUCT:
            y = product(x, part, left, inside, h, True, K, G // K, WHOLE, FULL, BITS, LOWEST, HARDWARE, FOLD) * pre[:, None]
        else:
            y *= pre[:, None]
            if HADAMARD:
                y = butterflies(y, ROWS, G, 0, LOG_G)
    return y, sent


@triton.jit
def summand(wire, here, part, base, size, place, inside, groups, h, G: tl.constexpr, K: tl.constexpr, PRODUCT: tl.constexpr,
            NORM: tl.constexpr, MODE: tl.constexpr, BITS: tl.constexpr, LOWEST: tl.constexpr, FULL: tl.constexpr,
            HARDWARE: tl.constexpr, FOLD: tl.constexpr):
    """A tile of a row's codes times their scales, and times H where there is a product. wire: of the row of `size` codes."""
    if PRODUCT:
        value = product(wire + base, part, size - base, inside, h, False, K, G // K, True, FULL, BITS, LOWEST, HARDWARE, FOLD)
    else:
        value = from_code(fetched(wire + base, here, 0, inside, True, FULL), tl.float32, BITS, LOWEST, HARDWARE)
    scale = scales((wire + size).to(tl.pointer_type(tl.float32)), place, inside, groups, MODE) * NORM
    return value * scale[:, None]


@triton.jit
def put(value, out, here, left, inside, WHOLE: tl.constexpr, FULL: tl.constexpr):
    """Elements of groups that exist, and before `left` where a row ends within a group."""
    result = value.to(out.dtype.element_ty)
    if FULL:
        tl.store(out + here, result)
    elif WHOLE:
        tl.store(out + here, result, mask=inside[:, None])
    else:
        tl.store(out + here, result, mask=here < left)


@triton.jit
def coded(v, first, seed_low, seed_high, ROWS: tl.constexpr, G: tl.constexpr, TOP_CODE: tl.constexpr, BITS: tl.constexpr,
          LOWEST: tl.constexpr, CHANCE: tl.constexpr, HARDWARE: tl.constexpr):
    """first: index of the tile's first element in the whole tensor, a multiple of 4."""
    if BITS == 0 or (HARDWARE and BITS == 3 and not CHANCE):
        code = to_code(v, BITS, LOWEST, HARDWARE)  # saturates by itself; INT8 is made of quotients alone, none too large
    else:
        v = tl.minimum(tl.maximum(v, -TOP_CODE), TOP_CODE)
        if CHANCE:
            seed = (seed_high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | seed_low.to(tl.uint32, bitcast=True).to(tl.uint64)
            counter = first // 4 + tl.arange(0, ROWS * G // 4).to(tl.int64)
            none = tl.zeros([ROWS * G // 4], tl.uint32)
            w0, w1, w2, w3 = tl.philox(seed, counter.to(tl.uint32), (counter >> 32).to(tl.uint32), none, none)
            word = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (ROWS, G))
            code = to_code_by_chance(v, word, BITS, LOWEST)
        else:
            code = to_code(v, BITS, LOWEST, HARDWARE)
    return code


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _count(bad, found):
    # group by group: they are rare, and a sum over the tile would make all programs wait (and sm_100 refuse, Triton 3.7.1)
    if bad is not None:
        tl.atomic_add(bad + tl.zeros_like(found.to(tl.int32)), found.to(tl.int32), mask=found)


@triton.jit
def quotients(y, scale):
    """y [ROWS, G] / scale [ROWS], which is a normal number, in two instructions an element; zeros keep their signs.

    1 / s = r + rest with r rounded down: y r + y rest is a correctly rounded quotient, but where that lies within 2^-22 of a
    unit in the last place of where rounding turns. Above 2^78 a scale has a rest of fewer digits.
    """
    one = tl.full([scale.shape[0]], 1.0, tl.float32)
    r = tl.div_rn(one, scale)
    r = tl.where(tl.fma(-scale, r, one) < 0.0, (r.to(tl.int32, bitcast=True) - 1).to(tl.float32, bitcast=True), r)
    gap = tl.fma(-scale, r, one)
    rest = tl.fma(gap, gap, gap) * r
    return tl.fma(y, tl.broadcast_to(r[:, None], y.shape), y * rest[:, None])


@triton.jit
def write(y, sent, wire, place, inside, here, groups, base, first, bad, peak_of_row, seed_low, seed_high, ROWS: tl.constexpr,
          G: tl.constexpr, MODE: tl.constexpr, SECOND: tl.constexpr, TOP: tl.constexpr, TOP_CODE: tl.constexpr,
          BITS: tl.constexpr, LOWEST: tl.constexpr, CHANCE: tl.constexpr, FULL: tl.constexpr, HARDWARE: tl.constexpr):
    """Scales and codes of a tile; wire and peak_of_row: of its row. place [ROWS]: groups of the row, `inside`: that exist.

    Codes of a group with a NaN or Inf are zeros, written over what the arithmetic made: that costs nothing where there is none.
    """
    top = tl.full([ROWS], TOP, tl.float32)
    bits = tl.reduce(tl.abs(y), 1, _larger).to(tl.int32, bitcast=True)
    good = bits < INFINITE
    peak = bits.to(tl.float32, bitcast=True)
    fields = (wire + groups.to(tl.int64) * G).to(tl.pointer_type(tl.float32))
    nan = float("nan")
    if MODE == COARSE and not SECOND:
        tl.atomic_max(peak_of_row + tl.zeros_like(bits), bits, mask=good & inside)
        tl.store(fields + place, tl.where(good, sent, nan), mask=inside)
        _count(bad, inside & (bits >= INFINITE))
    else:
        if MODE == COARSE:
            scale = tl.load(peak_of_row).to(tl.float32, bitcast=True)
            scale = tl.div_rn(tl.maximum(scale, TOP * _SMALLEST) + tl.zeros([ROWS], tl.float32), top)
            tl.store(fields + groups + tl.zeros([ROWS], tl.int32), scale, mask=tl.arange(0, ROWS) == 0)
            v = tl.div_rn(y, tl.broadcast_to(scale[:, None], (ROWS, G)))
        elif MODE == PAPER:
            scale = tl.div_rn(tl.maximum(peak, _FLOOR), top)
            scale = tl.minimum(tl.maximum(scale, _FLOOR), _SCALE_MAX)
            v = tl.div_rn(y, tl.broadcast_to(scale[:, None], (ROWS, G)))
            tl.store(fields + place, tl.where(good, scale, nan), mask=inside)
            tl.store(fields + groups + place, tl.where(good, sent, nan), mask=inside)
        elif MODE == QUOTIENT:
            scale = tl.div_rn(tl.maximum(peak, TOP * _SMALLEST), top)
            v = quotients(y, scale)
            tl.store(fields + place, tl.where(good, scale, nan), mask=inside)
        else:
            held = tl.maximum(peak, TOP * _SMALLEST)
            v = y * tl.div_rn(top, held)[:, None]
            tl.store(fields + place, tl.where(good, tl.div_rn(held, top), nan), mask=inside)
        code = coded(v, first, seed_low, seed_high, ROWS, G, TOP_CODE, BITS, LOWEST, CHANCE, HARDWARE)
        codes = wire + base
        if FULL:
            tl.store(codes + here, code)
        else:
            tl.store(codes + here, code, mask=inside[:, None])
        tl.store(codes + here, tl.zeros_like(code), mask=(inside & (bits >= INFINITE))[:, None])
        if MODE != COARSE:
            _count(bad, inside & (bits >= INFINITE))


@triton.jit
def scales(fields, place, inside, groups, MODE: tl.constexpr):
    """s / alpha of a tile's groups: [ROWS]. fields: where the row's scales begin."""
    scale = tl.load(fields + place, mask=inside, other=0.0)
    if MODE == PAPER:
        scale = tl.div_rn(scale, tl.maximum(tl.load(fields + groups + place, mask=inside, other=1.0), _FLOOR))
    elif MODE == COARSE:
        scale *= tl.load(fields + groups)
    return scale
