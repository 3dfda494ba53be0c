"""Silos as the source names them: the folders or the manifest of somebody who already has silos."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from uefl.data.images import Images
from uefl.data.share import Owner, Share, share, shuffled
from uefl.errors import InputError

if TYPE_CHECKING:
    from uefl.data.spec import Data


def given(data: Data, images: Images, seed: int) -> list[Share]:
    """Every silo keeps its own test images; one that names none gives up a part of its images for it."""
    if images.silo is None:
        raise InputError(f"cut=given needs a source that names its silos, {images.name} does not")
    order = shuffled(images, seed)
    shifts = data.shifts * len(images.silos) if len(data.shifts) == 1 else data.shifts
    if len(shifts) not in (0, len(images.silos)):
        raise InputError(f"shifts={data.shifts} must be none, one, or one for each of {', '.join(images.silos)}")
    shares = []
    for k, name in enumerate(images.silos):
        owner = Owner(name, name, *shifts[k : k + 1])
        train, test = _halves(data, images, order[images.silo[order] == k])
        shares.append(share(owner, train[: data.train or None], test[: data.test or None], data.validation))
    return shares


def _halves(data: Data, images: Images, mine: Tensor) -> tuple[Tensor, Tensor]:
    marked = images.test[mine]
    if marked.any() and not data.merge:
        return mine[~marked], mine[marked]
    count = min(max(1, round(len(mine) * data.test_part)), len(mine))
    return mine[count:], mine[:count]
