"""Leave one domain out: a silo that never trains measures the model of the others on an unseen domain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from uefl.core import noise_addresses as addresses
from uefl.core.errors import InputError, unknown_value_error
from uefl.core.noise import derive_key, permutation
from uefl.data.images import Images
from uefl.data.partitioners.domains import get_natural_domains
from uefl.data.partitioners.partition import (
    NO_INDICES,
    USE_ALL_IMAGES,
    Partition,
    Partitioner,
    SiloSpec,
    count_validation,
    format_numbers,
    make_silo_specs,
    shuffle_indices,
)

if TYPE_CHECKING:
    from uefl.data.config import DataConfig

HELD_OUT_SUFFIX = "-held-out"  # of the silo of the target; silo names address random draws: keep it
_IMAGES_PER_CLASS = 100  # as in Rotated MNIST of Ghifary et al. (ICCV 2015)


class DomainIndices(NamedTuple):
    """A domain before it is divided among its silos."""

    silo: SiloSpec
    indices: Tensor


def partition_leave_one_domain_out(config: DataConfig, images: Images, seed: int) -> list[Partition]:
    """Divide all images, including test images, among domains without overlap (DomainBed, FedIIR)."""
    indices = shuffle_indices(images, seed)
    if config.shifts:
        step = len(config.shifts)
        domains = [DomainIndices(silo, indices[d::step]) for d, silo in enumerate(_make_domain_specs(config))]
    else:
        names, ids = get_named_domains(images)
        domains = [DomainIndices(SiloSpec(name, name), indices[ids[indices] == d]) for d, name in enumerate(names)]
    limit = config.train_per_silo or None
    return _hold_out_target(config, [domain._replace(indices=domain.indices[:limit]) for domain in domains], seed)


def get_named_domains(images: Images) -> tuple[tuple[str, ...], Tensor]:
    """Return the domains that the source names, else its silos, and the index of each image into them."""
    if images.domain_ids is None and images.silo_ids is not None:
        return images.silos, images.silo_ids
    return images.domains, get_natural_domains(images)


def partition_paired_domains(config: DataConfig, images: Images, seed: int) -> list[Partition]:
    """Use the same 100 training images per class in every domain: the target shows images that were trained with."""
    indices = shuffle_indices(images, seed)
    indices = indices[~images.is_test[indices]]
    indices = torch.cat([indices[images.y[indices] == c][:_IMAGES_PER_CLASS] for c in range(len(images.classes))])
    return _hold_out_target(config, [DomainIndices(silo, indices) for silo in _make_domain_specs(config)], seed)


def _make_domain_specs(config: DataConfig) -> list[SiloSpec]:
    """Name one silo per shift for a whole domain: D1, not D1-1."""
    silos = make_silo_specs([1] * len(config.shifts), config.shifts)
    return [silo._replace(name=silo.name.removesuffix("-1")) for silo in silos]


def _hold_out_target(config: DataConfig, domains: list[DomainIndices], seed: int) -> list[Partition]:
    """Make the target domain one silo without training images, and divide the other domains among silos.

    The validation images of the target are unlabeled in effect: they only choose its codewords (D15).
    """
    keys = list(config.shifts) or [domain.silo.domain for domain in domains]
    if config.target not in keys:
        raise unknown_value_error("target", config.target, [*keys, "all (`uefl run` and `compare`)"])
    target = _shuffle_domain(domains.pop(keys.index(config.target)), seed)
    if not domains or not len(target.indices):
        raise InputError(
            f"partitioner={config.partitioner}: target {config.target} needs images and at least one other domain"
        )
    domains = [_shuffle_domain(domain, seed) for domain in domains]
    num_validation = [round(len(domain.indices) * config.validation_fraction) for domain in domains]
    num_train = [len(domain.indices) - n for domain, n in zip(domains, num_validation)]
    num_silos = allocate_silos(num_train, sum(config.num_silos) or len(domains))
    name = f"{target.silo.name}{HELD_OUT_SUFFIX}"
    num_target_validation = count_validation(len(target.indices), config.validation_fraction)
    validation, test = target.indices[:num_target_validation], target.indices[num_target_validation:]
    test = test[: config.test_per_silo or None]
    return [
        Partition(target.silo._replace(name=name), NO_INDICES, validation, test),
        *(partition for row in zip(domains, num_validation, num_silos) for partition in _split_domain(*row)),
    ]


def _shuffle_domain(domain: DomainIndices, seed: int) -> DomainIndices:
    order = permutation(derive_key(seed, domain.silo.name, addresses.SILOS_OF_DOMAIN), len(domain.indices))
    return domain._replace(indices=domain.indices[order])


def allocate_silos(sizes: list[int], num_silos: int) -> list[int]:
    """Give each domain one silo, then add silos to the domain with the most images per silo (FedIIR)."""
    if num_silos < len(sizes):
        raise InputError(
            f"num_silos={num_silos} must be at least {len(sizes)}: each domain except the target needs a silo"
        )
    counts = [1] * len(sizes)
    for _ in range(num_silos - len(sizes)):
        counts[max(range(len(sizes)), key=lambda d: sizes[d] / counts[d])] += 1
    return counts


def _split_domain(domain: DomainIndices, num_validation: int, num_silos: int) -> list[Partition]:
    """Divide a domain into consecutive chunks; the last silo also gets the remainder, and no silo has test images."""
    validation = _split_with_remainder(domain.indices[:num_validation], num_silos)
    train = _split_with_remainder(domain.indices[num_validation:], num_silos)
    if not len(train[0]):
        raise InputError(f"domain {domain.silo.domain}: {len(domain.indices)} images are too few for {num_silos} silos")
    names = [f"{domain.silo.name}-{number}" for number in format_numbers(num_silos)]
    return [
        Partition(domain.silo._replace(name=name), silo_train, silo_validation, NO_INDICES)
        for name, silo_train, silo_validation in zip(names, train, validation)
    ]


def _split_with_remainder(indices: Tensor, count: int) -> list[Tensor]:
    size = len(indices) // count
    return [indices[i * size : (i + 1) * size if i + 1 < count else None] for i in range(count)]


_ANGLES = (0, 15, 30, 45, 60, 75)
_DEFAULT_SETTINGS: dict[str, Any] = {**USE_ALL_IMAGES, "num_silos": ()}  # one silo per domain
_IGNORED_SETTINGS = frozenset({"alpha", "classes_per_silo", "test_label_distribution", "test_fraction", "pool_splits"})

LEAVE_ONE_DOMAIN_OUT = Partitioner(
    partition_leave_one_domain_out,
    {**_DEFAULT_SETTINGS, "shifts": tuple(f"rotate:{angle}" for angle in _ANGLES), "target": "rotate:0"},
    _IGNORED_SETTINGS,
)
LEAVE_ONE_DOMAIN_OUT_PAIRED = Partitioner(
    partition_paired_domains,
    {
        **_DEFAULT_SETTINGS,
        "shifts": tuple(f"rotate-nearest:{angle}" for angle in _ANGLES),
        "target": "rotate-nearest:0",
    },
    _IGNORED_SETTINGS | {"train_per_silo"},
)
