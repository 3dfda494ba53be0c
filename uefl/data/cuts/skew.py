"""Silos that differ in labels or in size: a rule deals the training images, the test images follow or are for all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.random import PCG64, Generator
from torch import Tensor

from uefl.data.cuts import labels
from uefl.data.cuts.labels import Counts
from uefl.data.images import Images
from uefl.data.share import Owner, Pool, Share, enough, owners, pieces, pooled, share
from uefl.errors import InputError
from uefl.noise import key, permutation

if TYPE_CHECKING:
    from uefl.data.spec import Data

Rule = Callable[[Generator, Counts, int], Counts]
_LEAST = 10  # images of the smallest silo under quantity skew


def vhl(data: Data, images: Images, seed: int) -> list[Share]:
    """Labels from Dir(α) class by class, unequal sizes (VHL)."""
    return _by_labels(data, images, seed, partial(labels.vhl, alpha=data.alpha))


def fedbr(data: Data, images: Images, seed: int) -> list[Share]:
    """Labels from Dir(α · what is left), equal sizes, silo by silo (FedBR)."""
    return _by_labels(data, images, seed, partial(labels.fedbr, alpha=data.alpha))


def dirichlet(data: Data, images: Images, seed: int) -> list[Share]:
    """Labels from Dir(α), equal sizes, silo by silo."""
    return _by_labels(data, images, seed, partial(labels.dirichlet, alpha=data.alpha))


def fedcr(data: Data, images: Images, seed: int) -> list[Share]:
    """Labels from Dir(α), equal sizes, all silos dealt to at once (FedCR's 100 clients)."""
    return _by_labels(data, images, seed, partial(labels.fedcr, alpha=data.alpha))


def classes(data: Data, images: Images, seed: int) -> list[Share]:
    """So many consecutive classes a silo (`labels`), near-equal counts (FedCR)."""
    return _by_labels(data, images, seed, partial(labels.consecutive, each=data.labels))


def quantity(data: Data, images: Images, seed: int) -> list[Share]:
    """Sizes are Dir(α) of all images, above a small floor; labels are not skewed."""
    pool, silos = _limited(data, images, seed), owners(data.silos, data.shifts)
    spare = len(pool.train) - _LEAST * len(silos)
    if spare < 0:
        raise InputError(f"cut=quantity: {len(silos)} silos need {_LEAST} images each, there are {len(pool.train)}")
    parts = _draw(data, seed).dirichlet(np.full(len(silos), data.alpha))
    ends = np.floor(np.cumsum(parts) * spare + 0.5).astype(np.int64)
    ends[-1] = spare
    own = pieces(pool.train, (np.diff(ends, prepend=0) + _LEAST).tolist())
    if pool.test is None:
        return _torn(data, silos, own)
    return _with_tests(data, silos, own, pieces(pool.test, [len(pool.test) // len(silos)] * len(silos)))


def _by_labels(data: Data, images: Images, seed: int, rule: Rule) -> list[Share]:
    pool, silos = _limited(data, images, seed), owners(data.silos, data.shifts)
    counts = rule(_draw(data, seed), _counted(images, pool.train), len(silos))
    own = _handed(images, pool.train, counts)
    own = [mine[permutation(key(seed, data.name, o.name, "order"), len(mine))] for o, mine in zip(silos, own)]
    if pool.test is None:
        return _torn(data, silos, own)
    if data.test_labels == "own":
        tests = _handed(images, pool.test, labels.alike(counts, _counted(images, pool.test)))
    else:
        tests = pieces(pool.test, [len(pool.test) // len(silos)] * len(silos))
    return _with_tests(data, silos, own, tests)


def _limited(data: Data, images: Images, seed: int) -> Pool:
    """The pool, no larger than `train` and `test` images a silo; test images for all are set aside first."""
    train, test = pooled(images, seed, merge=data.merge)
    silos = sum(data.silos)
    if test is not None:
        enough(data.name, data.train * silos, len(train), "training ")
        enough(data.name, data.test * silos, len(test), "test ")
        return Pool(train[: data.train * silos or None], test[: data.test * silos or None])
    part = _test_part(data, len(train))
    if data.train:
        need = round(data.train / (1 - part)) * silos
        enough(data.name, need, len(train))
        train = train[:need]
    if data.test_labels == "own":
        return Pool(train, None)
    aside = round(len(train) * part)
    return Pool(train[aside:], train[:aside])


def _test_part(data: Data, n: int) -> float:
    """The part of n images that tests, where the source does not say."""
    if not data.test:
        return data.test_part
    both = (data.train + data.test) * sum(data.silos) if data.train else n
    enough(data.name, data.test * sum(data.silos) + 1, both)
    return data.test * sum(data.silos) / both


def _torn(data: Data, silos: list[Owner], own: list[Tensor]) -> list[Share]:
    """Tear each silo's own images into training and test."""
    part = _test_part(data, sum(map(len, own)))
    tests = [max(1, round(len(mine) * part)) for mine in own]
    return [share(o, mine[t:], mine[:t], data.validation) for o, mine, t in zip(silos, own, tests)]


def _with_tests(data: Data, silos: list[Owner], own: list[Tensor], tests: list[Tensor]) -> list[Share]:
    return [share(o, mine, test, data.validation) for o, mine, test in zip(silos, own, tests)]


def _handed(images: Images, pool: Tensor, counts: Counts) -> list[Tensor]:
    """Hand out images of the pool so that silo k has counts[k, c] of class c."""
    by_class = [pieces(pool[images.y[pool] == c], counts[:, c].tolist()) for c in range(counts.shape[1])]
    return [torch.cat([dealt[k] for dealt in by_class]) for k in range(len(counts))]


def _counted(images: Images, pool: Tensor) -> Counts:
    counts: Counts = np.bincount(images.y[pool].numpy(), minlength=len(images.classes)).astype(np.int64)
    return counts


def _draw(data: Data, seed: int) -> Generator:
    return Generator(PCG64(key(seed, data.name, "cut", data.cut)))
