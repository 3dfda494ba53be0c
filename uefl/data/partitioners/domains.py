"""The partition of the paper: several silos per domain with disjoint images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from uefl.core.errors import InputError
from uefl.data.images import Images
from uefl.data.partitioners.partition import (
    IndexPool,
    Partition,
    Partitioner,
    SiloSpec,
    check_enough_images,
    format_numbers,
    make_index_pool,
    make_partition,
    make_silo_specs,
    split_indices,
)

if TYPE_CHECKING:
    from uefl.data.config import DataConfig


def partition_by_domain(config: DataConfig, images: Images, seed: int) -> list[Partition]:
    """Make one domain per shift, or use the domains of the source, whose silos get only images of their domain."""
    pool = make_index_pool(images, seed, pool_splits=config.pool_splits)
    if config.shifts:
        return _deal_consecutive(config, pool, make_silo_specs(config.num_silos, config.shifts), config.train_sizes)
    counts, domain_ids, start = get_silos_per_domain(config, images), get_natural_domains(images), 0
    partitions = []
    for d, (name, count) in enumerate(zip(images.domains, counts)):
        test = None if pool.test is None else pool.test[domain_ids[pool.test] == d]
        domain_pool = IndexPool(pool.train[domain_ids[pool.train] == d], test)
        silos = [SiloSpec(f"{name}-{number}", name) for number in format_numbers(count)]
        partitions += _deal_consecutive(config, domain_pool, silos, config.train_sizes[start : start + count])
        start += count
    return partitions


def get_natural_domains(images: Images) -> Tensor:
    """Return the domain of every image [n] as the source gives it."""
    if images.domain_ids is None:
        raise InputError(f"shifts=() uses the domains or silos of the source, but {images.name} names none; set shifts")
    return images.domain_ids


def get_silos_per_domain(config: DataConfig, images: Images) -> tuple[int, ...]:
    """Return the number of silos of each domain of the source; the default is one."""
    counts = config.num_silos or (1,) * len(images.domains)
    if len(counts) != len(images.domains):
        raise InputError(f"num_silos={config.num_silos} must have one entry for each of {', '.join(images.domains)}")
    return counts


def _deal_consecutive(
    config: DataConfig, pool: IndexPool, silos: list[SiloSpec], train_sizes: Sequence[int]
) -> list[Partition]:
    """Give each silo consecutive indices of the pool."""
    num_train, num_test = _compute_sizes(config, pool, len(silos), train_sizes)
    if pool.test is None:
        check_enough_images(config.name, sum(num_train) + sum(num_test), len(pool.train))
        pieces = split_indices(pool.train, [n + t for n, t in zip(num_train, num_test)])
        splits = [(piece[:n], piece[n:]) for piece, n in zip(pieces, num_train)]
    else:
        check_enough_images(config.name, sum(num_train), len(pool.train), "training ")
        check_enough_images(config.name, sum(num_test), len(pool.test), "test ")
        splits = list(zip(split_indices(pool.train, num_train), split_indices(pool.test, num_test)))
    return [make_partition(silo, train, test, config.validation_fraction) for silo, (train, test) in zip(silos, splits)]


def _compute_sizes(
    config: DataConfig, pool: IndexPool, num_silos: int, train_sizes: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return the number of training and test images of each silo; 0 means an equal share of all images."""
    train, test = config.train_per_silo, config.test_per_silo
    if pool.test is not None:
        train, test = train or len(pool.train) // num_silos, test or len(pool.test) // num_silos
    elif train:
        test = test or round(train * config.test_fraction / (1 - config.test_fraction))
    else:
        images_per_silo = len(pool.train) // num_silos
        test = test or round(images_per_silo * config.test_fraction)
        train = max(images_per_silo - test, 0)
    return list(train_sizes or (train,) * num_silos), [test] * num_silos


DOMAINS = Partitioner(partition_by_domain, {}, frozenset({"alpha", "classes_per_silo", "test_label_distribution"}))
