"""Label and quantity skew: a rule divides the training images; test labels follow it or are those of all silos."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.random import PCG64, Generator
from torch import Tensor

from uefl.core import noise_addresses as addresses
from uefl.core.errors import InputError
from uefl.core.noise import derive_key, permutation
from uefl.data.images import Images
from uefl.data.partitioners import class_counts
from uefl.data.partitioners.class_counts import Counts
from uefl.data.partitioners.partition import (
    USE_ALL_IMAGES,
    IndexPool,
    Partition,
    Partitioner,
    SiloSpec,
    check_enough_images,
    make_index_pool,
    make_partition,
    make_silo_specs,
    split_indices,
)

if TYPE_CHECKING:
    from uefl.data.config import DataConfig

CountRule = Callable[[Generator, Counts, int], Counts]
_MIN_IMAGES = 10  # of the smallest silo under quantity skew


def partition_dirichlet_vhl(config: DataConfig, images: Images, seed: int) -> list[Partition]:
    """Divide each class among silos by Dir(α), with unequal sizes (VHL)."""
    return _partition_by_labels(config, images, seed, partial(class_counts.draw_vhl_counts, alpha=config.alpha))


def partition_dirichlet_fedbr(config: DataConfig, images: Images, seed: int) -> list[Partition]:
    """Draw labels from Dir(α · frequencies of the remaining images), with equal sizes, silo by silo (FedBR)."""
    return _partition_by_labels(config, images, seed, partial(class_counts.draw_fedbr_counts, alpha=config.alpha))


def partition_dirichlet(config: DataConfig, images: Images, seed: int) -> list[Partition]:
    """Draw labels from Dir(α), with equal sizes, silo by silo."""
    return _partition_by_labels(config, images, seed, partial(class_counts.draw_dirichlet_counts, alpha=config.alpha))


def partition_dirichlet_fedcr(config: DataConfig, images: Images, seed: int) -> list[Partition]:
    """Draw labels from Dir(α), with equal sizes, for all silos in parallel (the 100 clients of FedCR)."""
    return _partition_by_labels(config, images, seed, partial(class_counts.draw_fedcr_counts, alpha=config.alpha))


def partition_pathological(config: DataConfig, images: Images, seed: int) -> list[Partition]:
    """Give each silo `classes_per_silo` consecutive classes with nearly equal counts (FedCR)."""
    return _partition_by_labels(
        config, images, seed, partial(class_counts.assign_consecutive_classes, classes_per_silo=config.classes_per_silo)
    )


def partition_by_quantity(config: DataConfig, images: Images, seed: int) -> list[Partition]:
    """Draw sizes from Dir(α), with a minimum per silo; labels are not skewed."""
    pool, silos = _make_limited_pool(config, images, seed), make_silo_specs(config.num_silos, config.shifts)
    num_free = len(pool.train) - _MIN_IMAGES * len(silos)
    if num_free < 0:
        raise InputError(
            f"partitioner=quantity: {len(silos)} silos need {_MIN_IMAGES} images each, but there are {len(pool.train)}"
        )
    fractions = _make_rng(config, seed).dirichlet(np.full(len(silos), config.alpha))
    ends = np.floor(np.cumsum(fractions) * num_free + 0.5).astype(np.int64)
    ends[-1] = num_free
    train = split_indices(pool.train, (np.diff(ends, prepend=0) + _MIN_IMAGES).tolist())
    if pool.test is None:
        return _split_own_images(config, silos, train)
    return _make_partitions(config, silos, train, _split_evenly(pool.test, len(silos)))


def _partition_by_labels(config: DataConfig, images: Images, seed: int, rule: CountRule) -> list[Partition]:
    pool, silos = _make_limited_pool(config, images, seed), make_silo_specs(config.num_silos, config.shifts)
    counts = rule(_make_rng(config, seed), _count_classes(images, pool.train), len(silos))
    train = [
        indices[permutation(derive_key(seed, config.name, silo.name, addresses.IMAGES_OF_SILO), len(indices))]
        for silo, indices in zip(silos, _deal_by_class(images, pool.train, counts))
    ]
    if pool.test is None:
        return _split_own_images(config, silos, train)
    if config.test_label_distribution == "global":
        return _make_partitions(config, silos, train, _split_evenly(pool.test, len(silos)))
    test_counts = class_counts.allocate_proportionally(counts, _count_classes(images, pool.test))
    return _make_partitions(config, silos, train, _deal_by_class(images, pool.test, test_counts))


def _make_limited_pool(config: DataConfig, images: Images, seed: int) -> IndexPool:
    """Return at most `train_per_silo` and `test_per_silo` images per silo; global test images are held out first."""
    train, test = make_index_pool(images, seed, pool_splits=config.pool_splits)
    num_silos = sum(config.num_silos)
    num_train, num_test = config.train_per_silo * num_silos, config.test_per_silo * num_silos
    if test is not None:
        check_enough_images(config.name, num_train, len(train), "training ")
        check_enough_images(config.name, num_test, len(test), "test ")
        return IndexPool(train[: num_train or None], test[: num_test or None])
    test_fraction = _compute_test_fraction(config, len(train))
    if config.train_per_silo:
        num_required = round(config.train_per_silo / (1 - test_fraction)) * num_silos
        check_enough_images(config.name, num_required, len(train))
        train = train[:num_required]
    if config.test_label_distribution == "silo":
        return IndexPool(train, None)
    num_test = round(len(train) * test_fraction)
    return IndexPool(train[num_test:], train[:num_test])


def _compute_test_fraction(config: DataConfig, num_images: int) -> float:
    """Return the fraction of test images for a source without test split."""
    if not config.test_per_silo:
        return config.test_fraction
    num_silos = sum(config.num_silos)
    num_used = (config.train_per_silo + config.test_per_silo) * num_silos if config.train_per_silo else num_images
    check_enough_images(config.name, config.test_per_silo * num_silos + 1, num_used)
    return config.test_per_silo * num_silos / num_used


def _split_own_images(config: DataConfig, silos: list[SiloSpec], silo_indices: list[Tensor]) -> list[Partition]:
    """Split the images of each silo into training and test images."""
    test_fraction = _compute_test_fraction(config, sum(map(len, silo_indices)))
    num_test = [max(1, round(len(indices) * test_fraction)) for indices in silo_indices]
    train = [indices[n:] for indices, n in zip(silo_indices, num_test)]
    return _make_partitions(config, silos, train, [indices[:n] for indices, n in zip(silo_indices, num_test)])


def _make_partitions(
    config: DataConfig, silos: list[SiloSpec], train_indices: list[Tensor], test_indices: list[Tensor]
) -> list[Partition]:
    return [
        make_partition(silo, train, test, config.validation_fraction)
        for silo, train, test in zip(silos, train_indices, test_indices)
    ]


def _split_evenly(indices: Tensor, count: int) -> list[Tensor]:
    """Return pieces of equal size; the remainder is not used."""
    return split_indices(indices, [len(indices) // count] * count)


def _deal_by_class(images: Images, indices: Tensor, counts: Counts) -> list[Tensor]:
    """Give silo k counts[k, c] images of class c."""
    by_class = [split_indices(indices[images.y[indices] == c], counts[:, c].tolist()) for c in range(counts.shape[1])]
    return [torch.cat([pieces[k] for pieces in by_class]) for k in range(len(counts))]


def _count_classes(images: Images, indices: Tensor) -> Counts:
    counts: Counts = np.bincount(images.y[indices].numpy(), minlength=len(images.classes)).astype(np.int64)
    return counts


def _make_rng(config: DataConfig, seed: int) -> Generator:
    address = addresses.PARTITIONERS.get(config.partitioner, config.partitioner)
    return Generator(PCG64(derive_key(seed, config.name, addresses.PARTITION, address)))


_TEN_SILOS: dict[str, Any] = {**USE_ALL_IMAGES, "shifts": ("none",), "num_silos": (10,)}
_HUNDRED_SILOS: dict[str, Any] = {  # FedCR: pool and shuffle all images, then split the images of each client 70/30
    **_TEN_SILOS,
    "num_silos": (100,),
    "pool_splits": True,
    "test_fraction": 0.3,
    "test_label_distribution": "silo",
}

_NO_CLASSES = frozenset({"classes_per_silo"})

QUANTITY = Partitioner(partition_by_quantity, {**_TEN_SILOS, "alpha": 0.5}, _NO_CLASSES)
DIRICHLET = Partitioner(partition_dirichlet, _TEN_SILOS, _NO_CLASSES)
DIRICHLET_VHL = Partitioner(partition_dirichlet_vhl, _TEN_SILOS, _NO_CLASSES)
DIRICHLET_FEDBR = Partitioner(partition_dirichlet_fedbr, _TEN_SILOS, _NO_CLASSES)
DIRICHLET_FEDCR = Partitioner(partition_dirichlet_fedcr, {**_HUNDRED_SILOS, "alpha": 0.3}, _NO_CLASSES)
PATHOLOGICAL = Partitioner(partition_pathological, _HUNDRED_SILOS, frozenset({"alpha"}))
