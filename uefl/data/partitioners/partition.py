"""The common parts of all partitioners: what a silo gets, as indices into the source, without touching pixels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from uefl.core import noise_addresses as addresses
from uefl.core.errors import InputError
from uefl.core.noise import derive_key, permutation
from uefl.data.images import Images
from uefl.data.shifts import NO_SHIFT, describe_shift

if TYPE_CHECKING:
    from uefl.data.config import DataConfig

NO_INDICES = torch.zeros(0, dtype=torch.int64)  # of a split without images
USE_ALL_IMAGES: dict[str, Any] = {"train_per_silo": 0, "test_per_silo": 0}


class SiloSpec(NamedTuple):
    """A silo that has no images yet."""

    name: str
    domain: str
    shift: str = NO_SHIFT


class Partition(NamedTuple):
    """A silo and the indices [n] of its images."""

    silo: SiloSpec
    train: Tensor
    validation: Tensor
    test: Tensor
    calibration: Tensor = NO_INDICES  # taken from the training images after a partitioner has divided them


class IndexPool(NamedTuple):
    """Indices to divide among silos, in random order; `test` is None if no test split of the source is used."""

    train: Tensor
    test: Tensor | None


class Partitioner(NamedTuple):
    """A rule that divides the images of a source among silos, given a seed, and the settings it is used with."""

    partition: Callable[[DataConfig, Images, int], list[Partition]]
    default_settings: Mapping[str, Any]  # of DataConfig, beyond those of the data set
    ignored_settings: frozenset[str] = frozenset()  # settings of other partitioners, which this one does not read


def make_silo_specs(num_silos: Sequence[int], shifts: Sequence[str]) -> list[SiloSpec]:
    """Name silos D1-1, D1-2, …, D2-1, …: `num_silos[d]` of them with shift `shifts[d]`."""
    domains = [(f"D{d + 1}", shift) for d, shift in enumerate(shifts)]
    return [
        SiloSpec(f"{domain}-{number}", f"{domain} ({describe_shift(shift)})" if shift != NO_SHIFT else domain, shift)
        for (domain, shift), count in zip(domains, num_silos)
        for number in format_numbers(count)
    ]


def format_numbers(count: int) -> list[str]:
    """Return 1, 2, … with leading zeros, so that names sort in this order."""
    return [str(i + 1).zfill(len(str(count))) for i in range(count)]


def shuffle_indices(images: Images, seed: int) -> Tensor:
    """Return all indices in the random order that every partitioner uses: sources are often sorted by class."""
    return permutation(derive_key(seed, images.name, addresses.SHUFFLED_IMAGES), len(images.y))


def make_index_pool(images: Images, seed: int, *, pool_splits: bool) -> IndexPool:
    """Return the training and test images in random order, or all together with `pool_splits`."""
    indices = shuffle_indices(images, seed)
    if pool_splits or not images.is_test.any():
        return IndexPool(indices, None)
    return IndexPool(indices[~images.is_test[indices]], indices[images.is_test[indices]])


def make_partition(silo: SiloSpec, train: Tensor, test: Tensor, validation_fraction: float) -> Partition:
    """Hold out the first training images, which are in random order, for validation (D3)."""
    for split, indices in (("training", train), ("test", test)):
        if not len(indices):
            raise InputError(f"silo {silo.name} has no {split} images; reduce num_silos or use more images")
    num_validation = count_validation(len(train), validation_fraction)
    return Partition(silo, train[num_validation:], train[:num_validation], test)


def count_validation(num_train: int, validation_fraction: float) -> int:
    """Return the number of validation images: at least one unless the fraction is 0, and fewer than all."""
    return min(max(1, round(num_train * validation_fraction)), num_train - 1) if validation_fraction else 0


def split_indices(indices: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Return consecutive pieces of these sizes; the remainder is not used."""
    return list(torch.split(indices[: sum(sizes)], list(sizes)))


def check_enough_images(name: str, required: int, available: int, kind: str = "") -> None:
    """Raise an error if a partition needs more images than there are."""
    if required > available:
        raise InputError(
            f"the silos need {required} {kind}images, but {name} has {available}; "
            "reduce train_per_silo, test_per_silo or num_silos"
        )
