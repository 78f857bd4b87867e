"""Codes of one byte with a float32 scale a group as fused kernels: E4M3 or INT8, with a Hadamard transform or without.

    encode   x [r, n] -> wires [r, b]          one pass over memory each, 1 + 4/G B an element of a wire
    decode   wires [r, b] -> x [r, n]
    total    wires [p, b] -> Σ of their rows [n]
    reduce   wires [p, b] -> wire [b]          no transform: H is linear

The formulas stand in kernels/grouped_reference.py. The kernels are those of kernels/taco.py in their mode `quotient`, whose wire is
that of lean, and which divides by the scale where lean multiplies by its reciprocal: what TACO is compared with moves the same
bytes, in the same tiles, with the same transform. Bit for bit the reference, but for a product of tensor cores (bfloat16 with H),
where at most one code in 10,000 differs, by one step; and for quotients that float32 can hardly tell from a tie of two codes
(kernels.taco_tile.quotients).
"""
from __future__ import annotations

from torch import Tensor

from kernels import taco
from kernels.grouped_reference import checked
from kernels.launch import Launch
from kernels.taco_reference import groups_of, nbytes
from kernels.wires import decoded, encoded, fits, reduced, rows_of

MODE = "quotient"


def _groups(wire: Tensor, group: int) -> int:
    return groups_of(wire.shape[-1], group, "lean")


def encode_launch(x: Tensor, wire: Tensor, group: int = 128, *, hadamard: bool = False, format: str = "e4m3",
                  bad: Tensor | None = None, product: bool | None = None) -> Launch:
    """x [r, n], wire [r, b]."""
    numbers = checked(group, format)
    return taco.encode_launch_of(x, wire, group, _groups(wire, group), numbers, numbers.top, mode=MODE, hadamard=hadamard, bad=bad,
                                 product=product)


def decode_launch(wire: Tensor, out: Tensor, group: int = 128, *, hadamard: bool = False, format: str = "e4m3",
                  product: bool | None = None, stripes: int = 1, stripe: int | None = None) -> Launch:
    """As kernels.taco.decode_launch."""
    return taco.decode_launch_of(wire, out, group, _groups(wire, group), checked(group, format), mode=MODE, hadamard=hadamard,
                                 product=product, stripes=stripes, stripe=stripe)


def reduce_launch(wires: Tensor, out: Tensor, group: int = 128, *, format: str = "e4m3", bad: Tensor | None = None) -> Launch:
    """wires [p, b] -> out [b]."""
    numbers = checked(group, format)
    return taco.reduce_launch_of(wires, out, group, _groups(wires, group), numbers, numbers.top, mode=MODE, bad=bad)


def encode(x: Tensor, group: int = 128, *, hadamard: bool = False, format: str = "e4m3", out: Tensor | None = None,
           bad: Tensor | None = None, product: bool | None = None) -> Tensor:
    """x [..., n] float -> wires [..., nbytes(n)] uint8, into `out` where given.

    group: a power of two from 32 to 512. format: e4m3 or int8. bad: int32, one element, to which groups with a NaN or Inf are
    added. product: how H is done (kernels/taco.py); None: by tensor cores for bfloat16. Raises ValueError for an option that
    does not fit and for numbers that are not floating-point.
    """
    checked(group, format)
    if not x.is_floating_point():
        raise ValueError(f"grouped: {x.dtype}: only floating-point numbers are encoded")
    return encoded(x, nbytes(x.shape[-1], group), out, lambda source, wire: encode_launch(
        source, wire, group, hadamard=hadamard, format=format, bad=bad, product=product).run())


def decode(wire: Tensor, group: int = 128, *, hadamard: bool = False, format: str = "e4m3", out: Tensor | None = None,
           product: bool | None = None) -> Tensor:
    """wires [..., nbytes(n)] uint8 -> x [..., n], float32 of whole groups unless `out` [..., n] (any float) is given."""
    rows = rows_of(wire if fits(wire) else wire.contiguous())
    return decoded(rows, _groups(rows, group) * group, out, wire.shape[:-1], lambda found: decode_launch(
        rows, found, group, hadamard=hadamard, format=format, product=product).run())


def total(wires: Tensor, group: int = 128, *, hadamard: bool = False, format: str = "e4m3", out: Tensor | None = None,
          product: bool | None = None, stripes: int | None = None, stripe: int | None = None) -> Tensor:
    """wires [p, nbytes(n)] uint8 -> sum of their rows [n] in float32 and rank order; stripes and stripe: kernels.taco.total."""
    rows = wires if stripe is not None or fits(wires) else wires.contiguous()
    return decoded(rows[:1], _groups(rows, group) * group, out, (), lambda found: decode_launch(
        rows, found, group, hadamard=hadamard, format=format, product=product, stripes=stripes or len(rows), stripe=stripe).run())


def reduce(wires: Tensor, group: int = 128, *, hadamard: bool = False, format: str = "e4m3", out: Tensor | None = None,
           bad: Tensor | None = None) -> Tensor:
    """wires [p, b] uint8 -> wire [b] of the sum of their rows, decoded, summed in float32 in rank order, encoded again.

    Codes lie in the transformed domain already, so `hadamard` changes nothing here; the padding of a row must have been zeros.
    """
    return reduced(wires, out, lambda rows, wire: reduce_launch(rows, wire, group, format=format, bad=bad).run())
