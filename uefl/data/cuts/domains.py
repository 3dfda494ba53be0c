"""The paper's silos: a few of each domain, disjoint images, as many as one says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from uefl.data.images import Images
from uefl.data.share import Owner, Pool, Share, enough, numbers, owners, pieces, pooled, share
from uefl.errors import InputError

if TYPE_CHECKING:
    from uefl.data.spec import Data


def domains(data: Data, images: Images, seed: int) -> list[Share]:
    """Domains are the shifts; without any they are the source's own, and a silo draws from its domain alone."""
    pool = pooled(images, seed, merge=data.merge)
    if data.shifts:
        return _dealt(data, pool, owners(data.silos, data.shifts), data.sizes)
    counts, found, start = own_counts(data, images), own_domains(images), 0
    shares = []
    for d, (name, count) in enumerate(zip(images.domains, counts)):
        mine = Pool(*(None if part is None else part[found[part] == d] for part in pool))  # type: ignore[arg-type]
        names = [Owner(f"{name}-{i}", name) for i in numbers(count)]
        shares += _dealt(data, mine, names, data.sizes[start : start + count])
        start += count
    return shares


def own_domains(images: Images) -> Tensor:
    """The source's own domains."""
    if images.domain is None:
        raise InputError(f"shifts=() means the source's own domains, but {images.name} has none: give shifts")
    return images.domain


def own_counts(data: Data, images: Images) -> tuple[int, ...]:
    """How many silos each of the source's own domains has, one unless said."""
    counts = data.silos or (1,) * len(images.domains)
    if len(counts) != len(images.domains):
        raise InputError(f"silos={data.silos} must have one entry for each of {', '.join(images.domains)}")
    return counts


def _dealt(data: Data, pool: Pool, silos: list[Owner], given: Sequence[int]) -> list[Share]:
    """Deal consecutive pieces of the pool."""
    sizes, tests = _sizes(data, pool, len(silos), given)
    if pool.test is None:
        enough(data.name, sum(sizes) + sum(tests), len(pool.train))
        both = pieces(pool.train, [n + t for n, t in zip(sizes, tests)])
        return [share(o, b[:n], b[n:], data.validation) for o, b, n in zip(silos, both, sizes)]
    enough(data.name, sum(sizes), len(pool.train), "training ")
    enough(data.name, sum(tests), len(pool.test), "test ")
    parts = zip(silos, pieces(pool.train, sizes), pieces(pool.test, tests))
    return [share(owner, train, test, data.validation) for owner, train, test in parts]


def _sizes(data: Data, pool: Pool, silos: int, given: Sequence[int]) -> tuple[list[int], list[int]]:
    """Training and test images of each silo; 0 means an equal share of all there are."""
    if pool.test is not None:
        train, test = data.train or len(pool.train) // silos, data.test or len(pool.test) // silos
    elif data.train:
        train, test = data.train, data.test or round(data.train * data.test_part / (1 - data.test_part))
    else:
        each = len(pool.train) // silos
        test = data.test or round(each * data.test_part)
        train = max(each - test, 0)
    return list(given or (train,) * silos), [test] * silos
