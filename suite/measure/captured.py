"""Codec error on captured tensors: what a codec does to the messages of a trained model, by site and direction.

The model of a `measure: codec` case is trained for `steps` steps with plain bf16 wires. One more step is captured at the wire:
what each rank hands to a tensor-parallel collective, forward activations and backward gradients, the partial sums of all ranks
side by side. Cases of one launch that differ in `comm` alone share the capture. Then, for the case's forward and backward codec:

    codec_l2_error          %  |Q(x) - x| / |x| of one quantisation: median over messages, q20 and q80; also _forward, _backward
    codec_max_error         %  largest |Q(x) - x| over largest |x| of a message: the worst message
    codec_element_error     %  median over a message's nonzero values of |Q(x) - x| / |x|: median over messages
    zero_fraction           %  nonzero values that decode to exact zero, of all messages together; also _forward, _backward
    codec_nan               1  values of finite messages that decode to NaN or Inf
    codec_bytes             B  an element, counted
    true_sum_error          %  error of the all-reduce of the model's own partial sums, N = tp, two quantisations
    cancellation            1  |sum of x_r| / sqrt(sum of |x_r|^2) of the same: 1 for independent parts, less where they cancel
    two_shot_error_n<N>     %  the same for N nearly independent partial sums: the N blocks of a message's tokens
    synthetic_<kind>_l2_error, .._zero_fraction     of DRAWS: 2^16 values of the kinds in the ablation table

Beside the record, `<case>.messages.csv`: a row a message with its errors and its histogram, the share of values in each octave
below its peak (`octave_0`: larger than peak / 2; `octave_below`: under 2^-OCTAVES of it; `zeros`: exact zeros before coding).
"""
from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from suite.case import Case, Comm
from suite.comm.counter import Counter
from suite.comm.transport import Transport
from suite.measure.quantile import metric_from
from suite.mesh import Mesh
from suite.record import Metric
from suite.seams import Codec, Key, make

KEEP = 2**20  # values of a message that are looked at: its first whole rows
OCTAVES = 24
SPLITS = (2, 4, 8, 16)
DRAWN = 2**16


@dataclass(frozen=True)
class Message:
    """parts [p, tokens, D]: the partial sums of all ranks, or what this rank alone sends of an op that adds nothing."""

    way: str
    layer: int
    name: str
    op: str
    parts: Tensor


_shared: dict[str, list[Message]] = {}  # of the capture at hand, by its case


def plain(case: Case) -> Case:
    """The case whose wires are captured: the same model and schedule on bf16 wires."""
    return case.model_copy(update={"comm": Comm(), "name": None})


def messages(case: Case, train: Callable[[Case], tuple[Any, Callable[[], Any]]]) -> list[Message]:
    """Captured messages of a case. train(plain case) -> (wire, one more step) after its training. Every rank calls it."""
    origin = plain(case)
    if origin.id not in _shared:
        _shared.clear()
        _shared[origin.id] = capture(*train(origin))
    return _shared[origin.id]


def capture(wire: Any, step: Callable[[], Any]) -> list[Message]:
    """Messages of one step that pass the wire as activations or their gradients. Every rank calls it."""
    seen: list[tuple[str, int, str, str, Tensor]] = []
    send = wire.start

    def start(op: str, x: Tensor, **how: Any) -> Any:
        if how.get("purpose", "activations") == "activations" and how.get("way", "forward") != "step" and x.is_floating_point():
            layer, name = how.get("site", (0, ""))
            rows = x.detach().reshape(-1, x.shape[-1])
            rows = rows[:max(1, KEEP // rows.shape[1])].clone()
            seen.append((how.get("way", "forward"), int(layer), name, op, rows))
        return send(op, x, **how)

    wire.start = start
    try:
        step()
    finally:
        del wire.start
    found = []
    for way, layer, name, op, rows in seen:
        if op in ("all_reduce", "reduce_scatter"):
            rows = wire.run("all_gather", rows[None], way="step", purpose="statistic")[0]
        else:
            rows = rows[None]
        found.append(Message(way, layer, name, op, rows))
    return found


def study(case: Case, mesh: Mesh, train: Callable[[Case], tuple[Any, Callable[[], Any]]], outcome: Any) -> None:
    """Fills metrics and the table `messages` of the outcome. Every rank calls it; the numbers are rank 0's."""
    began = time.perf_counter()
    found = messages(case, train)
    outcome.phases["capture"] = time.perf_counter() - began
    began = time.perf_counter()
    if mesh.rank == 0:
        codecs = {way: make("comm", getattr(case.comm.tp, way)) for way in ("forward", "backward")}
        rows = [row(codecs[m.way], m) for m in found]
        outcome.tables["messages"] = rows
        outcome.metrics += summary(rows, codecs["forward"])
        for n in SPLITS:
            errors = [e for m in found if (e := split_error(codecs[m.way], m, n)) is not None]
            outcome.metrics.append(metric_from(errors, f"two_shot_error_n{n}", "%"))
        outcome.metrics += synthetic(codecs["forward"], mesh.device)
    Transport(mesh.group("world"), Counter()).barrier()
    outcome.phases["study"] = time.perf_counter() - began


def row(codec: Codec, message: Message) -> dict[str, Any]:
    """One row of the table. Errors in %, of this rank's part of the message."""
    x = message.parts[0]
    found = errors(codec, x)
    sent: dict[str, Any] = {"way": message.way, "layer": message.layer, "name": message.name, "op": message.op, **found}
    many = len(message.parts) > 1
    sent["true_sum_error"] = sum_error(codec, message.parts) if many else ""
    sent["cancellation"] = cancellation(message.parts) if many else ""
    return sent | histogram(x)


def errors(codec: Codec, x: Tensor) -> dict[str, float]:
    """What one quantisation does to x [tokens, D], in % but `nan` (a count) and `nonzero`, `lost` (values)."""
    exact = x.double()
    y = through(codec, x).double()
    off, nonzero = (y - exact).abs(), exact != 0
    finite = torch.isfinite(exact).all()
    relative = off[nonzero] / exact[nonzero].abs()
    return {"rms": exact.square().mean().sqrt().item(), "peak": exact.abs().max().item(),
            "l2_error": _percent(off.norm(), exact.norm()), "max_error": _percent(off.max(), exact.abs().max()),
            "element_error": 100 * relative.median().item() if len(relative) else 0.0,
            "nonzero": int(nonzero.sum()), "lost": int((nonzero & (y == 0)).sum()),
            "nan": int((~torch.isfinite(y)).sum()) if finite else 0}


def through(codec: Codec, x: Tensor) -> Tensor:
    """x [tokens, D] after one encode and decode, as the wire lays it out: one row, whole groups. float32."""
    if codec.native is not None:
        return x.to(codec.native).float()
    wire, n = _encoded(codec, x)
    out = torch.empty(_whole(codec, n), dtype=torch.float32, device=x.device)
    codec.decode(wire, out)
    return _unlaid(codec, out[:n], x)


def sum_error(codec: Codec, parts: Tensor) -> float:
    """% error of the sum of parts [N, tokens, D] after two shots: each part encoded, the sum encoded again."""
    exact = parts.double().sum(0)
    if codec.native is not None:
        y = sum(part.to(codec.native).float() for part in parts).to(codec.native)
    else:
        wires = [_encoded(codec, part, f"part {r}")[0] for r, part in enumerate(parts)]
        n = _whole(codec, parts[0].numel())
        again = torch.empty(codec.nbytes(n), dtype=torch.uint8, device=parts.device)
        codec.reencode(wires, n, again, Key(operand="sum"))
        out = torch.empty(n, dtype=torch.float32, device=parts.device)
        codec.decode(again, out)
        y = _unlaid(codec, out[:parts[0].numel()], parts[0])
    return _percent((y.double() - exact).norm(), exact.norm())


def split_error(codec: Codec, message: Message, n: int) -> float | None:
    """`sum_error` of the n blocks of a message's tokens as partial sums; None where there are fewer tokens."""
    x = message.parts[0]
    tokens = len(x) // n
    return sum_error(codec, x[:n * tokens].view(n, tokens, -1)) if tokens else None


def cancellation(parts: Tensor) -> float:
    """|sum of x_r| / sqrt(sum of |x_r|^2): 1 for independent parts, sqrt(N) for equal ones, towards 0 where they cancel."""
    parts = parts.double()
    whole = parts.square().sum().sqrt().item()
    return parts.sum(0).norm().item() / whole if whole else 0.0


def histogram(x: Tensor) -> dict[str, float]:
    """Shares of the values of x by octave below the largest magnitude."""
    size = x.abs().double().flatten()
    peak = size.max()
    octave = (torch.log2(peak) - torch.log2(size[size > 0])).floor().clamp(0, OCTAVES).long()
    counts = torch.bincount(octave, minlength=OCTAVES + 1).tolist()
    names = [*(f"octave_{i}" for i in range(OCTAVES)), "octave_below"]
    return {"zeros": (size == 0).sum().item() / size.numel(), **{k: c / size.numel() for k, c in zip(names, counts)}}


def summary(rows: list[dict[str, Any]], codec: Codec) -> list[Metric]:
    found = []
    for end, mine in (("", rows), *((f"_{way}", [r for r in rows if r["way"] == way]) for way in ("forward", "backward"))):
        found.append(metric_from([r["l2_error"] for r in mine], f"codec_l2_error{end}", "%"))
        nonzero = sum(r["nonzero"] for r in mine)
        share = 100 * sum(r["lost"] for r in mine) / nonzero if nonzero else None
        found.append(Metric(f"zero_fraction{end}", share, "%", n=len(mine), reason=None if nonzero else "no nonzero value"))
    found.append(metric_from([r["element_error"] for r in rows], "codec_element_error", "%"))
    found.append(Metric("codec_max_error", max(r["max_error"] for r in rows), "%", n=len(rows)) if rows
                 else Metric("codec_max_error", None, "%", reason="no samples"))
    found.append(Metric("codec_nan", float(sum(r["nan"] for r in rows)), "1", "counted"))
    size = codec.native.itemsize if codec.native is not None else codec.nbytes(DRAWN) / DRAWN
    found.append(Metric("codec_bytes", float(size), "B/element", "counted"))
    for name in ("true_sum_error", "cancellation"):
        found.append(metric_from([r[name] for r in rows if r[name] != ""], name, "%" if name.endswith("error") else "1"))
    return found


def synthetic(codec: Codec, device: torch.device) -> list[Metric]:
    found = []
    for kind, draw in DRAWS.items():
        one = errors(codec, draw(torch.Generator().manual_seed(0)).float().view(-1, 1024).to(device))
        found.append(Metric(f"synthetic_{kind}_l2_error", one["l2_error"], "%", n=DRAWN))
        found.append(Metric(f"synthetic_{kind}_zero_fraction", 100 * one["lost"] / one["nonzero"], "%", n=DRAWN))
    return found


def _normal(draw: torch.Generator) -> Tensor:
    return torch.randn(DRAWN, generator=draw, dtype=torch.float64)


def _laplace(draw: torch.Generator) -> Tensor:
    u = torch.rand(DRAWN, generator=draw, dtype=torch.float64) - 0.5
    return -u.sign() * torch.log1p(-2 * u.abs())


def _heavy(draw: torch.Generator) -> Tensor:
    """Student's t with two degrees of freedom: a normal over the root of an exponential."""
    return _normal(draw) / torch.empty(DRAWN, dtype=torch.float64).exponential_(generator=draw).sqrt()


def _spiky(draw: torch.Generator) -> Tensor:
    return _normal(draw) * torch.where(torch.rand(DRAWN, generator=draw) < 1e-3, 1.0, 1e-3)


def _channels(draw: torch.Generator) -> Tensor:
    """1,024 channels with lognormal scales."""
    return (_normal(draw).view(-1, 1024) * torch.exp(2 * _normal(draw)[:1024])).flatten()


def _outlier(draw: torch.Generator) -> Tensor:
    """One channel in 1,024 a hundred times the rest."""
    x = _normal(draw).view(-1, 1024)
    x[:, 7] *= 100
    return x.flatten()


DRAWS: dict[str, Callable[[torch.Generator], Tensor]] = {
    "gaussian": lambda draw: 1e-2 * _normal(draw), "laplace": lambda draw: 1e-2 * _laplace(draw),
    "heavy": lambda draw: 1e-3 * _heavy(draw), "spiky": _spiky, "channels": _channels, "outlier": _outlier,
    "gradient": lambda draw: 1e-6 * _normal(draw),
}


def _percent(part: Tensor, whole: Tensor) -> float:
    part, whole = part.item(), whole.item()
    share = 100 * part / whole if whole else 0.0
    return share if math.isfinite(share) else 100.0


def _whole(codec: Codec, n: int) -> int:
    """n rounded up to whole groups."""
    group = getattr(codec, "group", 1)
    return -(-n // group) * group


def _laid(codec: Codec, x: Tensor) -> Tensor:
    return x.t() if getattr(codec, "axis", "hidden") == "token" else x


def _unlaid(codec: Codec, flat: Tensor, like: Tensor) -> Tensor:
    laid = _laid(codec, like)
    return _laid(codec, flat.view(laid.shape))


def _encoded(codec: Codec, x: Tensor, operand: str = "part 0") -> tuple[Tensor, int]:
    """(the wire of x [tokens, D] as one row of whole groups, its elements)."""
    flat = _laid(codec, x).flatten()
    source = torch.nn.functional.pad(flat, (0, _whole(codec, len(flat)) - len(flat)))
    wire = torch.empty(codec.nbytes(len(source)), dtype=torch.uint8, device=x.device)
    codec.encode(source, wire, Key(operand=operand))
    return wire, len(flat)
