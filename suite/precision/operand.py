"""An operand of a quantised product: its format, and what comes of a tensor in that format.

The one place where the precision axis meets the formats. A tensor is padded with zeros to whole blocks and, where it is rotated,
given back with the padding that the rotation filled (at most 15 columns, the same for both operands of a product).
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import DTYPES
from kernels.nvfp4_reference import Keyed, Quantized, factors, key_of, rotate
from suite.precision import blocks
from suite.precision.blocks import Segment

ROWS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
# how operands are made on a GPU: by NVFP4's kernels where there are any; by the plain-torch reference, compiled; by it as it is
QUANTISERS = ("kernels", "compiled", "eager")
VARIANTS = 64  # compiled of a function of suite/precision/blocks.py: by format, layout and where keys lie
BLOCK = {"nvfp4": 128, "mxfp4": 32, "mxfp8": 32}  # columns to which an operand is padded


@dataclass(frozen=True)
class Operand:
    """format: nvfp4, mxfp4, mxfp8, e4m3, e5m2 (a scale a row), or none. margin: no code clips. outer: elements under a float32
    scale (128, or the tensor). block: rows under an inner scale."""

    format: str
    rounding: str = "nearest"
    hadamard: bool = False
    margin: bool = False
    outer: int | str = 128
    block: int = 1

    @property
    def fusible(self) -> bool:
        """Whether there are kernels that make it."""
        return self.format == "nvfp4"


MXFP8 = Operand("mxfp8")


@dataclass(frozen=True)
class Place:
    """Where rows and columns of an operand lie in the unsharded tensor: what its noise is counted by."""

    rows: Sequence[Segment]
    columns: Sequence[Segment]


@dataclass(frozen=True)
class Given:
    """values [r, k]: dequantised, in the dtype of the product (None where there is `packed` alone); of e4m3 and e5m2 the codes in
    their own dtype, with a scale a row.
    codes, scales: of every element, float32 [r, k]; before: what was rounded, rotated where it is. These only where asked for.
    inner [r, K], outer [r, K / 128]: codes times inner scales, float32 or bfloat16, and outer scales, K whole blocks (nvfp4);
    columns: of K those with data; packed: the same as the kernels hold it. narrow: values have so few bits, and scales that are
    powers of two, that bfloat16 holds them."""

    values: Tensor | None
    codes: Tensor | None = None
    scales: Tensor | None = None
    before: Tensor | None = None
    inner: Tensor | None = None
    outer: Tensor | None = None
    packed: Quantized | None = None
    columns: int | None = None
    narrow: bool = False

    @property
    def by_rows(self) -> bool:
        return self.values is not None and self.values.dtype in ROWS.values()

    @property
    def rows(self) -> int:
        return len(next(one for one in (self.values, self.inner, self.packed and self.packed.codes) if one is not None))

    def dense(self) -> Tensor:
        if self.values is None and self.packed is None:
            return (self.inner.view(*self.outer.shape, 128) * self.outer[..., None]).flatten(1)[:, :self.columns].contiguous()
        if self.values is None:
            return dequantise(self.packed)
        return self.values.to(torch.float32) * self.scales if self.by_rows else self.values

    def clipped(self) -> Tensor:
        """Elements beyond the largest E2M1 code."""
        if self.codes is None:
            return torch.zeros_like(self.values, dtype=torch.bool)
        return self.before.abs() > 6.0 * self.scales


def dequantise(q: Quantized) -> Tensor:
    """[r, k] float32."""
    if not q.codes.is_cuda:
        return q.dequantize()
    from kernels.nvfp4 import dequantize

    return dequantize(q)


def nearness(weight: Tensor, code: Tensor, scale: Tensor) -> Tensor:
    """1 where a weight lies at a decision edge, 0 at half a gap from it. code: twice the E2M1 value. Beyond the outermost codes
    there is no edge."""
    z, c = weight.abs() / scale, code.abs().to(torch.float32) / 2
    low = torch.where(c <= 2, 0.25, torch.where(c <= 4, 0.5, 1.0))
    high = torch.where(c < 2, 0.25, torch.where(c < 4, 0.5, 1.0))
    up = torch.where(c == 6, torch.inf, (c + high - z) / high)
    down = torch.where(c == 0, torch.inf, (z - (c - low)) / low)
    return (1 - torch.minimum(up, down)).clamp(0, 1)


def quantise(x: Tensor, operand: Operand, kept: torch.dtype, *, key: Keyed = None, signs: Keyed = None,
             place: Place | None = None, most: Callable[[Tensor], Tensor] = lambda amax: amax, whole: bool = True,
             by: str = "kernels", packed: bool = True, out: Tensor | None = None) -> Given:
    """x [r, k] of any strides and float dtype. key: of its noise, for stochastic rounding; signs: of its rotation; either may be a
    row of kernels.nvfp4_reference.drawn, on x's device; most: see blocks.nvfp4. whole: also codes, scales and what was rounded,
    which only some ask for. by: see QUANTISERS. packed: of kernels in float32, as codes; else as codes times inner scales. out:
    where the values are to lie, of dtype `kept` and with contiguous rows."""
    given = _quantised(x, operand, kept, key, signs, place, most, whole, by, packed, out)
    if out is None or given.values is out:
        return given
    return replace(given, values=out.copy_(given.dense()))


def _quantised(x: Tensor, operand: Operand, kept: torch.dtype, key: Keyed, signs: Keyed, place: Place | None,
               most: Callable[[Tensor], Tensor], whole: bool, by: str, packed: bool, out: Tensor | None) -> Given:
    """See `quantise`; in `out` only where kernels write it."""
    if operand.format == "none":
        return Given(x.to(kept))
    if operand.format in ROWS:
        x = F.pad(x, (0, -x.shape[1] % 16))  # as FP8 tensor cores want it
        found = _on(x.device, blocks.rows, x.to(torch.float32), operand.format)
        return Given(found.values, None, found.scale, x)
    if x.is_cuda and operand.fusible and not whole and by == "kernels" and in_pieces(place, key):
        return fused(x, operand, kept, key, signs, place, most, packed, out=out)
    if x.is_cuda and operand == MXFP8 and not whole and by == "kernels" and kept in DTYPES:
        from kernels.mxfp8 import rounded

        return Given(rounded(x if x.dtype in DTYPES else x.to(torch.float32), dtype=kept, out=out), narrow=True)
    if operand.fusible and not whole and by == "compiled" and operand.outer == 128 and kept != torch.float32:
        return Given(in_one(x, operand, kept, key, signs, place))
    k = x.shape[1] + (-x.shape[1] % 16 if operand.hadamard else 0)
    padded = k + -k % BLOCK[operand.format]
    x = F.pad(x.to(torch.float32), (0, padded - x.shape[1])).contiguous()
    if operand.hadamard:
        x = rotate(x, factors(signs, x.device))
    on = _on if by != "eager" else lambda device, function, *arguments: function(*arguments)
    u = None if key is None else on(x.device, blocks.uniform, _key(key), place.rows, place.columns, padded, x.device)
    if operand.format == "nvfp4":
        if operand.outer == 128:
            found = on(x.device, blocks.nvfp4, x, u, operand.margin, 128, operand.block, None)
        else:  # a message lies within: not compiled
            found = blocks.nvfp4(x, u, operand.margin, operand.outer, operand.block, most)
    elif operand.format == "mxfp4":
        found = on(x.device, blocks.mxfp4, x, u, not operand.margin)
    else:
        found = on(x.device, blocks.mxfp8, x)
    values = found.values.view(x.shape)[:, :k].to(kept)
    given = Given(values, narrow=found.inner is None)
    if found.inner is not None:
        outer = found.outer.expand(len(x), padded // 128, 1, 1).reshape(len(x), -1)
        given = Given(values, inner=found.inner.view(x.shape), outer=outer)
    if whole:
        codes, scales = (t.expand(found.codes.shape).reshape(x.shape)[:, :k] for t in (found.codes, found.scale))
        given = replace(given, codes=codes, scales=scales, before=x[:, :k])
    return given


def in_one(x: Tensor, operand: Operand, kept: torch.dtype, key: Keyed, signs: Keyed, place: Place | None) -> Tensor:
    """Values [r, k] by one compiled function, from the cast to the dequantised result."""
    k = x.shape[1] + (-x.shape[1] % 16 if operand.hadamard else 0)
    turn = factors(signs, x.device) if operand.hadamard else None
    where = (None, [], []) if key is None else (_key(key), place.rows, place.columns)
    return _on(x.device, blocks.dequantised, x, turn, *where, k, operand.margin, operand.block, kept)


def fused(x: Tensor, operand: Operand, kept: torch.dtype, key: Keyed, signs: Keyed, place: Place | None,
          most: Callable[[Tensor], Tensor], packed: bool = True, by: Any = None, out: Tensor | None = None) -> Given:
    """The same by the kernels of NVFP4, bit for bit: one pass over memory, one call a rectangle that lies in one piece in the
    unsharded tensor. In float32 alone is made what the products of that level read. by: kernels, or their references."""
    if by is None:
        from kernels import nvfp4 as by
    given = options(operand, key, signs)
    if operand.outer != 128:
        given["peak"] = most(by.largest_magnitude(x, signs))
    whole = [(0, x.shape[1], 0)], [(0, len(x), 0)]
    columns, rows = whole if key is None else (place.columns, place.rows)
    width = x.shape[1] + (-x.shape[1] % 16 if operand.hadamard else 0)
    if kept != torch.float32:
        values = torch.empty(len(x), width, dtype=kept, device=x.device) if out is None else out
        for row, r, first in rows:
            for at, n, start in columns:
                end = width if at + n == x.shape[1] else at + n
                by.rounded(x[row:row + r, at:at + n], origin=(first, start), **given, out=values[row:row + r, at:end])
        return Given(values)
    if not packed:
        values = torch.empty(len(x), width + -width % 128, dtype=torch.bfloat16, device=x.device)
        over = [[by.inner_values(x[row:row + r, at:at + n], origin=(first, start), **given,
                                 out=values[row:row + r, at:at + n + -n % 128])[1] for at, n, start in columns]
                for row, r, first in rows]
        outer = _joined([_joined(line, 1) for line in over], 0)[:len(x) if operand.outer == 128 else 1]
        outer = outer if operand.outer == 128 else outer[:, :1].expand(len(x), values.shape[1] // 128)
        return Given(None, inner=values, outer=outer, columns=width)
    found = [[by.quantize(x[row:row + r, at:at + n], origin=(first, start), **given) for at, n, start in columns]
             for row, r, first in rows]
    codes, inner, outer = (_joined([_joined([getattr(q, name) for q in line], 1) for line in found], 0)
                           for name in ("codes", "inner", "outer"))
    outer = outer if operand.outer == 128 else outer[:1, :1]
    return Given(None, packed=Quantized(codes, inner, outer, width))


def options(operand: Operand, key: Keyed, signs: Keyed) -> dict[str, Any]:
    """What the kernels of NVFP4 are asked for."""
    return {"rounding": operand.rounding, "margin": 16.0 / 17.0 if operand.margin else 1.0, "outer": operand.outer,
            "block": operand.block, "noise": key, "signs": signs}


def in_pieces(place: Place | None, key: Keyed) -> bool:
    """Whether each piece of the columns is whole blocks, so that pieces can be quantised apart."""
    if key is None:
        return True
    *before, (_, _, last) = place.columns
    return last % 8 == 0 and all(n % 128 == 0 == start % 8 for _, n, start in before)


def _joined(tensors: list[Tensor], dim: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim)


def _key(number: int | Tensor) -> Tensor:
    """64 bits as int64 []: an argument of compiled code, so that a new step compiles nothing."""
    if isinstance(number, Tensor):
        return key_of(number)
    return torch.tensor(number - (1 << 64) if number >> 63 else number)


_compiled: dict[Callable, Callable] = {}


def _on(device: torch.device, function: Callable, *arguments):
    """Fused by torch.compile on a GPU: eager would pass over memory dozens of times."""
    if device.type != "cuda":
        return function(*arguments)
    if function not in _compiled:
        import torch._dynamo

        # a recipe has more operands than torch compiles variants of a function by default: the rest would run eager
        torch._dynamo.config.recompile_limit = max(VARIANTS, torch._dynamo.config.recompile_limit)
        _compiled[function] = torch.compile(function, dynamic=True)
    return _compiled[function](*arguments)
