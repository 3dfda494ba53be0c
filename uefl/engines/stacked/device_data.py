"""The examples of all silos on the device, one tensor per split, so that one lookup gathers batches of many silos."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from uefl.core.federation import SPLITS, Examples, Silo

PUBLIC = "public"  # beside the splits: the images that all silos of a federation share


class DeviceData:
    """Concatenate the examples of all silos per split, images with channels last; public images are stored once.

    `public_offsets` has by silo the index of its first public image: the silos of a seed share a set of them.
    """

    def __init__(self, silos: Mapping[str, Silo], public: Examples, public_offsets: Mapping[str, int]) -> None:
        self._examples: dict[str, Examples] = {PUBLIC: Examples(move_channels_last(public.x), public.y)}
        self._offsets: dict[str, dict[str, int]] = {PUBLIC: dict(public_offsets)}
        for split in SPLITS:
            by_silo = {name: silo.examples(split) for name, silo in silos.items()}
            x = torch.cat([move_channels_last(e.x) for e in by_silo.values()])
            self._examples[split] = Examples(x, torch.cat([e.y for e in by_silo.values()]))
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


def move_channels_last(x: Tensor) -> Tensor:
    """Return images with the axis of channels at the end; other tensors as they are."""
    return x.movedim(1, -1) if x.dim() == 4 else x
