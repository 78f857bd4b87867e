"""float32: everything in float32. An oracle for the other precisions and layouts."""
from __future__ import annotations

import torch

from suite.precision.plain import Plain


def build() -> Plain:
    return Plain(torch.float32, torch.float32)
