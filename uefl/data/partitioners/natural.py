"""Use the silos that the source itself names, in its folders or its manifest."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from uefl.core.errors import InputError
from uefl.data.images import Images
from uefl.data.partitioners.partition import (
    USE_ALL_IMAGES,
    Partition,
    Partitioner,
    SiloSpec,
    make_partition,
    shuffle_indices,
)

if TYPE_CHECKING:
    from uefl.data.config import DataConfig


def partition_natural(config: DataConfig, images: Images, seed: int) -> list[Partition]:
    """Give every silo its own images; a silo without test images holds out a fraction of its training images."""
    if images.silo_ids is None:
        remedy, what = ("set silo=<column>", "rows") if images.table else ("arrange images as <silo>/<class>/", "them")
        raise InputError(
            f"partitioner=natural needs a source that names its silos, but {images.name} does not; {remedy}, or set "
            f"partitioner=dirichlet to divide {what} among silos"
        )
    indices, names = shuffle_indices(images, seed), images.silos
    shifts = config.shifts * len(names) if len(config.shifts) == 1 else config.shifts
    if len(shifts) not in (0, len(names)):
        raise InputError(f"shifts={config.shifts} must have no entry, one entry, or one for each of {', '.join(names)}")
    partitions = []
    own_indices = _sort_by_silo(indices, images.silo_ids, len(names))
    for k, name in enumerate(names):
        train, test = _split_train_test(config, images, own_indices[k])
        train, test = train[: config.train_per_silo or None], test[: config.test_per_silo or None]
        silo = SiloSpec(name, name, *shifts[k : k + 1])
        partitions.append(make_partition(silo, train, test, config.validation_fraction))
    return partitions


def _sort_by_silo(indices: Tensor, silo_ids: Tensor, num_silos: int) -> list[Tensor]:
    """Return the indices of every silo, in their order; one sort takes as long for many silos as for few."""
    ids = silo_ids[indices]
    counts = torch.bincount(ids, minlength=num_silos).tolist()
    return list(torch.split(indices[ids.argsort(stable=True)], counts))


def _split_train_test(config: DataConfig, images: Images, indices: Tensor) -> tuple[Tensor, Tensor]:
    if config.fold:
        number, num_folds = parse_fold(config.fold)
        is_test = torch.arange(len(indices)) % num_folds == number - 1
        return indices[~is_test], indices[is_test]
    is_test = images.is_test[indices]
    if is_test.any() and not config.pool_splits:
        return indices[~is_test], indices[is_test]
    num_test = min(max(1, round(len(indices) * config.test_fraction)), len(indices))
    return indices[num_test:], indices[:num_test]


def parse_fold(text: str) -> tuple[int, int]:
    """Return the number of a fold and the number of folds: 2 and 5 of `2/5`; an empty text is fold 1 of 1."""
    match = re.fullmatch(r"(\d{1,4})/(\d{1,4})", text or "1/1")
    number, count = map(int, match.groups()) if match else (0, 0)
    if text and not (1 <= number <= count and count >= 2):
        raise InputError(f"fold={text} must be a number and a count of at least 2, such as 1/5 to 5/5")
    return number, count


NATURAL = Partitioner(
    partition_natural,
    {**USE_ALL_IMAGES, "num_silos": (), "shifts": ()},
    frozenset({"num_silos", "alpha", "classes_per_silo", "test_label_distribution"}),
)
