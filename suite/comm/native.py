"""Codecs that are a cast: the transport itself adds and ships the dtype. Shared by bf16.py, fp32.py and fp64.py."""
from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Native:
    """`native`: values are cast to it before they cross and back after; sums are the library's, in that dtype."""

    name: str
    native: torch.dtype
    recordable = True  # see suite.recorded

    def nbytes(self, numel: int) -> int:
        return numel * self.native.itemsize
