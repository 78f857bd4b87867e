"""TACO on the wire (arXiv 2604.24088): groups scaled, spread by a Hadamard transform, cast to FP8 with two scales.

Adaptive Scale-Hadamard transform (ASH) and dual-scale quantisation (DS), for each group x of G contiguous elements:

    ASH    alpha = T / RMS(x)              lifts quiet groups, shrinks loud ones
           y = H_G (alpha x) / √G          spreads an outlier over its group; H is its own inverse
    DS     s = max|y| / T                  no code overflows; T = 448, the largest number of E4M3
           q = E4M3(y / s)                 G bytes, and the two scales s and alpha
    back   x' = H_G (q s) / (√G alpha)

alpha, H and s share one group, so alpha cancels: x' does not depend on it but by rounding and by the release's clamps. Hence
    lean (default)   one multiplier s / (alpha √G) a group, no floors, no caps      1 + 4/G B an element (1.031 at G = 128)
    paper            s and alpha a group with the authors' clamps, both sent        1 + 8/G B
    coarse           alpha a group, s a row of the message: here alpha matters      1 + 4/G B and 4 B a row
In lean, H is applied to x / G, a power of two, so that it overflows for no finite group. `hadamard`, `alpha`, `format` (E5M2 is
clamped at its own maximum), `target`, `rounding` (stochastic: Philox keyed by the message's Key) and `axis` are ablations.

Collectives (suite/comm/bytewise.py), Q one quantisation, N ranks, n elements:
    all-reduce, two shots   all-to-all Q(x_i) in N chunks; Q(Σ) of the own chunk; all-gather      2 (N-1)/N · n (1 + 4/G) B a rank
    all-reduce, one shot    all-gather Q(x_i), Σ                                                    (N-1) · n (1 + 4/G) B
    reduce-scatter, all-gather                                                       one Q each, (N-1)/N of the payload
H is linear: codes of one grouping are summed in the transformed domain, Σ q_r m_r in float32 in rank order, encoded again
without any transform between the two shots (`reencode`), and transformed once at the end (`reduce`). A relative L2 error
of 2.6 % for one quantisation of a Gaussian at G = 128 becomes 3.6 % after two shots, whatever N.

Both directions of a layer's collectives pass it: all-reduces after the attention's and the feed-forward's output maps and of
the gradients before their input maps; reduce-scatters and all-gathers under sequence parallelism. It is never differentiated.

Deviations from the authors' release, all on purpose: a NaN or Inf makes its whole group NaN and is counted, where the
release turns it into zeros; padding is sent, so that no group is ever transformed in part; every rank decodes the same bytes,
its own too; sums are float32 in rank order. On a GPU each of the four steps is one kernel (kernels/taco.py), and where ranks read
each other's memory a whole collective is (kernels/exchange.py); `fused: false` takes the plain torch of kernels/taco_reference.py,
as a CPU does.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels import taco_reference
from kernels.philox import fold
from suite.comm.nonfinite import Nonfinite
from suite.comm.route import Route
from suite.comm.stripes import apart, stacked
from suite.seams import Key

ROUNDINGS, AXES = ("nearest", "stochastic"), ("hidden", "token")


class Taco(Nonfinite):
    native = None
    name = "taco"

    def __init__(self, group: int, mode: str, hadamard: bool, alpha: bool, format: str, target: float | None, rounding: str,
                 axis: str, fused: bool, route: Route) -> None:
        super().__init__()
        taco_reference.checked(group, mode, format, target, alpha)
        for key, value, known in (("rounding", rounding, ROUNDINGS), ("axis", axis, AXES)):
            if value not in known:
                raise ValueError(f"comm taco: {key} {value!r}: expected one of {', '.join(known)}")
        self.group, self.axis, self.route = group, axis, route
        self.by_chance, self.fused = rounding == "stochastic", fused
        self._read: dict[str, Any] = {"group": group, "mode": mode, "hadamard": hadamard, "format": format}
        self._write = self._read | {"alpha": alpha, "target": target}

    @property
    def recordable(self) -> bool:
        """See suite.recorded."""
        return not self.by_chance

    def nbytes(self, numel: int) -> int:
        return taco_reference.nbytes(numel, self.group, self._read["mode"])

    def encode(self, x: Tensor, out: Tensor, key: Key) -> None:
        """x [..., n] of any float dtype -> out [..., nbytes(n)] uint8."""
        self._on(x.device, "encode")(x, **self._write, noise=self._noise(key), out=out, bad=self.counter(x.device, key))

    def decode(self, wire: Tensor, out: Tensor) -> None:
        """wire [..., nbytes(n)] uint8 -> out [..., n] of any float dtype."""
        self._on(wire.device, "decode")(wire, **self._read, out=out)

    def reduce(self, wires: Sequence[Tensor], out: Tensor) -> None:
        """Sum of p wires [nbytes(n)] in float32, in their order -> out [n] of any float dtype."""
        total = self._on(out.device, "total")
        step = apart(wires) if out.device.type == "cuda" and self.fused else None
        if step is None:
            total(stacked(wires), **self._read, out=out)
        else:
            total(wires[0][None], **self._read, out=out, stripes=len(wires), stripe=step)

    def reencode(self, wires: Sequence[Tensor], numel: int, out: Tensor, key: Key) -> None:
        """The sum of p wires of `numel` elements, whole groups throughout, encoded again -> out [nbytes(numel)]."""
        if numel % self.group:
            raise ValueError(f"comm taco: reencode: {numel} elements are no whole groups of {self.group}")
        self._on(out.device, "reduce")(stacked(wires), **self._write, noise=self._noise(key), out=out,
                                       bad=self.counter(out.device, key))

    def exchanges(self, x: Tensor) -> bool:
        """Whether `exchange` takes it."""
        return self.fused and self._read["mode"] != "coarse" and x.dtype in (torch.bfloat16, torch.float32)

    def exchange(self, x: Tensor, out: Tensor, slots: Tensor, flags: Tensor, rank: int, key: Key) -> None:
        """A whole collective where ranks read each other's memory: kernels/exchange.py."""
        from kernels.exchange import exchange

        exchange(x, out, slots, flags, rank, **self._write, noise=self._noise(key), bad=self.counter(x.device, key))

    def _on(self, device: torch.device, step: str):
        if device.type != "cuda" or not self.fused:
            return getattr(taco_reference, f"taco_{step}")
        from kernels import taco

        return getattr(taco, step)

    def _noise(self, key: Key) -> int | None:
        return fold(key.seed, key.step, key.micro, key.dp, *key.site, key.way, key.operand) if self.by_chance else None


def build(group: int = 128, mode: str = "lean", hadamard: bool = True, alpha: bool = True, format: str = "e4m3",
          target: float | None = None, rounding: str = "nearest", axis: str = "hidden", fused: bool = True,
          min_bytes: int | str = 0, algorithm: str = "auto", depth: int = 1, direct: bool = True, **context) -> Taco:
    return Taco(group, mode, hadamard, alpha, format, target, rounding, axis, fused, Route(min_bytes, algorithm, depth, direct))
