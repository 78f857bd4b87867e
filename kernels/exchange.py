"""A whole compressed collective as one kernel, where ranks reach each other's memory: encode, meet, decode what peers hold.

    exchange   x [r, n] of this rank, r 1 or p          encoded into this rank's slot [r, b], which all p ranks can read
               out [1, n]   the sum over ranks of their row `row`, in float32 and rank order
               out [p, n]   every rank's row 0, in rank order

    r, out rows   1, 1  one-shot all-reduce      p, 1 (row: this rank's index)  reduce-scatter      1, p  all-gather

Program b of every rank holds the same tiles, so that it need wait for the programs b of its peers alone. It takes them in
rounds: while a round is encoded the one before crosses, read by other programs of the same multiprocessor, and bytes that crossed
are stored nowhere. Programs meet through flags, int32 [p, ROUNDS, WIDTH] on each rank: having written round k, program b of rank i
adds one to flag [i, k, b] of every other rank, which takes it away again when it reads. Released and acquired at system scope, as
writes to a slot must be seen over the link; once all ranks are through a call, its flags are zeros.
Tiles, modes and numbers are those of kernels/taco.py, and with mode `quotient` of kernels/grouped.py; mode coarse, which needs two
passes, has no such kernel.
"""
from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import grouped_reference
from kernels.float8 import E4M3_FROM
from kernels.launch import Kept, Launch
from kernels.taco import MODES, TILE, WARPS, WIDEST, _by_arch, _grid, _halves, _numbers, _transform, matrix
from kernels.taco_reference import FORMATS, Format, checked, nbytes
from kernels.taco_tile import butterflies, placed, put, summand, transformed, write
from kernels.wires import slot

WIDTH = 1024  # the most programs of a call
ROUNDS = 8  # the most rounds
ROUND = 8  # tiles of a program in a round: shorter ones cost more in meeting than they hide (H200, two GPUs)
PER_PROCESSOR = 2
WHOLE_CALL, WRITE, READ = 0, 1, 2  # phases: both and the meeting between them, or one of them alone
_WRITE, _READ = tl.constexpr(WRITE), tl.constexpr(READ)


@triton.jit
def flag_of(flags, rank, row, number, ROUNDS: tl.constexpr, WIDTH: tl.constexpr):
    """This program's flag [row, number] on a rank."""
    return tl.load(flags + rank).to(tl.pointer_type(tl.int32)) + (row * ROUNDS + number) * WIDTH + tl.program_id(0)


@triton.jit
def tell(flags, me, number, PEERS: tl.constexpr, ROUNDS: tl.constexpr, WIDTH: tl.constexpr):
    """What this program has written can be read by the same program of every other rank."""
    tl.debug_barrier()
    for rank in tl.static_range(PEERS):
        if rank != me:
            tl.atomic_add(flag_of(flags, rank, me, number, ROUNDS, WIDTH), 1, sem="release", scope="sys")


@triton.jit
def await_peers(flags, me, number, PEERS: tl.constexpr, ROUNDS: tl.constexpr, WIDTH: tl.constexpr):
    """Returns once the same program of every other rank has told."""
    for rank in tl.static_range(PEERS):
        if rank != me:
            flag = flag_of(flags, me, rank, number, ROUNDS, WIDTH)
            while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < 1:
                pass
            tl.atomic_add(flag, -1, sem="relaxed", scope="sys")
    tl.debug_barrier()


@triton.jit(do_not_specialize=["seed_low", "seed_high", "n", "groups", "me", "row", "rounds"])
def exchange_kernel(x, out, slots, flags, bad, encoder, decoder, seed_low, seed_high, n, groups, me, row, rounds, x_stride,
                    slot_stride, out_stride, ROWS: tl.constexpr, G: tl.constexpr, LOG_G: tl.constexpr, K: tl.constexpr,
                    SENT: tl.constexpr, SUM: tl.constexpr, PEERS: tl.constexpr, ROUNDS: tl.constexpr, WIDTH: tl.constexpr,
                    PHASE: tl.constexpr, HADAMARD: tl.constexpr, PRODUCT: tl.constexpr, READ_PRODUCT: tl.constexpr,
                    WHOLE: tl.constexpr, NORM: tl.constexpr, READ_NORM: tl.constexpr, MODE: tl.constexpr, ALPHA: tl.constexpr,
                    TOP: tl.constexpr, TOP_CODE: tl.constexpr, BITS: tl.constexpr, LOWEST: tl.constexpr, CHANCE: tl.constexpr,
                    FULL: tl.constexpr, STAGES: tl.constexpr, HARDWARE: tl.constexpr, FOLD: tl.constexpr):
    k = tl.arange(0, K)
    here = tl.arange(0, ROWS)[:, None] * G + tl.arange(0, G)[None, :]
    part = tl.arange(0, ROWS)[:, None] * G + k[None, :]
    size = groups.to(tl.int64) * G
    mine = tl.multiple_of(tl.load(slots + me).to(tl.pointer_type(tl.uint8)), 16)
    nought = (me * 0).to(tl.int64)  # offsets of rows are 64 bits wide
    tiles = tl.cdiv(groups, ROWS)
    step = tl.num_programs(0)
    length = tl.cdiv(tl.cdiv(tiles, step), rounds) * step
    for number in tl.range(0, rounds + 1):
        if PHASE != _READ:
            h = tl.load(encoder + (k[:, None] * K + k[None, :])) if PRODUCT else 0
            first = number * length
            last = tl.minimum(first + length, tiles)  # none in the last round, where the one before is read
            for sent_row in tl.static_range(SENT):
                source = x + (nought + sent_row) * x_stride
                wire = mine + (nought + sent_row) * slot_stride
                for tile in tl.range(first + tl.program_id(0), last, step, num_stages=STAGES):
                    place, inside, base = placed(tile, groups, ROWS, G)
                    left = n - base
                    y, sent = transformed(source + base, here, part, left, inside, h, ROWS, G, LOG_G, K, HADAMARD, PRODUCT, WHOLE,
                                          NORM, MODE, ALPHA, TOP, BITS, LOWEST, FULL, HARDWARE, FOLD)
                    write(y, sent, wire, place, inside, here, groups, base, sent_row * size + base, bad, None, seed_low, seed_high,
                          ROWS, G, MODE, False, TOP, TOP_CODE, BITS, LOWEST, CHANCE, FULL, HARDWARE)
        if PHASE != _READ and PHASE != _WRITE:
            if number < rounds:
                tell(flags, me, number, PEERS, ROUNDS, WIDTH)
            if number > 0:
                await_peers(flags, me, number - 1, PEERS, ROUNDS, WIDTH)
        if PHASE != _WRITE:
            g = tl.load(decoder + (k[:, None] * K + k[None, :])) if READ_PRODUCT else 0
            first = tl.maximum(number - 1, 0) * length
            last = tl.where(number > 0, tl.minimum(first + length, tiles), 0)
            for tile in tl.range(first + tl.program_id(0), last, step, num_stages=STAGES):
                place, inside, base = placed(tile, groups, ROWS, G)
                left = n - base
                total = tl.zeros([ROWS, G], tl.float32)
                for rank in tl.static_range(PEERS):
                    wire = tl.multiple_of(tl.load(slots + rank).to(tl.pointer_type(tl.uint8)), 16) + (nought + row) * slot_stride
                    value = summand(wire, here, part, base, size, place, inside, groups, g, G, K, READ_PRODUCT, READ_NORM, MODE,
                                    BITS, LOWEST, FULL, HARDWARE, FOLD)
                    if SUM:
                        total = value if rank == 0 else total + value
                    else:
                        if HADAMARD and not READ_PRODUCT:
                            value = butterflies(value, ROWS, G, 0, LOG_G)
                        put(value, out + (nought + rank) * out_stride + base, here, left, inside, WHOLE, FULL)
                if SUM:
                    if HADAMARD and not READ_PRODUCT:
                        total = butterflies(total, ROWS, G, 0, LOG_G)
                    put(total, out + base, here, left, inside, WHOLE, FULL)


@lru_cache(maxsize=4096)
def exchanging(sent: int, received: int, n: int, peers: int, dtype: torch.dtype, wide: bool, device: torch.device, group: int,
               mode: str, hadamard: bool, alpha: bool, format: str, target: float | None, chance: bool, product: bool | None,
               phase: int) -> tuple:
    """(grid, constants, those of an architecture, matrices, groups of a row, rounds): the same for every message of a shape."""
    if mode == "coarse":
        raise ValueError("taco: mode coarse takes two passes: no exchange in one kernel")
    scaled = mode != "paper"
    if mode == "quotient":
        numbers: Format = grouped_reference.checked(group, format)
        top = numbers.top
    else:
        numbers, top = FORMATS[format], checked(group, mode, format, target, alpha)
    write_product = hadamard and (dtype == torch.bfloat16 if product is None else product)
    read_product = hadamard and (not wide if product is None else product)
    groups = -(-n // group)
    whole, norm, width = n == groups * group, 1.0 / group if scaled else 1.0 / math.sqrt(group), min(group, WIDEST)
    encoder = matrix(width, dtype, norm if scaled else 1.0, False, device) if write_product else None
    decoder = matrix(width, torch.float16, 1.0, True, device) if read_product else None
    constants = Kept({"G": group} | _transform(group) | _numbers(numbers) | {
        "SENT": sent, "SUM": received == 1, "PEERS": peers, "ROUNDS": ROUNDS, "WIDTH": WIDTH, "PHASE": phase, "HADAMARD": hadamard,
        "PRODUCT": write_product, "READ_PRODUCT": read_product, "WHOLE": whole, "NORM": norm if hadamard else 1.0,
        "READ_NORM": 1.0 / math.sqrt(group) if hadamard and not scaled else 1.0, "MODE": MODES[mode], "ALPHA": alpha,
        "TOP": top, "TOP_CODE": numbers.top, "CHANCE": chance})
    by_arch = _by_arch(groups, group, whole, write_product or read_product, peers if received == 1 else 1, True)
    rows = by_arch["ROWS"]  # below sm_89 codes made in integer arithmetic leave registers for half a tile
    by_arch |= {"ROWS": lambda arch: max(1, rows(arch) // (2 if 0 < arch < E4M3_FROM else 1))}
    programs = min(_grid(groups, group, 1, device, PER_PROCESSOR)[0], WIDTH)
    rounds = min(ROUNDS, max(1, groups * group // (programs * ROUND * TILE)))
    return (programs,), constants, by_arch, encoder, decoder, groups, rounds


def exchange_launch(x: Tensor, out: Tensor, slots: Tensor, flags: Tensor, rank: int, group: int = 128, *, mode: str = "lean",
                    hadamard: bool = True, alpha: bool = True, format: str = "e4m3", target: float | None = None,
                    noise: int | None = None, bad: Tensor | None = None, product: bool | None = None,
                    phase: int = WHOLE_CALL) -> Launch:
    """x [r, n], out [1, n] or [p, n], slots and flags int64 [p]: addresses on this device of each rank's slot and flags."""
    (sent, n), peers = x.shape, slots.shape[0]
    grid, constants, by_arch, encoder, decoder, groups, rounds = exchanging(
        sent, out.shape[0], n, peers, x.dtype, out.dtype == torch.float32 and out.shape[0] == 1, x.device, group, mode, hadamard,
        alpha, format, target, noise is not None, product, phase)
    arguments = {"x": x, "out": out, "slots": slots, "flags": flags, "bad": bad, "encoder": encoder, "decoder": decoder,
                 **_halves(noise), "n": n, "groups": groups, "me": rank, "row": rank if sent > 1 else 0, "rounds": rounds,
                 "x_stride": x.stride(0), "slot_stride": slot_bytes(n, group, mode), "out_stride": out.stride(0)}
    return Launch(exchange_kernel, grid, arguments, constants, WARPS, by_arch)


def slot_bytes(n: int, group: int = 128, mode: str = "lean") -> int:
    """Of a row of n elements."""
    return slot(nbytes(n, group, "lean" if mode == "quotient" else mode))


def exchange(x: Tensor, out: Tensor, slots: Tensor, flags: Tensor, rank: int, group: int = 128, **options: Any) -> Tensor:
    """The collective of the module docstring on this rank; x [r, n] and out [1 or p, n] bfloat16 or float32, rows contiguous.

    slots, flags: int64 [p], addresses of the ranks' slots [r, slot_bytes(n)] and flags int32 [p, ROUNDS, WIDTH], all zeros before
    the first call. A slot must not be written before its readers are done: two slots in turn suffice, since a rank that met its
    peers in the call between knows that they have read. Every rank must call with the same shapes and options; one that does
    not come lets the others wait. Options as in kernels.taco.encode; mode `quotient`: those of kernels.grouped.encode.
    """
    exchange_launch(x, out, slots, flags, rank, group, **options).run()
    return out


def loopback(x: Tensor, out: Tensor, slot: Tensor, raised: Tensor, slots: Tensor, flags: Tensor, group: int = 128,
             **options: Any) -> Tensor:
    """An exchange of a rank with itself alone, which one process can time. x, out [1, n]; slot uint8 [slot_bytes(n)] and raised
    int32 [ROUNDS, WIDTH] lie at slots[0] and flags[0]."""
    return exchange(x, out, slots, flags, 0, group, **options)
