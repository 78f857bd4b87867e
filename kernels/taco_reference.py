"""TACO's codec in plain torch: scale, Hadamard transform, FP8 codes; the oracle of kernels/taco.py, and what a CPU runs.

A row of n elements is cut into groups of G (a power of two, 32 to 512), the last one filled up with zeros. T: the largest
code (448 in E4M3, 57344 in E5M2, or a smaller target). Per group x[0..G), all in float32:

    y = H(x · pre)            H: butterflies a + b, a - b over strides 1, 2, ..., G/2 in that order; H(H(x)) = G · x
    q = FP8(y / s)            to nearest, ties to even; or stochastically
    x' = H(q · m)             H is linear, so codes of one grouping are summed as they are: Σ q_r · m_r needs no H

    mode     pre            s                                            m                sent after the codes
    lean     1/G            max|y| / T a group                           s                m a group                     4/G B
    paper    alpha/√G       clamp(max(max|y|, 1e-12)/T, 1e-12, 1e6)      s/(alpha √G)     s, alpha a group              8/G B
    coarse   alpha/√G       max|y| / T a row                             s/(alpha √G)     1/alpha a group, s a row      4/G B

    alpha    paper    clamp(T / √max(mean x² + 1e-6, 1e-12), 1e-3, 1e3), the authors' release
             coarse   T / √mean x² without clamps, under which it would be 1000 for every group of RMS below 0.448
    Where alpha is off it is 1; where H is off the factors 1/G and 1/√G are 1.

lean has no floor but float32's own: where max|y| is below T · 2^-126, that is s. It multiplies by T / max|y|, which paper
and coarse divide by s. A group with a NaN or Inf has a NaN for its scale, so all of it decodes to NaN. mean x² of a sum is
that of its transform (Parseval), so `taco_reduce` takes it without H.
"""
from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.philox import philox
from kernels.reference import over

GROUPS = (32, 64, 128, 256, 512)
MODES = ("lean", "paper", "coarse")
LAMBDA, ALPHA_MIN, ALPHA_MAX = 1e-6, 1e-3, 1e3
FLOOR, SCALE_MAX = 1e-12, 1e6
SMALLEST = 2.0**-126  # float32's smallest normal number


@dataclass(frozen=True)
class Format:
    """An FP8 format: largest finite value, bits of mantissa, exponent of its smallest normal number."""

    top: float
    mantissa: int
    lowest: int
    dtype: torch.dtype


FORMATS = {"e4m3": Format(448.0, 3, -6, torch.float8_e4m3fn), "e5m2": Format(57344.0, 2, -14, torch.float8_e5m2)}


def checked(group: int, mode: str, format: str, target: float | None = None, alpha: bool = True) -> float:
    """The target that stands. Raises ValueError naming the option that does not fit."""
    if group not in GROUPS:
        raise ValueError(f"taco: group {group}: expected a power of two from {GROUPS[0]} to {GROUPS[-1]}")
    if mode not in MODES:
        raise ValueError(f"taco: mode {mode!r}: expected one of {', '.join(MODES)}")
    if format not in FORMATS:
        raise ValueError(f"taco: format {format!r}: expected one of {', '.join(FORMATS)}")
    if mode == "lean" and not alpha:
        raise ValueError("taco: alpha: cannot be off in mode lean, which sends one multiplier a group; take paper or coarse")
    top = FORMATS[format].top
    if target is not None and not 0 < target <= top:
        raise ValueError(f"taco: target {target:g}: expected a number above 0 and at most {top:g}, the largest of {format}")
    return top if target is None else float(target)


def nbytes(numel: int, group: int = 128, mode: str = "lean") -> int:
    """Bytes of a row of `numel` elements."""
    groups = -(-numel // group)
    return groups * (group + {"lean": 4, "paper": 8, "coarse": 4}[mode]) + (4 if mode == "coarse" else 0)


def groups_of(size: int, group: int, mode: str) -> int:
    """Groups in a row of `size` bytes. Raises ValueError where that is no row."""
    groups = (size - nbytes(0, group, mode)) // (nbytes(group, group, mode) - nbytes(0, group, mode))
    if groups < 0 or nbytes(groups * group, group, mode) != size:
        raise ValueError(f"taco: {size} bytes are no row of groups of {group} in mode {mode}")
    return groups


def transform(x: Tensor) -> Tensor:
    """H of the last dimension, a power of two, not normalised: entry (i, j) is (-1)^(ones in i & j)."""
    shape, width, stride = x.shape, x.shape[-1], 1
    # groups side by side, so that every stride adds whole rows of memory
    x = x.reshape(-1, width).t().contiguous()
    while stride < width:
        a, b = x.view(width // (2 * stride), 2, stride, -1).unbind(1)
        x = torch.stack([a + b, a - b], 1)
        stride *= 2
    return x.view(width, -1).t().reshape(shape)


def taco_encode(x: Tensor, group: int = 128, *, mode: str = "lean", hadamard: bool = True, alpha: bool = True,
                format: str = "e4m3", target: float | None = None, noise: int | None = None, out: Tensor | None = None,
                bad: Tensor | None = None) -> Tensor:
    """See kernels.taco.encode."""
    top = checked(group, mode, format, target, alpha)
    if not x.is_floating_point():
        raise ValueError(f"taco: {x.dtype}: only floating-point numbers are encoded")
    x = F.pad(x, (0, -x.shape[-1] % group)).unflatten(-1, (-1, group)).to(torch.float32)
    pre, sent = _factors(x, mode, alpha, top)
    if hadamard:
        norm = 1.0 / group if mode == "lean" else 1.0 / math.sqrt(group)
        x = transform(x * (norm if pre is None else (pre * norm)[..., None]))
    elif pre is not None:
        x = x * pre[..., None]
    return _written(x, sent, mode, format, top, noise, out, bad)


def taco_decode(wire: Tensor, group: int = 128, *, mode: str = "lean", hadamard: bool = True, format: str = "e4m3",
                out: Tensor | None = None) -> Tensor:
    """See kernels.taco.decode."""
    checked(group, mode, format)
    codes, scale = _read(wire, group, mode, format)
    return _restored(codes * _normed(scale, group, mode, hadamard)[..., None], hadamard, out)


def taco_total(wires: Tensor, group: int = 128, *, mode: str = "lean", hadamard: bool = True, format: str = "e4m3",
               out: Tensor | None = None) -> Tensor:
    """See kernels.taco.total."""
    checked(group, mode, format)
    codes, scale = _read(wires, group, mode, format)
    return _restored(_summed(codes, _normed(scale, group, mode, hadamard)), hadamard, out)


def taco_reduce(wires: Tensor, group: int = 128, *, mode: str = "lean", hadamard: bool = True, alpha: bool = True,
                format: str = "e4m3", target: float | None = None, noise: int | None = None, out: Tensor | None = None,
                bad: Tensor | None = None) -> Tensor:
    """See kernels.taco.reduce."""
    top = checked(group, mode, format, target, alpha)
    total = _summed(*_read(wires, group, mode, format))
    pre, sent = _factors(total, mode, alpha, top)
    return _written(total if pre is None else total * pre[..., None], sent, mode, format, top, noise, out, bad)


def _factors(x: Tensor, mode: str, alpha: bool, top: float) -> tuple[Tensor | None, Tensor | None]:
    """x [..., g, G] -> (alpha, what is sent of it), each [..., g]; nothing in mode lean."""
    if mode == "lean":
        return None, None
    if not alpha:
        one = torch.ones(x.shape[:-1], device=x.device)
        return one, one
    if mode == "paper":
        spread = (x.square().sum(-1) / x.shape[-1] + LAMBDA).clamp(min=FLOOR).sqrt()
        factor = over(top, spread).clamp(ALPHA_MIN, ALPHA_MAX)
        return factor, factor
    # squares of the group brought near 1, so that none over- or underflows
    exponent = (x.abs().amax(-1).view(torch.int32) >> 23).clamp(27, 253)
    power = ((254 - exponent) << 23).view(torch.float32)
    spread = ((x * power[..., None]).square().sum(-1) / x.shape[-1]).sqrt()
    spread = torch.where(spread == 0, 1.0, spread)
    return power * over(top, spread), over(spread, top) / power


def _written(y: Tensor, sent: Tensor | None, mode: str, format: str, top: float, noise: int | None, out: Tensor | None,
             bad: Tensor | None) -> Tensor:
    peak = y.abs().amax(-1)
    good = torch.isfinite(peak)
    if mode == "coarse":
        scale = over(torch.where(good, peak, 0.0).amax(-1, keepdim=True).clamp(min=top * SMALLEST), top)
        v = y / scale[..., None]
        fields = [torch.where(good, sent, torch.nan), scale]
    elif mode == "paper":
        scale = over(peak.clamp(min=FLOOR), top).clamp(FLOOR, SCALE_MAX)
        v = y / scale[..., None]
        fields = [torch.where(good, part, torch.nan) for part in (scale, sent)]
    else:
        held = peak.clamp(min=top * SMALLEST)
        v = y * over(top, held)[..., None]
        fields = [torch.where(good, over(held, top), torch.nan)]
    codes = to_codes(torch.where(good[..., None], v, 0.0), format, noise).flatten(-2)
    if bad is not None:
        bad += (~good).sum().to(bad.dtype)
    row = torch.cat([codes, *(field.contiguous().view(torch.uint8) for field in fields)], -1)
    return row if out is None else out.copy_(row)


def _read(wire: Tensor, group: int, mode: str, format: str) -> tuple[Tensor, Tensor]:
    """Bytes [..., b] -> codes as float32 [..., g, G], s / alpha [..., g]."""
    groups = groups_of(wire.shape[-1], group, mode)
    n = groups * group
    codes = wire[..., :n].contiguous().view(FORMATS[format].dtype).to(torch.float32).unflatten(-1, (groups, group))
    fields = wire[..., n:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    if mode == "lean":
        return codes, fields
    if mode == "paper":
        return codes, fields[..., :groups] / fields[..., groups:].clamp(min=FLOOR)
    return codes, fields[..., :groups] * fields[..., groups:]


def _normed(scale: Tensor, group: int, mode: str, hadamard: bool) -> Tensor:
    return scale * (1.0 / math.sqrt(group)) if hadamard and mode != "lean" else scale


def _summed(codes: Tensor, scale: Tensor) -> Tensor:
    """Over the first dimension, in its order."""
    total = codes[0] * scale[0][..., None]
    for code, factor in zip(codes[1:], scale[1:]):
        total = total + code * factor[..., None]
    return total


def _restored(y: Tensor, hadamard: bool, out: Tensor | None) -> Tensor:
    x = (transform(y) if hadamard else y).flatten(-2)
    return x if out is None else out.copy_(x[..., : out.shape[-1]])


def to_codes(v: Tensor, format: str, noise: int | None = None) -> Tensor:
    """float32 -> FP8 codes uint8; clamped first, because torch's cast beyond the largest number differs between releases.

    noise: a 64-bit key; element i of v (flat) rounds up where word i mod 4 of Philox counter i // 4 says so, with the
    probability of its distance from the code below.
    """
    kind = FORMATS[format]
    v = v.clamp(-kind.top, kind.top)
    if noise is None:
        return v.to(kind.dtype).view(torch.uint8)
    bits = v.contiguous().view(torch.int32)
    exponent = (((bits >> 23) & 0xFF) - 127).clamp(min=kind.lowest)
    scaled = v.abs() * ((127 + kind.mantissa - exponent) << 23).view(torch.float32)
    below = scaled.floor()
    counters = torch.arange(-(-v.numel() // 4), device=v.device)
    chance = (philox(counters, noise).t().reshape(-1)[: v.numel()] >> 8).to(torch.float32) * 2.0**-24
    steps = below.to(torch.int32) + (chance.view(v.shape) < scaled - below).to(torch.int32)
    return (((exponent - kind.lowest) << kind.mantissa) + steps | ((bits >> 24) & 0x80)).to(torch.uint8)
