"""Leave one domain out: a silo that never trains shows how the others' model does where nobody has been."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from uefl.data.cuts.domains import own_domains
from uefl.data.images import Images
from uefl.data.share import NOBODY, Owner, Share, numbers, owners, shuffled
from uefl.errors import InputError, unknown
from uefl.noise import key, permutation

if TYPE_CHECKING:
    from uefl.data.spec import Data

_EACH = 100  # images a class, as in Rotated MNIST of Ghifary et al. (ICCV 2015)


class Domain(NamedTuple):
    """A domain, before it is split among its silos."""

    owner: Owner
    images: Tensor  # positions


def held_out(data: Data, images: Images, seed: int) -> list[Share]:
    """All images, the source's test images too, dealt to domains: no image stands in two (DomainBed, FedIIR)."""
    order = shuffled(images, seed)
    if data.shifts:
        count = len(data.shifts)
        found = [Domain(_named(o), order[d::count]) for d, o in enumerate(owners([1] * count, data.shifts))]
    else:
        own = own_domains(images)[order]
        found = [Domain(Owner(name, name), order[own == d]) for d, name in enumerate(images.domains)]
    return _split(data, [Domain(d.owner, d.images[: data.train or None]) for d in found], seed)


def ghifary(data: Data, images: Images, seed: int) -> list[Share]:
    """The same 100 training images a class in every domain: the target shows digits that were trained with."""
    order = shuffled(images, seed)
    order = order[~images.test[order]]
    chosen = torch.cat([order[images.y[order] == c][:_EACH] for c in range(len(images.classes))])
    found = [Domain(_named(o), chosen) for o in owners([1] * len(data.shifts), data.shifts)]
    return _split(data, found, seed)


def _named(owner: Owner) -> Owner:
    """The owner of a whole domain: D1, not D1-1."""
    return owner._replace(name=owner.name.removesuffix("-1"))


def _split(data: Data, found: list[Domain], seed: int) -> list[Share]:
    """The target domain becomes one silo with test images only; the others are cut into silos."""
    keys = list(data.shifts) or [d.owner.domain for d in found]
    if data.target not in keys:
        raise unknown("target", data.target, keys)
    target = found.pop(keys.index(data.target))
    if not found or not len(target.images):
        raise InputError(f"cut={data.cut}: target {data.target} needs images, and another domain to learn from")
    ready = [_shuffled(d, seed) for d in found]
    held = [round(len(d.images) * data.validation) for d in ready]
    counts = allotted([len(d.images) - h for d, h in zip(ready, held)], sum(data.silos) or len(ready))
    shares = [s for d, h, count in zip(ready, held, counts) for s in _chunks(d, h, count)]
    name = f"{target.owner.name}-held-out"
    return [Share(target.owner._replace(name=name), NOBODY, NOBODY, target.images), *shares]


def _shuffled(domain: Domain, seed: int) -> Domain:
    order = permutation(key(seed, domain.owner.name, "silos"), len(domain.images))
    return domain._replace(images=domain.images[order])


def allotted(sizes: list[int], silos: int) -> list[int]:
    """Give each domain a silo, then always one more to the domain with the most images a silo (FedIIR)."""
    if silos < len(sizes):
        raise InputError(f"silos={silos}: {len(sizes)} source domains need a silo each")
    counts = [1] * len(sizes)
    for _ in range(silos - len(sizes)):
        counts[max(range(len(sizes)), key=lambda d: sizes[d] / counts[d])] += 1
    return counts


def _chunks(domain: Domain, held: int, count: int) -> list[Share]:
    """Consecutive chunks; the last silo also has the remainder. Source silos have no test images."""
    validation, train = (_even(part, count) for part in (domain.images[:held], domain.images[held:]))
    if not len(train[0]):
        raise InputError(f"domain {domain.owner.domain}: {len(domain.images)} images are too few for {count} silos")
    names = [f"{domain.owner.name}-{i}" for i in numbers(count)]
    return [Share(domain.owner._replace(name=n), t, v, NOBODY) for n, t, v in zip(names, train, validation)]


def _even(order: Tensor, count: int) -> list[Tensor]:
    size = len(order) // count
    return [order[i * size : (i + 1) * size if i + 1 < count else None] for i in range(count)]
