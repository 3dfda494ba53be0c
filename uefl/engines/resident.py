"""The data of all silos on the device, each part in one tensor: batches of many silos are one lookup."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from uefl.federation import Part, Silo, Split

SPLITS: tuple[Split, ...] = ("train", "validation", "test")


class Resident:
    def __init__(self, silos: Mapping[str, Silo]) -> None:
        self._flat: dict[Split, Part] = {}
        self._start: dict[Split, dict[str, int]] = {}
        for split in SPLITS:
            parts = {name: silo.part(split) for name, silo in silos.items()}
            # Images with channels last.
            x = torch.cat([p.x.movedim(1, -1) if p.x.dim() == 4 else p.x for p in parts.values()])
            self._flat[split] = Part(x, torch.cat([p.y for p in parts.values()]))
            at = 0
            self._start[split] = {}
            for name, part in parts.items():
                self._start[split][name] = at
                at += len(part.y)

    def batch(self, split: Split, index: Tensor) -> Part:
        """Examples [m, n] by their places in the one tensor."""
        x = self._flat[split].x[index]
        return Part(x.movedim(-1, -3) if x.dim() == 5 else x, self._flat[split].y[index])

    def starts(self, split: Split, names: Sequence[str]) -> list[int]:
        """Where each silo's part begins in the one tensor."""
        return [self._start[split][name] for name in names]
