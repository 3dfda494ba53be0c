"""The examples of all silos on the device, one tensor per split, so that one lookup gathers batches of many silos."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from uefl.core.device_copy import copy_without_waiting
from uefl.core.federation import SPLITS, Examples, Silo

PUBLIC = "public"  # beside the splits: the images that all silos of a federation share


class DeviceData:
    """The examples of silos, concatenated per split, images with channels last; public images are stored once.

    `public_offsets` has by silo the index of the first of its `num_public` public images: silos of a seed share them.
    """

    def __init__(
        self, device: torch.device, public: Examples, num_public: int, public_offsets: Mapping[str, int]
    ) -> None:
        self.device = device
        self._examples: dict[str, Examples] = {PUBLIC: Examples(move_channels_last(public.x), public.y)}
        self._offsets: dict[str, dict[str, int]] = {PUBLIC: dict(public_offsets)}
        self._sizes: dict[str, dict[str, int]] = {PUBLIC: dict.fromkeys(public_offsets, num_public)}

    def load(self, silos: Mapping[str, Silo]) -> None:
        """Concatenate the examples of these silos, in place of those before."""
        for split in SPLITS:
            by_silo = {name: silo.examples(split) for name, silo in silos.items()}
            x = torch.cat([move_channels_last(e.x) for e in by_silo.values()])
            self._examples[split] = Examples(x, torch.cat([e.y for e in by_silo.values()]))
            self._sizes[split] = {name: len(examples.y) for name, examples in by_silo.items()}
            offset = 0
            self._offsets[split] = {}
            for name, examples in by_silo.items():
                self._offsets[split][name] = offset
                offset += len(examples.y)

    def gather_batch(self, split: str, indices: Tensor) -> Examples:
        """Return the examples at indices [m, n] of the concatenated tensor."""
        x = self._examples[split].x[indices]
        return Examples(x.movedim(-1, -3) if x.dim() == 5 else x, self._examples[split].y[indices])

    def offsets(self, split: str, silo_names: Sequence[str]) -> list[int]:
        """Return the index of each silo's first example in the concatenated tensor."""
        return [self._offsets[split][name] for name in silo_names]

    def sizes(self, split: str, silo_names: Sequence[str]) -> list[int]:
        """Return how many examples each silo has."""
        return [self._sizes[split][name] for name in silo_names]

    def to_device(self, numbers: Any) -> Tensor:
        """Copy whole numbers to the device without waiting for it."""
        return copy_without_waiting(torch.tensor(numbers, dtype=torch.int64), self.device)


def move_channels_last(x: Tensor) -> Tensor:
    """Return images with the axis of channels at the end; other tensors as they are."""
    return x.movedim(1, -1) if x.dim() == 4 else x
