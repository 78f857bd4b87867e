"""Counts, on the device, of groups that held a NaN or Inf when they were encoded: by the site, way and operand of the message."""
from __future__ import annotations

import torch
from torch import Tensor

from suite.seams import Key, Site


class Nonfinite:
    """Part of a codec. Reading a count waits for the device."""

    def __init__(self) -> None:
        self._bad: dict[tuple[torch.device, Site, str], Tensor] = {}

    @property
    def nonfinite(self) -> int:
        """Of all messages so far."""
        return sum(self.nonfinite_at.values())

    @property
    def nonfinite_at(self) -> dict[tuple[Site, str], int]:
        """By (site, way and operand), in the order in which messages were first sent."""
        return {(site, operand): int(count) for (_, site, operand), count in self._bad.items()}

    def counter(self, device: torch.device, key: Key) -> Tensor:
        """int32 [1] to which a message's groups are added."""
        place = device, key.site, f"{key.way} {key.operand}"
        if place not in self._bad:
            self._bad[place] = torch.zeros(1, dtype=torch.int32, device=device)
        return self._bad[place]
