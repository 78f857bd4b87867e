"""Entries of kernels/registry.py: NVFP4's quantisers and products, and what channels that stay in MXFP8 pass through."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels import columns as columns_of
from kernels import mxfp8, nvfp4, nvfp4_product, nvfp4_reference, reference
from kernels.entry import BF16, FLOAT32, Entry, normal
from kernels.launch import Launch

BACK = {"rounding": "stochastic", "margin": nvfp4_reference.MARGIN, "noise": 7, "signs": 9}  # the backward's operands


def nvfp4_inputs(rows: int, columns: int, turned: bool, options: dict[str, Any], device: str, seed: int) -> dict[str, Any]:
    """Normal values; turned: [columns, rows] of them transposed, so that the contraction runs down their columns."""
    x = normal((rows, columns), BF16, device, seed)
    return {"x": x.t() if turned else x, **options}


def drawn_inputs(rows: int, columns: int, turned: bool, device: str, seed: int) -> dict[str, Any]:
    """As nvfp4_inputs for the backward, keys on the device: what a recorded step reads."""
    row = torch.empty(4, dtype=torch.int32, device=device)
    if device != "meta":
        row.copy_(nvfp4_reference.drawn([(BACK["noise"], BACK["signs"])])[0])
    return nvfp4_inputs(rows, columns, turned, BACK | {"noise": row, "signs": row}, device, seed)


def quantized(rows: int, columns: int, device: str, seed: int) -> nvfp4_reference.Quantized:
    """Normal values to nearest."""
    if device != "meta":
        return nvfp4_reference.nvfp4_quantize(normal((rows, columns), BF16, device, seed))
    codes, inner, outer = (torch.empty(rows, columns // n, dtype=dtype, device=device)
                           for n, dtype in ((2, torch.uint8), (16, torch.float8_e4m3fn), (128, FLOAT32)))
    return nvfp4_reference.Quantized(codes, inner, outer, columns)


def _packed(rows: int, columns: int, device: torch.device) -> list[Tensor]:
    """Codes, inner and outer scales, without values."""
    tiles = -(-columns // 128)
    return [torch.empty(rows, tiles * n, dtype=dtype, device=device)
            for n, dtype in ((64, torch.uint8), (8, torch.uint8), (1, FLOAT32))]


def _quantize_launch(x: Tensor, rounding: str = "", **options) -> Launch:
    return nvfp4.quantize_launch(x, *_packed(*x.shape, x.device), **options)


def _rounded_launch(x: Tensor, rounding: str = "", **options) -> Launch:
    width = x.shape[1] + (-x.shape[1] % 16 if "signs" in options else 0)
    return nvfp4.quantize_launch(x, out=torch.empty(len(x), width, dtype=BF16, device=x.device), **options)


def _requantize_launch(given: nvfp4_reference.Quantized, rounding: str = "", **options) -> Launch:
    return nvfp4.quantize_launch(given, *_packed(given.columns, len(given.codes), given.codes.device), **options)


def _dequantize_launch(q: nvfp4_reference.Quantized, dtype: torch.dtype) -> Launch:
    return nvfp4.dequantize_launch(q, torch.empty(len(q.codes), q.columns, dtype=dtype, device=q.codes.device))


def _largest_launch(x: Tensor, signs: int | None = None) -> Launch:
    return nvfp4.quantize_launch(x, signs=signs, peak=torch.zeros(1, dtype=torch.int32, device=x.device), search=True)


def _slab_launch(a: nvfp4_reference.Quantized, b: nvfp4_reference.Quantized, dtype: torch.dtype) -> Launch:
    return nvfp4_product.launch(a, b, torch.empty(len(a.codes), len(b.codes), dtype=dtype, device=a.codes.device))


def _inner_launch(x: Tensor, rounding: str = "", **options) -> Launch:
    tiles = -(-x.shape[1] // 128)
    outer, out = torch.empty(len(x), tiles, device=x.device), torch.empty(len(x), tiles * 128, dtype=BF16, device=x.device)
    return nvfp4.quantize_launch(x, outer=outer, out=out, **options)


def value_inputs(rows: int, columns: int, width: int, device: str, seed: int) -> dict[str, Any]:
    """Codes times inner scales, and outer scales, of [rows, width] and [columns, width]."""
    found: dict[str, Any] = {"dtype": BF16}
    for n, (name, r) in enumerate((("a", rows), ("b", columns))):
        x = normal((r, width), BF16, device, seed + n)
        made = nvfp4_reference.inner_values(x) if device != "meta" else (x, torch.empty(r, width // 128, device=device))
        found |= dict(zip((name, f"{name}_outer"), made))
    return found


def _values_launch(a: Tensor, a_outer: Tensor, b: Tensor, b_outer: Tensor, dtype: torch.dtype) -> Launch:
    return nvfp4_product.values_launch(a, a_outer, b, b_outer, torch.empty(len(a), len(b), dtype=dtype, device=a.device))


def nvfp4_entries(model: str, rows: int, columns: int) -> list[Entry]:
    """An operand to nearest, one of the backward, and one that lies transposed: as codes, and as the bfloat16 they stand for."""
    def entry(what: str, kind: str, turned: bool, options: dict[str, Any], launch: Callable) -> Entry:
        r, k = (columns, rows) if turned else (rows, columns)
        k_out = k + (-k % 16 if "signs" in options else 0)
        written = 2 * r * k_out if what == "rounded" else r * -(-k // 128) * (64 + 8 + 4)
        reference = getattr(nvfp4_reference, f"nvfp4_{what}")
        return Entry(f"nvfp4.{what}/{model}-{rows}x{columns}-{kind}", getattr(nvfp4, what), reference,
                     partial(nvfp4_inputs, rows, columns, turned, options), launch, 2 * rows * columns + written,
                     rows % 128 == columns % 128 == 0, 255)

    return [entry(what, kind, turned, options, launch)
            for what, launch in (("quantize", _quantize_launch), ("rounded", _rounded_launch))
            for kind, turned, options in (("nearest", False, {}), ("back", False, BACK), ("transposed", True, BACK))]


def nvfp4_beside(model: str, rows: int, columns: int) -> list[Entry]:
    """What takes keys from the device, what reads codes, the search for a tensor's largest magnitude, and the product over slabs
    with a square weight."""
    name, packed, plain = f"{model}-{rows}x{columns}", rows * columns * 76 // 128, 2 * rows * columns
    return [
        *(Entry(f"nvfp4.rounded/{name}-{kind}", nvfp4.rounded, nvfp4_reference.nvfp4_rounded,
                partial(drawn_inputs, rows, columns, turned), _rounded_launch, 2 * plain + 16, True, 255)
          for kind, turned in (("drawn", False), ("drawn-transposed", True))),
        Entry(f"nvfp4.dequantize/{name}", nvfp4.dequantize, nvfp4_reference.nvfp4_dequantize,
              lambda *place: {"q": quantized(rows, columns, *place), "dtype": BF16}, _dequantize_launch, packed + plain, True, 255),
        Entry(f"nvfp4.requantize/{name}", nvfp4.requantize, nvfp4_reference.nvfp4_requantize,
              lambda *place: {"given": quantized(rows, columns, *place), **BACK}, _requantize_launch, 2 * packed, True, 255),
        Entry(f"nvfp4.largest_magnitude/{name}", nvfp4.largest_magnitude, nvfp4_reference.largest_magnitude,
              lambda *place: nvfp4_inputs(rows, columns, False, {"signs": BACK["signs"]}, *place), _largest_launch, plain + 4, True,
              255),
        Entry(f"nvfp4.inner_values/{name}", nvfp4.inner_values, nvfp4_reference.inner_values,
              partial(nvfp4_inputs, rows, columns, False, BACK), _inner_launch, 2 * plain + rows * columns // 32, True, 255),
        Entry(f"nvfp4_product.slab_values/{name}x{columns}", nvfp4_product.slab_values, nvfp4_reference.slab_values,
              partial(value_inputs, rows, columns, columns), _values_launch,
              2 * plain + 2 * columns * columns + (rows + columns) * columns // 32, True, 255),
        Entry(f"nvfp4_product.slab/{name}x{columns}", nvfp4_product.slab, nvfp4_reference.slab_product,
              lambda device, seed: {"a": quantized(rows, columns, device, seed), "b": quantized(columns, columns, device, seed + 1),
                                    "dtype": BF16}, _slab_launch, packed + columns * columns * 76 // 128 + plain, True, 255)]


def _taken_inputs(rows: int, width: int, count: int, dtype: torch.dtype, device: str, seed: int) -> dict[str, Any]:
    """The columns at random."""
    order = torch.empty(count, dtype=torch.int64, device=device)
    if device != "meta":
        order = torch.randperm(width, generator=torch.Generator().manual_seed(seed))[:count].to(device)
    return {"x": normal((rows, width), dtype, device, seed), "order": order}


def _taken_launch(x: Tensor, order: Tensor) -> Launch:
    return columns_of.taken_launch(x, order, torch.empty(len(x), len(order), dtype=x.dtype, device=x.device))


def _mxfp8_launch(x: Tensor) -> Launch:
    return mxfp8.rounded_launch(x, torch.empty(x.shape, dtype=BF16, device=x.device))


def channel_entries(model: str, rows: int, columns: int, count: int) -> list[Entry]:
    """`count` of an operand's columns, and an operand in MXFP8, which the other way round lies transposed."""
    aligned = rows % 128 == columns % 128 == 0
    found = [Entry(f"columns.taken/{model}-{rows}x{columns}-{k}", columns_of.taken, reference.columns_taken,
                   partial(_taken_inputs, rows, columns, k, BF16), _taken_launch, 2 * rows * (columns + k) + 8 * k, False, 96)
             for k in (count, columns)]
    for kind, shape, turned in (("", (rows, columns), False), ("-transposed", (columns, rows), True)):
        found.append(Entry(f"mxfp8.rounded/{model}-{rows}x{columns}{kind}", mxfp8.rounded, reference.mxfp8_rounded,
                           partial(nvfp4_inputs, *shape, turned, {}), _mxfp8_launch, 4 * rows * columns, aligned, 128))
    return found
