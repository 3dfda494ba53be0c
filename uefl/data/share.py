"""What one silo will own, as positions in the source: every cut makes these, and no cut touches a pixel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from uefl.data.images import Images
from uefl.data.shifts import PLAIN, described
from uefl.errors import InputError
from uefl.noise import key, permutation

NOBODY = torch.zeros(0, dtype=torch.int64)  # a part without images


class Owner(NamedTuple):
    """A silo that has no images yet."""

    name: str
    domain: str
    shift: str = PLAIN


class Share(NamedTuple):
    """A silo and the positions [n] of its images."""

    owner: Owner
    train: Tensor
    validation: Tensor
    test: Tensor


class Pool(NamedTuple):
    """Images to be dealt, in random order; `test` is None where the source's own test split does not count."""

    train: Tensor
    test: Tensor | None


def owners(counts: Sequence[int], shifts: Sequence[str]) -> list[Owner]:
    """Silos D1-1, D1-2, …, D2-1, …: as many of each domain as `counts` says."""
    domains = [(f"D{d + 1}", shift) for d, shift in enumerate(shifts)]
    return [
        Owner(f"{domain}-{number}", f"{domain} ({described(shift)})" if shift != PLAIN else domain, shift)
        for (domain, shift), count in zip(domains, counts)
        for number in numbers(count)
    ]


def numbers(count: int) -> list[str]:
    """1, 2, … with leading zeros, so that names sort as they count."""
    return [str(i + 1).zfill(len(str(count))) for i in range(count)]


def shuffled(images: Images, seed: int) -> Tensor:
    """All positions in the order from which every cut deals: sources often come sorted by class."""
    return permutation(key(seed, images.name, "cut"), len(images.y))


def pooled(images: Images, seed: int, *, merge: bool) -> Pool:
    """Training and test images in random order, as the source split them unless told to merge."""
    order = shuffled(images, seed)
    if merge or not images.test.any():
        return Pool(order, None)
    return Pool(order[~images.test[order]], order[images.test[order]])


def share(owner: Owner, train: Tensor, test: Tensor, validation: float) -> Share:
    """Keep the first of the training images, which come in random order, for decisions (D3)."""
    for part, images in (("training", train), ("test", test)):
        if not len(images):
            raise InputError(f"silo {owner.name} has no {part} images; have fewer silos or more images")
    held = kept(len(train), validation)
    return Share(owner, train[held:], train[:held], test)


def kept(n: int, validation: float) -> int:
    """How many of n training images decide: at least one, if any shall and one is left to train with."""
    return min(max(1, round(n * validation)), n - 1) if validation else 0


def pieces(order: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Consecutive pieces of these sizes; what is left over belongs to nobody."""
    return list(torch.split(order[: sum(sizes)], list(sizes)))


def enough(name: str, need: int, have: int, kind: str = "") -> None:
    """Refuse to cut more than there is."""
    if need > have:
        raise InputError(f"these silos need {need} {kind}images, {name} has {have}: lower train, test or silos")
