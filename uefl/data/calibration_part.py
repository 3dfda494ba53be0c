"""Hold out the calibration part of every silo: training images that only what follows the training reads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from uefl.core import noise_addresses as addresses
from uefl.core.errors import InputError
from uefl.core.noise import derive_key, permutation
from uefl.data.images import Images
from uefl.data.partitioners.partition import Partition


def hold_out_calibration(
    partitions: Sequence[Partition], images: Images, fraction: float, seed: int
) -> list[Partition]:
    """Move a fraction of each silo's training and validation images from its training to its calibration images.

    Groups stay together, and what is for calibration in one silo is not trained with in another. All silos take groups
    in one random order, so that they mostly agree on a group that several of them have.
    """
    if not fraction:
        return list(partitions)
    ids = _number_groups(images)
    rank = permutation(derive_key(seed, images.name, addresses.CALIBRATION_PART), int(ids.max()) + 1)
    is_chosen = torch.zeros(len(rank), dtype=torch.bool)
    for partition in partitions:
        is_chosen[_choose_groups(partition, ids, rank, fraction)] = True
    held_out = []
    for partition in partitions:
        chosen = is_chosen[ids[partition.train]]
        if len(partition.train) and chosen.all():
            raise InputError(
                f"silo {partition.silo.name}: calibration_fraction={fraction} leaves no training images; reduce it"
            )
        held_out.append(partition._replace(train=partition.train[~chosen], calibration=partition.train[chosen]))
    return held_out


def _number_groups(images: Images) -> Tensor:
    """Return the group of every image [n] as a number from 0; without groups, every image is one."""
    if images.group_ids is None:
        return torch.arange(len(images.y))
    ids: Tensor = torch.unique(images.group_ids, return_inverse=True)[1]
    return ids


def _choose_groups(partition: Partition, ids: Tensor, rank: Tensor, fraction: float) -> Tensor:
    """Return the first groups of a silo, in the order of their rank, that have at most this fraction of its images."""
    groups, sizes = torch.unique(ids[partition.train], return_counts=True)
    order = rank[groups].argsort()
    wanted = round((len(partition.train) + len(partition.validation)) * fraction)
    chosen: Tensor = groups[order][sizes[order].cumsum(0) <= wanted]
    return chosen
