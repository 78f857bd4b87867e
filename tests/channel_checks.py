"""What channels apart pass through, kernels/columns.py and kernels/mxfp8.py, against plain torch, bit for bit on any device; run as
a program, in Triton's interpreter, whose casts to bfloat16 truncate: there float32 alone.

A check gives True, or an AssertionError says what differs.
"""
from __future__ import annotations

import torch
from nvfp4_checks import numbers
from torch import Tensor

from kernels import columns, mxfp8, reference

SHAPES = [(5, 130), (33, 256), (64, 128), (1, 128), (20, 15), (70, 33)]


def alike(got: Tensor, want: Tensor) -> bool:
    assert got.shape == want.shape and got.dtype == want.dtype and torch.equal(got.isnan(), want.isnan())
    return torch.equal(got.nan_to_num(0.0).view(torch.uint8), want.nan_to_num(0.0).view(torch.uint8))


def check_rounded(device: str, dtype: torch.dtype, rows: int, width: int, bad: bool = False) -> bool:
    x = numbers(rows, width, device, dtype, bad)
    want = reference.mxfp8_rounded(x, dtype=dtype)
    assert bool(want.isnan().any()) == bad and not torch.equal(want, x)
    for source in (x, x.t().contiguous().t(), torch.stack([x, x], 2)[..., 0]):
        assert alike(mxfp8.rounded(source, dtype=dtype), want)
    among = torch.zeros(rows, 2 * width + 1, dtype=dtype, device=device)
    assert mxfp8.rounded(x, out=among[:, 1:width + 1]).data_ptr() == among[:, 1:].data_ptr()
    assert alike(among[:, 1:width + 1].contiguous(), want) and not among[:, 0].any() and not among[:, width + 1:].any()
    return True


def check_taken(device: str, dtype: torch.dtype, rows: int, width: int) -> bool:
    x = numbers(rows, width, device, dtype, bad=True)
    order = torch.randperm(width, generator=torch.Generator().manual_seed(rows)).to(device)
    for part in (order, order[:width // 3 + 1]):
        assert alike(columns.taken(x, part), x[:, part])
        among = torch.zeros(rows, len(part) + 2, dtype=dtype, device=device)
        columns.taken(x, part, out=among[:, 1:-1])
        assert alike(among[:, 1:-1].contiguous(), x[:, part]) and not among[:, 0].any() and not among[:, -1].any()
    return True


def interpret() -> None:
    for shape in SHAPES:
        check_rounded("cpu", torch.float32, *shape)
        check_rounded("cpu", torch.float32, *shape, bad=True)
        check_taken("cpu", torch.float32, *shape)


if __name__ == "__main__":
    interpret()
    print(f"{len(SHAPES)} shapes")
