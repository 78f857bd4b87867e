"""Codes of one byte with a float32 scale a group in plain torch: the oracle of kernels/grouped.py, and what a CPU runs.

A row of n elements is cut into groups of G, the last one filled up with zeros. T: the largest code (448 in E4M3, 127 in INT8).
Per group x[0..G), all in float32:

    y = H(x / G), or x where H is off     H: kernels.taco_reference.transform; H(H(x)) = G · x
    s = max(max|y|, T · 2^-126) / T       sent after the codes, 4/G B an element
    q = nearest(y / s)                    ties to even
    x' = H(q · s), or q · s               H is linear: Σ q_r · s_r of one grouping, in rank order, needs one H for all r

Both quotients are correctly rounded. As in TACO's mode lean there is no floor but float32's own: a scale is a normal number, that
of a group of zeros too. A group with a NaN or Inf has the scale NaN and zeros for codes, so all of it decodes to NaN.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.reference import over
from kernels.taco_reference import FORMATS, GROUPS, SMALLEST, Format, groups_of, transform

NUMBERS = {"e4m3": FORMATS["e4m3"], "int8": Format(127.0, 0, 0, torch.int8)}


def checked(group: int, format: str) -> Format:
    """The numbers of a format. Raises ValueError naming the option that does not fit."""
    if group not in GROUPS:
        raise ValueError(f"grouped: group {group}: expected a power of two from {GROUPS[0]} to {GROUPS[-1]}")
    if format not in NUMBERS:
        raise ValueError(f"grouped: format {format!r}: expected one of {', '.join(NUMBERS)}")
    return NUMBERS[format]


def quantise(y: Tensor, peak: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """y float32 [..., g, G] and its largest magnitudes [..., g] -> codes uint8 of y's shape, scales [..., g]."""
    numbers = NUMBERS[format]
    scales = torch.where(torch.isfinite(peak), over(peak.clamp(min=numbers.top * SMALLEST), numbers.top), torch.nan)
    v = torch.where(torch.isfinite(scales)[..., None], y / scales[..., None], 0.0)
    return (v if numbers.dtype.is_floating_point else v.round()).to(numbers.dtype).view(torch.uint8), scales


def values(codes: Tensor, format: str) -> Tensor:
    """uint8 -> float32."""
    return codes.view(NUMBERS[format].dtype).to(torch.float32)


def encode(x: Tensor, group: int = 128, *, hadamard: bool = False, format: str = "e4m3", out: Tensor | None = None,
           bad: Tensor | None = None) -> Tensor:
    """See kernels.grouped.encode."""
    checked(group, format)
    if not x.is_floating_point():
        raise ValueError(f"grouped: {x.dtype}: only floating-point numbers are encoded")
    y = F.pad(x, (0, -x.shape[-1] % group)).unflatten(-1, (-1, group)).to(torch.float32)
    return _written(transform(y * (1.0 / group)) if hadamard else y, format, out, bad)


def decode(wire: Tensor, group: int = 128, *, hadamard: bool = False, format: str = "e4m3", out: Tensor | None = None) -> Tensor:
    """See kernels.grouped.decode."""
    checked(group, format)
    return _restored(_scaled(wire, group, format), hadamard, out)


def total(wires: Tensor, group: int = 128, *, hadamard: bool = False, format: str = "e4m3", out: Tensor | None = None) -> Tensor:
    """See kernels.grouped.total."""
    checked(group, format)
    return _restored(_summed(_scaled(wires, group, format)), hadamard, out)


def reduce(wires: Tensor, group: int = 128, *, hadamard: bool = False, format: str = "e4m3", out: Tensor | None = None,
           bad: Tensor | None = None) -> Tensor:
    """See kernels.grouped.reduce."""
    checked(group, format)
    return _written(_summed(_scaled(wires, group, format)), format, out, bad)


def _scaled(wire: Tensor, group: int, format: str) -> Tensor:
    """Bytes [..., b] -> q · s, float32 [..., g, G]."""
    groups = groups_of(wire.shape[-1], group, "lean")
    codes = wire[..., : groups * group].contiguous().unflatten(-1, (groups, group))
    scales = wire[..., groups * group:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return values(codes, format) * scales[..., None]


def _summed(parts: Tensor) -> Tensor:
    """Over the first dimension, in its order."""
    found = parts[0]
    for part in parts[1:]:
        found = found + part
    return found


def _restored(y: Tensor, hadamard: bool, out: Tensor | None) -> Tensor:
    x = (transform(y) if hadamard else y).flatten(-2)
    return x if out is None else out.copy_(x[..., : out.shape[-1]])


def _written(y: Tensor, format: str, out: Tensor | None, bad: Tensor | None) -> Tensor:
    codes, scales = quantise(y, y.abs().amax(-1), format)
    if bad is not None:
        bad += torch.isnan(scales).sum().to(bad.dtype)
    row = torch.cat([codes.flatten(-2), scales.contiguous().view(torch.uint8)], -1)
    return row if out is None else out.copy_(row)
