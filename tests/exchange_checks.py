"""Whole collectives as one kernel against encode and total or decode, all ranks in one process; run as a program, interpreted.

    TRITON_INTERPRET=1 python exchange_checks.py

A check gives True, or an AssertionError says what differs.
"""
from __future__ import annotations

import itertools
import math
import sys
from typing import Any

import torch
from taco_checks import NOISE, READ, near, rows, same

from kernels import exchange, grouped, taco, taco_reference

EXCHANGED = [{"group": 128}, {"group": 64, "mode": "paper"}, {"group": 128, "hadamard": False}, {"group": 32, "format": "e5m2"},
             {"group": 256, "noise": NOISE}, {"group": 128, "mode": "quotient", "format": "int8"},
             {"group": 64, "mode": "quotient", "hadamard": False}]


def check(device: str, dtype: torch.dtype, n: int, options: dict[str, Any], peers: int = 2, product: bool | None = None,
                   calls: int = 3) -> bool:
    """All ranks in this process: equal to encode and total or decode, bit for bit. On a GPU ranks meet, each on a stream of its
    own; elsewhere they cannot run at once, so all write before the first reads, and a product's sums have the order that the
    processor's matrix library takes for so many rows: whole numbers, whose sums are exact in any order, take its place."""
    read = {k: v for k, v in options.items() if k in READ}
    own, mode = taco, {}
    if options.get("mode") == "quotient":  # the kernels of kernels/grouped.py, which take no mode
        own, mode = grouped, {"mode": "quotient"}
        options = read = {"hadamard": True} | {k: v for k, v in options.items() if k != "mode"}
    row, size = (f(n, options["group"], options.get("mode", "lean")) for f in (exchange.slot_bytes, taco_reference.nbytes))
    flags = torch.zeros(peers, peers * exchange.ROUNDS * exchange.WIDTH, dtype=torch.int32, device=device)
    streams = [torch.cuda.Stream() for _ in range(peers)] if device == "cuda" else []
    for call, (sent, received) in itertools.product(range(calls), ((1, 1), (peers, 1), (1, peers))):
        x = [rows(n, device, dtype, 10 * call + rank)[[0, *[2] * (sent - 1)]] for rank in range(peers)]
        if product and device == "cpu":
            x = [(64 * torch.randn(sent, n, generator=torch.Generator().manual_seed(r))).round().to(dtype) for r in range(peers)]
        slots = torch.full((peers, sent * row), 0x55, dtype=torch.uint8, device=device)
        out = [torch.full((received, n), math.nan, dtype=dtype, device=device) for _ in range(peers)]
        bad = [torch.zeros(1, dtype=torch.int32, device=device) for _ in range(peers)]
        where = [torch.tensor([t[i].data_ptr() for i in range(peers)], dtype=torch.int64, device=device) for t in (slots, flags)]

        launches = [[exchange.exchange_launch(x[rank], out[rank], *where, rank, **options, **mode, bad=bad[rank], product=product,
                                              phase=phase) for phase in range(3)] for rank in range(peers)]

        if device == "cuda":
            torch.cuda.synchronize()
            for rank, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    launches[rank][exchange.WHOLE_CALL].run()
            torch.cuda.synchronize()
        else:
            for phase, rank in itertools.product((exchange.WRITE, exchange.READ), range(peers)):
                launches[rank][phase].run()
        assert not flags.any(), "a flag is left"
        for rank in range(peers):
            wires = [each.view(sent, row)[:, :size].contiguous() for each in slots]
            want = own.encode(x[rank], **options, product=product)
            alike = torch.equal(wires[rank], want) if options.get("mode", "lean") == "lean" else (
                near(wires[rank], want, {"format": "e4m3", **options}) is None)  # alpha is a sum, whose order may be another
            assert alike, (sent, received, rank)
            mine = torch.stack([wire[rank if sent > 1 else 0] for wire in wires])
            want = torch.empty(received, n, dtype=dtype, device=device)
            if received == 1:
                own.total(mine, **read, out=want[0], product=product)
            else:
                own.decode(mine, **read, out=want, product=product)
            assert same(out[rank], want), (sent, received, rank)
    return True


def interpret() -> None:
    """Small tiles, so that small tensors have several rounds and a tail."""
    taco.TILE = taco.TILE_PLAIN = exchange.TILE = 1024
    exchange.ROUND = 1
    for options, n in zip(EXCHANGED, (600, 1024, 600, 600, 1024, 600, 600), strict=True):
        check("cpu", torch.float32, n, options, calls=1, product=False)
    check("cpu", torch.float32, 4600, EXCHANGED[0], peers=3, calls=1, product=True)
    taco.TILE = exchange.TILE = 2048  # 8 groups of 256, of which a product takes the halves as rows, and a row that ends in one
    check("cpu", torch.float32, 9 * 256 + 88, {"group": 256}, calls=1, product=True)
    sys.stdout.write(f"{len(EXCHANGED)} settings\n")


if __name__ == "__main__":
    interpret()
