"""Every data set by its name: where it may lie, who reads it, and the constants its pixels are standardised with."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError

from uefl.data import cache
from uefl.data.addresses import ADDRESSES
from uefl.data.checks import checked
from uefl.data.cifar import cifar10, cifar100
from uefl.data.download import fetch
from uefl.data.embedded import mnist5k
from uefl.data.gtsrb import gtsrb
from uefl.data.idx import emnist_letters, fmnist, mnist
from uefl.data.images import Images
from uefl.data.manifest import manifest, stamps
from uefl.data.places import cache_folder, found
from uefl.data.reading import Reading, printable
from uefl.data.tree import tree
from uefl.errors import InputError, unknown
from uefl.plugins import has

Importer = Callable[[Path, Reading], Images]
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Source:
    """One data set."""

    about: str
    importer: Importer | None  # None: the images ship inside a dependency
    places: tuple[str, ...] = ()  # below UEFL_DATA and the cache folder, in order
    system: tuple[str, ...] = ()
    mean: tuple[float, ...] = (0.5,)  # per channel, of pixels in [0, 1]; a single one serves every channel
    std: tuple[float, ...] = (0.25,)


def _pacs(path: Path, reading: Reading) -> Images:
    return tree("pacs", path, reading, owners="domain")


def _folder(path: Path, reading: Reading) -> Images:
    return (manifest if path.suffix.lower() == ".csv" else tree)("folder", path, reading)


SOURCES: dict[str, Source] = {
    "mnist5k": Source("5000 MNIST digits that ship with a dependency; no download", None),
    "mnist": Source("MNIST: 70 000 digits, 28×28 grey", mnist, ("mnist", "MNIST/raw"), (), (0.1307,), (0.3081,)),
    "fmnist": Source(
        "Fashion-MNIST: 70 000 clothes, 28×28 grey",
        fmnist,
        ("fmnist", "fashion-mnist", "FashionMNIST/raw"),
        ("/usr/share/datasets/fashion-mnist",),  # Debian's dataset-fashion-mnist
        (0.2860,),
        (0.3530,),
    ),
    "emnist-letters": Source(
        "EMNIST letters: 145 600 letters, 28×28 grey",
        emnist_letters,
        ("emnist-letters", "emnist", "EMNIST/raw", "gzip.zip"),
        (),
        (0.1722,),
        (0.3309,),
    ),
    "cifar10": Source(
        "CIFAR10: 60 000 things of 10 classes, 32×32 colour",
        cifar10,
        ("cifar10", "cifar-10-python.tar.gz", "cifar-10-batches-py", "cifar10.zip"),
        (),
        (0.4914, 0.4822, 0.4465),
        (0.2470, 0.2435, 0.2616),
    ),
    "cifar100": Source(
        "CIFAR100: 60 000 things of 100 classes, 32×32 colour",
        cifar100,
        ("cifar100", "cifar-100-python.tar.gz", "cifar-100-python", "cifar100.zip"),
        (),
        (0.5071, 0.4865, 0.4409),
        (0.2673, 0.2564, 0.2762),
    ),
    "gtsrb": Source(
        "GTSRB: 51 839 traffic signs of 43 classes, 32×32 colour",
        gtsrb,
        ("gtsrb", "GTSRB", "gtsrb.zip"),
        (),
        (0.3403, 0.3121, 0.3214),
        (0.2724, 0.2608, 0.2669),
    ),
    "pacs": Source(
        "PACS: 9991 things of 7 classes in 4 domains, colour",
        _pacs,
        ("pacs", "PACS", "PACS.zip", "pacs.zip"),
        (),
        *IMAGENET,
    ),
    "folder": Source("your own images: a folder, a zip archive or a CSV list; mean 0.5, deviation 0.25", _folder),
}


def read(
    name: str,
    path: str = "",
    *,
    skip_bad: bool = False,
    strict: bool = False,
    size: int | None = None,
    progress: bool = True,
) -> Images:
    """The images of a source, decoded once and then mapped from the cache; `strict` turns warnings into an error."""
    if not has(SOURCES, "uefl.readers", name):
        raise unknown("data set", name, SOURCES)
    if size is not None and size < 1:
        raise InputError(f"size={size} must be at least 1")
    try:
        images = _read(name, SOURCES[name], path, Reading(size, skip_bad, progress))
    except InputError as e:
        raise InputError(printable(str(e))) from e
    if strict and images.warnings:
        raise InputError(f"{path or name}: {images.warnings[0]} (strict)")
    return images


def _read(name: str, source: Source, path: str, reading: Reading) -> Images:
    if source.importer is None:
        return _sized(mnist5k(), reading.size)
    at = _located(name, source, path, reading.progress)
    images = _cached(name, source.importer, at, reading)
    return replace(images, mean=_each(source.mean, images), std=_each(source.std, images))


def _located(name: str, source: Source, path: str, progress: bool) -> Path:
    """The path the user gave, else the first known place, else a download."""
    if path:
        return Path(os.path.expanduser(path))
    if not source.places:
        raise InputError(f"{name} needs a path: your own folder, zip archive or CSV list")
    at = found(source.places, source.system)
    if at:
        return at
    home = cache_folder()
    if name not in ADDRESSES:
        raise InputError(f"{name} has no address to download from; put {source.places[-1]} into {home}")
    return fetch(name, ADDRESSES[name], home / name, progress=progress)


def _cached(name: str, importer: Importer, at: Path, reading: Reading) -> Images:
    listed = stamps(at) if at.suffix.lower() == ".csv" else ()
    key = cache.content_hash(at, name, reading.size, reading.skip_bad, *listed)
    file = cache_folder() / "decoded" / f"{name}-{key}.safetensors"
    images = cache.load(file)
    if images is None:
        images = checked(_sized(importer(at, reading), reading.size), reading)
        # A full or read-only disk costs the next reader time, and nobody the images.
        with suppress(OSError, SafetensorError):
            cache.store(images, file)
    return images


def _sized(images: Images, size: int | None) -> Images:
    """Stretch images that a reader left in their own size, bilinear with antialiasing."""
    if size is None or images.x.shape[-2:] == (size, size):
        return images
    resized = [F.interpolate(x, (size, size), mode="bilinear", antialias=True) for x in torch.split(images.x, 4096)]
    return replace(images, x=torch.cat(resized))


def _each(constants: tuple[float, ...], images: Images) -> tuple[float, ...]:
    channels = images.x.shape[1]
    return constants if len(constants) == channels else constants[:1] * channels
