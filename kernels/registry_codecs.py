"""Entries of kernels/registry.py: codecs of messages, and whole collectives in one kernel."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kernels import exchange, grouped, grouped_reference, taco, taco_reference
from kernels.entry import Entry, normal
from kernels.launch import TYPES, Launch


def codec_inputs(numel: int, dtype: torch.dtype, ranks: int, group: int, method: ModuleType, options: dict[str, Any], device: str,
                 seed: int) -> dict[str, Any]:
    """For ranks 0 what `encode` takes, for 1 `decode`, for more `total` and `reduce` take: wires hold normal values."""
    size = taco_reference.nbytes(numel, group, options.get("mode", "lean"))
    if not ranks:
        x = normal((1, numel), dtype, device, seed)
        return {"x": x, "group": group, "out": torch.empty(1, size, dtype=torch.uint8, device=device), **options}
    if device == "meta":
        wires = torch.empty(ranks, size, dtype=torch.uint8, device=device)
    else:
        wires = CODECS[method]("encode")(normal((ranks, numel), torch.float32, device, seed), group, **options)
    return {"wires": wires, "group": group, "out": torch.empty(numel, dtype=dtype, device=device), **options}


def _decode_inputs(*shape) -> dict[str, Any]:
    given = codec_inputs(*shape)
    return {"wire": given.pop("wires"), **given, "out": given["out"][None]}


def _reduce_inputs(*shape) -> dict[str, Any]:
    given = codec_inputs(*shape)
    return given | {"out": torch.empty_like(given["wires"][0])}


def _encode_launch(method: ModuleType, x: Tensor, out: Tensor, group: int, **options) -> Launch:
    return method.encode_launch(x, out, group, **options)


def _decode_launch(method: ModuleType, wire: Tensor, out: Tensor, group: int, **options) -> Launch:
    return method.decode_launch(wire, out, group, **options)


def _total_launch(method: ModuleType, wires: Tensor, out: Tensor, group: int, **options) -> Launch:
    return method.decode_launch(wires, out[None], group, stripes=len(wires), **options)


def _reduce_launch(method: ModuleType, wires: Tensor, out: Tensor, group: int, hadamard: bool = True, **options) -> Launch:
    return method.reduce_launch(wires, out, group, **options)


# a codec's kernels -> its references by step
CODECS: dict[ModuleType, Callable[[str], Callable]] = {
    taco: lambda step: getattr(taco_reference, f"taco_{step}"), grouped: lambda step: getattr(grouped_reference, step)}


def _codec(method: ModuleType, numel: int, dtype: torch.dtype, group: int, **options) -> list[Entry]:
    """One message of each kind: encode, decode, the sum of two ranks, the sum of 2 and 8 ranks encoded again."""
    mode, plain = options.get("mode", "lean"), numel * dtype.itemsize
    size = taco_reference.nbytes(numel, group, mode)
    name = f"{numel >> 20}Mi-{TYPES[dtype]}-g{group}" + "".join(f"-{k}={v}" for k, v in options.items())
    shape = numel, dtype

    def entry(what: str, ranks: int, make: Callable, launch: Callable, traffic: int) -> Entry:
        label = f"{method.__name__.rpartition('.')[2]}.{what}/{name}" + (f"-n{ranks}" if ranks > 1 else "")
        return Entry(label, getattr(method, what), CODECS[method](what), partial(make, *shape, ranks, group, method, options),
                     partial(launch, method), traffic, True, 255)

    return [entry("encode", 0, codec_inputs, _encode_launch, plain + size),
            entry("decode", 1, _decode_inputs, _decode_launch, plain + size),
            entry("total", 2, codec_inputs, _total_launch, plain + 2 * size),
            *(entry("reduce", n, _reduce_inputs, _reduce_launch, (n + 1) * size) for n in (2, 8))]


taco_entries, grouped_entries = partial(_codec, taco), partial(_codec, grouped)


def _exchange_inputs(numel: int, dtype: torch.dtype, group: int, options: dict[str, Any], device: str, seed: int) -> dict[str, Any]:
    """One rank that reads its own slot; on `meta` two, so that their meeting is compiled too."""
    x = normal((1, numel), dtype, device, seed)
    slot = torch.empty(exchange.slot_bytes(numel, group, options.get("mode", "lean")), dtype=torch.uint8, device=device)
    raised = torch.zeros(exchange.ROUNDS * exchange.WIDTH, dtype=torch.int32, device=device)
    if device == "meta":
        places = [torch.empty(2, dtype=torch.int64, device=device)] * 2
    else:
        places = [torch.tensor([each.data_ptr()], device=device) for each in (slot, raised)]
    return {"x": x, "out": torch.empty_like(x), "slot": slot, "raised": raised, "slots": places[0], "flags": places[1],
            "group": group, **options}


def _loopback_reference(x: Tensor, out: Tensor, slot: Tensor, raised: Tensor, slots: Tensor, flags: Tensor, group: int,
                        **options) -> Tensor:
    wire = taco_reference.taco_encode(x, group, **options)
    return taco_reference.taco_decode(wire, group, out=out, **{k: v for k, v in options.items() if k != "alpha"})


def _exchange_launch(x: Tensor, out: Tensor, slot: Tensor, raised: Tensor, slots: Tensor, flags: Tensor, group: int,
                     **options) -> Launch:
    return exchange.exchange_launch(x, out, slots, flags, 0, group, **options)


def exchange_entry(numel: int, dtype: torch.dtype, group: int, **options) -> Entry:
    name = f"{numel >> 20}Mi-{TYPES[dtype]}-g{group}" + "".join(f"-{k}={v}" for k, v in options.items())
    size = exchange.slot_bytes(numel, group, options.get("mode", "lean"))
    return Entry(f"exchange.loopback/{name}", exchange.loopback, _loopback_reference,
                 partial(_exchange_inputs, numel, dtype, group, options), _exchange_launch,
                 2 * (numel * dtype.itemsize + size), True, 255)
