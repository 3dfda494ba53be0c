"""The examples of all silos on the device, one tensor per split, so that one lookup gathers batches of many silos."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from uefl.core.federation import SPLITS, Examples, Silo, Split


class DeviceData:
    """Concatenate the examples of all silos per split, images with channels last."""

    def __init__(self, silos: Mapping[str, Silo]) -> None:
        self._examples: dict[Split, Examples] = {}
        self._offsets: dict[Split, dict[str, int]] = {}
        for split in SPLITS:
            by_silo = {name: silo.examples(split) for name, silo in silos.items()}
            x = torch.cat([e.x.movedim(1, -1) if e.x.dim() == 4 else e.x for e in by_silo.values()])
            self._examples[split] = Examples(x, torch.cat([e.y for e in by_silo.values()]))
            offset = 0
            self._offsets[split] = {}
            for name, examples in by_silo.items():
                self._offsets[split][name] = offset
                offset += len(examples.y)

    def gather_batch(self, split: Split, indices: Tensor) -> Examples:
        """Return the examples at indices [m, n] of the concatenated tensor."""
        x = self._examples[split].x[indices]
        return Examples(x.movedim(-1, -3) if x.dim() == 5 else x, self._examples[split].y[indices])

    def offsets(self, split: Split, silo_names: Sequence[str]) -> list[int]:
        """Return the index of each silo's first example in the concatenated tensor."""
        return [self._offsets[split][name] for name in silo_names]
