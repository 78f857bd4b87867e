"""TACO's codec as fused kernels: one pass over memory for encode, decode, sum and reduce; formulas in kernels/taco_reference.py.

    encode   x [r, n] -> wires [r, b]              read, transform, scale, codes: 2 + 1.03 B an element of bfloat16 at G = 128
    decode   wires [r, b] -> x [r, n]
    total    wires [p, b] -> Σ of their rows [n]   in float32 and rank order
    reduce   wires [p, b] -> wire [b]              codes summed in float32 and rank order, encoded anew: H is linear, so
                                                   there is no transform at all

A program holds a tile of whole groups, [ROWS, G], and takes the next one `programs` further on. H is done in one of two ways:
    butterfly   a + b, a - b over strides 1, 2, ..., G/2 in float32: the reference's bits
    product     tiles times the constant ±1 matrix of min(G, 128) on tensor cores (exact inputs, float32 sums), then the
                butterflies of the remaining strides: for bfloat16 values and codes, which that format holds exactly. Of a
                group of 256 both halves are rows of one product, 8 apart (FOLD), where the same thread holds both. The
                order of its sums is the hardware's: at most a code in 10,000 differs, by one step
Mode coarse has one scale a row and so two passes: each group's alpha and the row's largest |y|, then the codes.

Below sm_89 codes are made in integer arithmetic (kernels/float8.py). The parts of a program stand in kernels/taco_tile.py.
"""
from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.float8 import E4M3_FROM, from_code
from kernels.launch import Kept, Launch
from kernels.philox import halves
from kernels.taco_reference import FORMATS, Format, checked, groups_of, nbytes
from kernels.taco_tile import (
    COARSE,
    LEAN,
    QUOTIENT,
    butterflies,
    factors,
    fetched,
    placed,
    put,
    scales,
    summand,
    transformed,
    write,
)
from kernels.wires import decoded, encoded, fits, reduced, rows_of

# elements a program holds at a time: where there is a product, where there is none, where registers would not suffice
TILE, TILE_PLAIN, TILE_SMALL = 8192, 4096, 2048
WARPS = 4
STAGES = 3  # tiles under way
PER_PROCESSOR, PER_PROCESSOR_READ, PER_PROCESSOR_PLAIN = 2, 3, 4  # programs a multiprocessor: encode, decode, no H
MANY = 4  # stripes from which a sum takes small tiles: as many loads are under way
WIDEST = 128  # of the matrix in a product
MODES = {"lean": 0, "paper": 1, "coarse": 2, "quotient": 3}  # the last one: kernels/grouped.py


@triton.jit(do_not_specialize=["seed_low", "seed_high", "n", "groups"])
def encode_kernel(x, wire, bad, peaks, matrix, seed_low, seed_high, n, groups, x_stride, wire_stride, ROWS: tl.constexpr,
                  G: tl.constexpr, LOG_G: tl.constexpr, K: tl.constexpr, HADAMARD: tl.constexpr, PRODUCT: tl.constexpr,
                  WHOLE: tl.constexpr, NORM: tl.constexpr, MODE: tl.constexpr, SECOND: tl.constexpr, ALPHA: tl.constexpr,
                  TOP: tl.constexpr, TOP_CODE: tl.constexpr, BITS: tl.constexpr, LOWEST: tl.constexpr, CHANCE: tl.constexpr,
                  FULL: tl.constexpr, STAGES: tl.constexpr, HARDWARE: tl.constexpr, FOLD: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    x += row * x_stride
    wire += row * wire_stride
    k = tl.arange(0, K)
    h = tl.load(matrix + (k[:, None] * K + k[None, :])) if PRODUCT else 0
    here = tl.arange(0, ROWS)[:, None] * G + tl.arange(0, G)[None, :]
    part = tl.arange(0, ROWS)[:, None] * G + k[None, :]
    peak_of_row = peaks + row if MODE == COARSE else None
    for tile in tl.range(tl.program_id(0), tl.cdiv(groups, ROWS), tl.num_programs(0), num_stages=STAGES):
        place, inside, base = placed(tile, groups, ROWS, G)
        left = n - base
        y, sent = transformed(x + base, here, part, left, inside, h, ROWS, G, LOG_G, K, HADAMARD, PRODUCT, WHOLE, NORM, MODE, ALPHA,
                              TOP, BITS, LOWEST, FULL, HARDWARE, FOLD)
        write(y, sent, wire, place, inside, here, groups, base, row * groups * G + base, bad, peak_of_row, seed_low, seed_high,
              ROWS, G, MODE, SECOND, TOP, TOP_CODE, BITS, LOWEST, CHANCE, FULL, HARDWARE)


@triton.jit(do_not_specialize=["n", "groups"])
def decode_kernel(wire, out, matrix, n, groups, stripe, wire_stride, out_stride, ROWS: tl.constexpr, G: tl.constexpr,
                  LOG_G: tl.constexpr, K: tl.constexpr, STRIPES: tl.constexpr, HADAMARD: tl.constexpr, PRODUCT: tl.constexpr,
                  WHOLE: tl.constexpr, NORM: tl.constexpr, MODE: tl.constexpr, BITS: tl.constexpr, LOWEST: tl.constexpr,
                  FULL: tl.constexpr, STAGES: tl.constexpr, HARDWARE: tl.constexpr, FOLD: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    wire += row * wire_stride
    out += row * out_stride
    k = tl.arange(0, K)
    h = tl.load(matrix + (k[:, None] * K + k[None, :])) if PRODUCT else 0
    here = tl.arange(0, ROWS)[:, None] * G + tl.arange(0, G)[None, :]
    part = tl.arange(0, ROWS)[:, None] * G + k[None, :]
    size = groups.to(tl.int64) * G
    for tile in tl.range(tl.program_id(0), tl.cdiv(groups, ROWS), tl.num_programs(0), num_stages=STAGES):
        place, inside, base = placed(tile, groups, ROWS, G)
        left = n - base
        source = wire
        total = tl.zeros([ROWS, G], tl.float32)
        for r in tl.static_range(STRIPES):
            value = summand(source, here, part, base, size, place, inside, groups, h, G, K, PRODUCT, NORM, MODE, BITS, LOWEST, FULL,
                            HARDWARE, FOLD)
            total = value if r == 0 else total + value
            source += stripe
        if HADAMARD and not PRODUCT:
            total = butterflies(total, ROWS, G, 0, LOG_G)
        put(total, out + base, here, left, inside, WHOLE, FULL)


@triton.jit(do_not_specialize=["seed_low", "seed_high", "groups"])
def reduce_kernel(wire, out, bad, peaks, seed_low, seed_high, groups, stripe, ROWS: tl.constexpr, G: tl.constexpr,
                  STRIPES: tl.constexpr, MODE: tl.constexpr, SECOND: tl.constexpr, ALPHA: tl.constexpr, TOP: tl.constexpr,
                  TOP_CODE: tl.constexpr, BITS: tl.constexpr, LOWEST: tl.constexpr, CHANCE: tl.constexpr, FULL: tl.constexpr,
                  STAGES: tl.constexpr, HARDWARE: tl.constexpr):
    here = tl.arange(0, ROWS)[:, None] * G + tl.arange(0, G)[None, :]
    size = groups.to(tl.int64) * G
    for tile in tl.range(tl.program_id(0), tl.cdiv(groups, ROWS), tl.num_programs(0), num_stages=STAGES):
        place, inside, base = placed(tile, groups, ROWS, G)
        source = wire
        y = tl.zeros([ROWS, G], tl.float32)
        for r in tl.static_range(STRIPES):
            value = from_code(fetched(source + base, here, 0, inside, True, FULL), tl.float32, BITS, LOWEST, HARDWARE)
            value *= scales((source + size).to(tl.pointer_type(tl.float32)), place, inside, groups, MODE)[:, None]
            y = value if r == 0 else y + value
            source += stripe
        sent = 0.0
        if MODE != LEAN and MODE != QUOTIENT:
            pre, sent = factors(y, MODE, ALPHA, TOP, G)
            y *= pre[:, None]
        write(y, sent, out, place, inside, here, groups, base, base, bad, peaks, seed_low, seed_high, ROWS, G, MODE, SECOND, TOP,
              TOP_CODE, BITS, LOWEST, CHANCE, FULL, HARDWARE)


@cache
def matrix(size: int, dtype: torch.dtype, scale: float, codes: bool, device: torch.device) -> Tensor:
    """[size, size] of +scale where i & j has an even number of ones, else -scale. Made once; programs read it from the cache.

    codes: rows in the order in which `kernels.taco_tile.operand` gives the columns of codes.
    """
    h = torch.ones(1, 1)
    while len(h) < size:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    if codes:
        h = h.view(size // 16, 4, 2, 2, size).transpose(1, 2).reshape(size, size)
    return (h * scale).to(device, dtype)


def _grid(groups: int, group: int, rows: int, device: torch.device, per: int) -> tuple[int, int]:
    """As many programs as run at once, or a small tile each; those beyond the last tile end at once."""
    tiles = max(1, triton.cdiv(groups * group, min(TILE_SMALL, TILE_PLAIN)))
    if device.type != "cuda":
        return tiles, rows
    return max(1, min(tiles, per * torch.cuda.get_device_properties(device).multi_processor_count // rows)), rows


def _halves(noise: int | None) -> dict[str, int]:
    return dict(zip(("seed_low", "seed_high"), halves(noise or 0)))


def _transform(group: int) -> dict[str, Any]:
    return {"LOG_G": group.bit_length() - 1, "K": min(group, WIDEST)}


def _by_arch(groups: int, group: int, whole: bool, product: bool = False, stripes: int = 1, small: bool = False) -> dict[str, Any]:
    """What an architecture decides; small: the product's tile would not fit the registers from sm_100 on."""

    def rows(arch: int) -> int:
        if not product:
            tile = TILE_PLAIN if stripes < MANY else TILE_SMALL
        else:
            tile = TILE_SMALL if small and arch >= 100 else TILE
        return max(1, tile // group)

    def fold(arch: int) -> bool:
        return product and stripes == 1 and group == 2 * WIDEST and arch < 100 and rows(arch) % 8 == 0

    def stages(arch: int) -> int:
        return 2 if product and (stripes > 2 or (group > WIDEST and not fold(arch))) else STAGES

    return {"HARDWARE": lambda arch: arch >= E4M3_FROM, "ROWS": rows, "STAGES": stages, "FOLD": fold,
            "FULL": lambda arch: whole and groups % rows(arch) == 0}


def _numbers(numbers: Format) -> dict[str, Any]:
    return {"BITS": numbers.mantissa, "LOWEST": numbers.lowest}


@lru_cache(maxsize=4096)
def encoding(rows: int, n: int, groups: int, dtype: torch.dtype, device: torch.device, group: int, mode: str, hadamard: bool,
             alpha: bool, numbers: Format, top: float, chance: bool, product: bool | None, second: bool) -> tuple:
    """(grid, constants, those of an architecture, the matrix): the same for every message of a shape."""
    product = hadamard and (dtype == torch.bfloat16 if product is None else product)
    whole, scaled = n == groups * group, mode not in ("paper", "coarse")
    norm = 1.0 if not hadamard else 1.0 / group if scaled else 1.0 / math.sqrt(group)
    h = matrix(min(group, WIDEST), dtype, norm if scaled else 1.0, False, device) if product else None
    constants = Kept({"G": group} | _transform(group) | _numbers(numbers) | {
        "HADAMARD": hadamard, "PRODUCT": product, "WHOLE": whole, "NORM": norm, "MODE": MODES[mode], "SECOND": second,
        "ALPHA": alpha, "TOP": top, "TOP_CODE": numbers.top, "CHANCE": chance})
    by_arch = _by_arch(groups, group, whole, product, 1, group > WIDEST)
    return _grid(groups, group, rows, device, PER_PROCESSOR if hadamard else PER_PROCESSOR_PLAIN), constants, by_arch, h


def encode_launch(x: Tensor, wire: Tensor, group: int = 128, *, mode: str = "lean", hadamard: bool = True, alpha: bool = True,
                  format: str = "e4m3", target: float | None = None, noise: int | None = None, bad: Tensor | None = None,
                  product: bool | None = None, peaks: Tensor | None = None, second: bool = False) -> Launch:
    """x [r, n], wire [r, b]; peaks [r] int32 zeros for mode coarse, whose first pass fills them."""
    top = checked(group, mode, format, target, alpha)
    return encode_launch_of(x, wire, group, groups_of(wire.shape[1], group, mode), FORMATS[format], top, mode=mode,
                            hadamard=hadamard, alpha=alpha, noise=noise, bad=bad, product=product, peaks=peaks, second=second)


def encode_launch_of(x: Tensor, wire: Tensor, group: int, groups: int, numbers: Format, top: float, *, mode: str, hadamard: bool,
                     alpha: bool = True, noise: int | None = None, bad: Tensor | None = None, product: bool | None = None,
                     peaks: Tensor | None = None, second: bool = False) -> Launch:
    """As `encode_launch` for any numbers, of rows of `groups` groups; what is given has been checked."""
    rows, n = x.shape
    grid, constants, by_arch, h = encoding(rows, n, groups, x.dtype, x.device, group, mode, hadamard, alpha, numbers, top,
                                           noise is not None, product, second)
    arguments = {"x": x, "wire": wire, "bad": bad, "peaks": peaks, "matrix": h, **_halves(noise), "n": n, "groups": groups,
                 "x_stride": x.stride(0), "wire_stride": wire.stride(0)}
    return Launch(encode_kernel, grid, arguments, constants, WARPS, by_arch)


@lru_cache(maxsize=4096)
def decoding(rows: int, n: int, groups: int, dtype: torch.dtype, device: torch.device, group: int, mode: str, hadamard: bool,
             numbers: Format, product: bool | None, stripes: int) -> tuple:
    """As `encoding`."""
    product = hadamard and (dtype == torch.bfloat16 or stripes == 1 if product is None else product)
    whole = n == groups * group
    norm = 1.0 / math.sqrt(group) if hadamard and mode in ("paper", "coarse") else 1.0
    h = matrix(min(group, WIDEST), torch.float16, 1.0, True, device) if product else None
    constants = Kept({"G": group} | _transform(group) | _numbers(numbers) | {
        "STRIPES": stripes, "HADAMARD": hadamard, "PRODUCT": product, "WHOLE": whole, "NORM": norm, "MODE": MODES[mode]})
    by_arch = _by_arch(groups, group, whole, product, stripes, group > WIDEST or stripes > 1 or dtype == torch.float32)
    per = PER_PROCESSOR_PLAIN if not hadamard else PER_PROCESSOR_READ if stripes == 1 and group <= 2 * WIDEST else PER_PROCESSOR
    return _grid(groups, group, rows, device, per), constants, by_arch, h


def decode_launch(wire: Tensor, out: Tensor, group: int = 128, *, mode: str = "lean", hadamard: bool = True,
                  format: str = "e4m3", product: bool | None = None, stripes: int = 1, stripe: int | None = None) -> Launch:
    """wire [r, b] -> out [r, n]; stripes p: wire [p, b] -> out [1, n], and where they lie apart, `stripe` bytes from each to
    the next, `wire` is the first of them."""
    checked(group, mode, format)
    return decode_launch_of(wire, out, group, groups_of(wire.shape[1], group, mode), FORMATS[format], mode=mode,
                            hadamard=hadamard, product=product, stripes=stripes, stripe=stripe)


def decode_launch_of(wire: Tensor, out: Tensor, group: int, groups: int, numbers: Format, *, mode: str, hadamard: bool,
                     product: bool | None = None, stripes: int = 1, stripe: int | None = None) -> Launch:
    """As `decode_launch` for any numbers, of rows of `groups` groups; what is given has been checked."""
    rows, n = out.shape
    grid, constants, by_arch, h = decoding(rows, n, groups, out.dtype, out.device, group, mode, hadamard, numbers, product, stripes)
    arguments = {"wire": wire, "out": out, "matrix": h, "n": n, "groups": groups,
                 "stripe": wire.stride(0) if stripe is None else stripe, "wire_stride": wire.stride(0), "out_stride": out.stride(0)}
    return Launch(decode_kernel, grid, arguments, constants, WARPS, by_arch)


@lru_cache(maxsize=4096)
def reducing(stripes: int, groups: int, device: torch.device, group: int, mode: str, alpha: bool, numbers: Format, top: float,
             chance: bool, second: bool) -> tuple:
    """(grid, constants, those of an architecture)."""
    constants = Kept({"G": group} | _numbers(numbers) | {
        "STRIPES": stripes, "MODE": MODES[mode], "SECOND": second, "ALPHA": alpha, "TOP": top, "TOP_CODE": numbers.top,
        "CHANCE": chance})
    grid = _grid(groups, group, 1, device, PER_PROCESSOR_PLAIN * (1 if stripes < MANY else 2))
    by_arch = _by_arch(groups, group, True, False, stripes)
    del by_arch["FOLD"]
    return grid[:1], constants, by_arch


def reduce_launch(wires: Tensor, out: Tensor, group: int = 128, *, mode: str = "lean", alpha: bool = True, format: str = "e4m3",
                  target: float | None = None, noise: int | None = None, bad: Tensor | None = None,
                  peaks: Tensor | None = None, second: bool = False) -> Launch:
    """wires [p, b] -> out [b]; peaks [1] as in `encode_launch`."""
    top = checked(group, mode, format, target, alpha)
    return reduce_launch_of(wires, out, group, groups_of(wires.shape[1], group, mode), FORMATS[format], top, mode=mode, alpha=alpha,
                            noise=noise, bad=bad, peaks=peaks, second=second)


def reduce_launch_of(wires: Tensor, out: Tensor, group: int, groups: int, numbers: Format, top: float, *, mode: str,
                     alpha: bool = True, noise: int | None = None, bad: Tensor | None = None, peaks: Tensor | None = None,
                     second: bool = False) -> Launch:
    """As `reduce_launch` for any numbers, of rows of `groups` groups; what is given has been checked."""
    grid, constants, by_arch = reducing(len(wires), groups, out.device, group, mode, alpha, numbers, top, noise is not None, second)
    arguments = {"wire": wires, "out": out, "bad": bad, "peaks": peaks, **_halves(noise), "groups": groups,
                 "stripe": wires.stride(0)}
    return Launch(reduce_kernel, grid, arguments, constants, WARPS, by_arch)


def encode(x: Tensor, group: int = 128, *, mode: str = "lean", hadamard: bool = True, alpha: bool = True, format: str = "e4m3",
           target: float | None = None, noise: int | None = None, out: Tensor | None = None, bad: Tensor | None = None,
           product: bool | None = None) -> Tensor:
    """x [..., n] float -> wires [..., nbytes(n)] uint8, into `out` where given.

    noise: a 64-bit key, for stochastic rounding; element i of the padded rows, flat, uses lane i mod 4 of Philox counter
    i // 4. bad: int32, one element, to which groups with a NaN or Inf are added. product: how H is done (module docstring);
    None: for bfloat16. Raises ValueError for an option that does not fit and for numbers that are not floating-point.
    """
    checked(group, mode, format, target, alpha)
    if not x.is_floating_point():
        raise ValueError(f"taco: {x.dtype}: only floating-point numbers are encoded")
    options = {"mode": mode, "hadamard": hadamard, "alpha": alpha, "format": format, "target": target, "noise": noise, "bad": bad,
               "product": product}
    return encoded(x, nbytes(x.shape[-1], group, mode), out, lambda source, wire: _twice(
        lambda **phase: encode_launch(source, wire, group, **options, **phase), mode, source))


def decode(wire: Tensor, group: int = 128, *, mode: str = "lean", hadamard: bool = True, format: str = "e4m3",
           out: Tensor | None = None, product: bool | None = None) -> Tensor:
    """wires [..., nbytes(n)] uint8 -> x [..., n], float32 of whole groups unless `out` [..., n] (any float) is given."""
    rows = rows_of(wire if fits(wire) else wire.contiguous())
    return decoded(rows, groups_of(rows.shape[1], group, mode) * group, out, wire.shape[:-1], lambda found: decode_launch(
        rows, found, group, mode=mode, hadamard=hadamard, format=format, product=product).run())


def total(wires: Tensor, group: int = 128, *, mode: str = "lean", hadamard: bool = True, format: str = "e4m3",
          out: Tensor | None = None, product: bool | None = None, stripes: int | None = None, stripe: int | None = None) -> Tensor:
    """wires [p, nbytes(n)] uint8 -> sum of their rows [n] in float32 and rank order; `out` as in `decode`.

    Where rows are no tensor of their own, `wires` is the first, and `stripes` of them lie `stripe` bytes apart, in the memory of
    peers too.
    """
    rows = wires if stripe is not None or fits(wires) else wires.contiguous()
    return decoded(rows[:1], groups_of(rows.shape[1], group, mode) * group, out, (), lambda found: decode_launch(
        rows, found, group, mode=mode, hadamard=hadamard, format=format, product=product, stripes=stripes or len(rows),
        stripe=stripe).run())


def reduce(wires: Tensor, group: int = 128, *, mode: str = "lean", hadamard: bool = True, alpha: bool = True,
           format: str = "e4m3", target: float | None = None, noise: int | None = None, out: Tensor | None = None,
           bad: Tensor | None = None) -> Tensor:
    """wires [p, b] uint8 -> wire [b] of the sum of their rows: decoded, summed in float32 in rank order, encoded again.

    Codes lie in the transformed domain already, so `hadamard` changes nothing here. Options as in `encode`; the padding of
    a row must have been zeros.
    """
    options = {"mode": mode, "alpha": alpha, "format": format, "target": target, "noise": noise, "bad": bad}
    return reduced(wires, out, lambda rows, wire: _twice(
        lambda **phase: reduce_launch(rows, wire, group, **options, **phase), mode, rows[:1]))


def _twice(launch: Any, mode: str, rows: Tensor) -> None:
    """One pass, or the two of mode coarse."""
    if mode != "coarse":
        return launch().run()
    peaks = torch.zeros(len(rows), dtype=torch.int32, device=rows.device)
    launch(peaks=peaks).run()
    return launch(peaks=peaks, second=True).run()
