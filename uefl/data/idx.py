"""IDX files, gzipped or not: MNIST and those made after it."""

from __future__ import annotations

import gzip
import io
import math
import re
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from uefl.data.files import LARGEST, Files, opened
from uefl.data.images import Images
from uefl.data.reading import Reading
from uefl.errors import InputError

CLOTHES = ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]
LETTERS = [chr(c) for c in range(ord("a"), ord("z") + 1)]


def mnist(path: Path, reading: Reading) -> Images:
    """The ten digits."""
    return _read("mnist", opened(path, reading), tuple("0123456789"), reading)


def fmnist(path: Path, reading: Reading) -> Images:
    """Ten kinds of clothes, in the official order."""
    return _read("fmnist", opened(path, reading), tuple(CLOTHES), reading)


def emnist_letters(path: Path, reading: Reading) -> Images:
    """Letters, upper and lower case as one class: labels count from 1, and images lie on their diagonal."""
    files = opened(path, reading)
    outer = [n for n in files.names if n.endswith("gzip.zip")]  # the official archive in its folder
    if outer:
        files = opened(path / outer[0], reading)
    images = _read("emnist-letters", files, tuple(LETTERS), reading, prefix="emnist-letters-", first=1)
    return replace(images, x=images.x.transpose(-1, -2).contiguous())


def _read(
    name: str, files: Files, classes: tuple[str, ...], reading: Reading, *, prefix: str = "", first: int = 0
) -> Images:
    parts = [_split(files, prefix + split, len(classes), first, reading) for split in ("train", "t10k|test")]
    if parts[0][0].shape[1:] != parts[1][0].shape[1:]:
        raise InputError(f"{files.where}: training and test images differ in size")
    test = torch.cat([torch.full((len(y),), split == 1) for split, (_, y) in enumerate(parts)])
    return Images(name, torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]), classes, test)


def _split(files: Files, split: str, classes: int, first: int, reading: Reading) -> tuple[Tensor, Tensor]:
    """Images [n, 1, h, w] and labels from 0, less those whose label is none of the classes."""
    name = _found(files, split, "labels", 1)
    x = _array(files, _found(files, split, "images", 3), 3)
    y = _array(files, name, 1).astype(np.int64) - first
    if len(x) != len(y):
        raise InputError(f"{files.where}: {name}: {len(y)} labels for {len(x)} images")
    good = (y >= 0) & (y < classes)
    for i in np.flatnonzero(~good):
        allowed = f"{first} to {first + classes - 1}"
        reading.bad(f"{files.where}: {name}: label {y[i] + first} of image {i} is outside the classes {allowed}")
    if not good.any():
        raise InputError(f"{files.where}: {name}: no image")
    return torch.from_numpy(x[good][:, None]), torch.from_numpy(y[good])


def _found(files: Files, split: str, kind: str, rank: int) -> str:
    """The file's name; Debian, NIST and torchvision agree but for a dot and the compression."""
    prefix, _, last = split.rpartition("-")
    wanted = re.compile(rf"(^|/){prefix}{'-' if prefix else ''}({last})-{kind}[-.]idx{rank}-ubyte(\.gz)?$")
    found = [n for n in files.names if wanted.search(n)]
    if not found:
        raise InputError(f"{files.where}: no file {split.split('|')[0]}-{kind}-idx{rank}-ubyte[.gz]")
    return min(found, key=lambda n: (n.count("/"), n))


def _array(files: Files, name: str, rank: int) -> NDArray[np.uint8]:
    data = files.read(name)
    where = f"{files.where}: {name}"
    stream: io.IOBase = gzip.GzipFile(fileobj=io.BytesIO(data)) if data[:2] == b"\x1f\x8b" else io.BytesIO(data)
    try:
        head = stream.read(4 + 4 * rank)
        if head[:4] != bytes((0, 0, 8, rank)):
            raise InputError(f"{where}: wrong magic number {head[:4].hex() or 'of an empty file'}, not an IDX file")
        shape = struct.unpack(f">{rank}I", head[4:])
        count = math.prod(shape)
        if count > LARGEST:
            raise InputError(f"{where}: claims {count} bytes, too large")
        body = stream.read(count + 1)  # one more: the end must be there, and only there is gzip's checksum compared
    except (OSError, EOFError, zlib.error, struct.error) as e:
        raise InputError(f"{where}: truncated or damaged ({e})") from e
    if len(body) != count:
        raise InputError(f"{where}: {'truncated' if len(body) < count else 'longer than it claims'}")
    return np.frombuffer(body, np.uint8).reshape(shape)
