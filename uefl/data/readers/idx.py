"""Read IDX files, gzipped or not: MNIST, Fashion-MNIST and EMNIST."""

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

from uefl.core.errors import InputError
from uefl.core.fetch import RemoteFile
from uefl.data.images import Images
from uefl.data.readers.archives import MAX_FILE_BYTES, Files, open_files
from uefl.data.readers.context import ReadContext
from uefl.data.sources import PAPER_SIZES, Source

FMNIST_CLASSES = [
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
]
EMNIST_LETTERS_CLASSES = [chr(c) for c in range(ord("a"), ord("z") + 1)]


def read_mnist(path: Path, context: ReadContext) -> Images:
    """Read the ten digits."""
    return _read_idx("mnist", open_files(path, context), tuple("0123456789"), context)


def read_fmnist(path: Path, context: ReadContext) -> Images:
    """Read ten kinds of clothes, in the official order of classes."""
    return _read_idx("fmnist", open_files(path, context), tuple(FMNIST_CLASSES), context)


def read_emnist_letters(path: Path, context: ReadContext) -> Images:
    """Read letters, upper and lower case as one class; labels start at 1, and the stored images are transposed."""
    files = open_files(path, context)
    archives = [name for name in files.names if name.endswith("gzip.zip")]  # the official archive in its folder
    if archives:
        files = open_files(path / archives[0], context)
    images = _read_idx(
        "emnist-letters", files, tuple(EMNIST_LETTERS_CLASSES), context, prefix="emnist-letters-", first_label=1
    )
    return replace(images, x=images.x.transpose(-1, -2).contiguous())


def _read_idx(
    name: str, files: Files, classes: tuple[str, ...], context: ReadContext, *, prefix: str = "", first_label: int = 0
) -> Images:
    (x_train, y_train), (x_test, y_test) = (
        _read_split(files, prefix + split, len(classes), first_label, context) for split in ("train", "t10k|test")
    )
    if x_train.shape[1:] != x_test.shape[1:]:
        raise InputError(f"{files.display_path}: training and test images differ in size")
    is_test = torch.arange(len(y_train) + len(y_test)) >= len(y_train)
    return Images(name, torch.cat([x_train, x_test]), torch.cat([y_train, y_test]), classes, is_test)


def _read_split(
    files: Files, split: str, num_classes: int, first_label: int, context: ReadContext
) -> tuple[Tensor, Tensor]:
    """Return images [n, 1, h, w] and labels that start at 0, without images whose label is not one of the classes."""
    labels_name = _find_file(files, split, "labels", 1)
    x = _read_array(files, _find_file(files, split, "images", 3), 3)
    y = _read_array(files, labels_name, 1).astype(np.int64) - first_label
    display_path = f"{files.display_path}: {labels_name}"
    if len(x) != len(y):
        raise InputError(f"{display_path}: {len(y)} labels for {len(x)} images")
    is_valid = (y >= 0) & (y < num_classes)
    for i in np.flatnonzero(~is_valid):
        allowed = f"{first_label} to {first_label + num_classes - 1}"
        context.skip_or_raise(f"{display_path}: label {y[i] + first_label} of image {i} must be {allowed}")
    if not is_valid.any():
        raise InputError(f"{display_path}: no image with a valid label")
    return torch.from_numpy(x[is_valid][:, None]), torch.from_numpy(y[is_valid])


def _find_file(files: Files, split: str, kind: str, rank: int) -> str:
    """Return the name of a file; the names of Debian, NIST and torchvision differ in a dot and in compression."""
    prefix, _, last = split.rpartition("-")
    pattern = re.compile(rf"(^|/){prefix}{'-' if prefix else ''}({last})-{kind}[-.]idx{rank}-ubyte(\.gz)?$")
    matches = [name for name in files.names if pattern.search(name)]
    if not matches:
        raise InputError(f"{files.display_path}: no file {split.split('|')[0]}-{kind}-idx{rank}-ubyte[.gz]")
    return min(matches, key=lambda name: (name.count("/"), name))


def _read_array(files: Files, name: str, rank: int) -> NDArray[np.uint8]:
    data = files.read(name)
    display_path = f"{files.display_path}: {name}"
    stream: io.IOBase = gzip.GzipFile(fileobj=io.BytesIO(data)) if data[:2] == b"\x1f\x8b" else io.BytesIO(data)
    try:
        header = stream.read(4 + 4 * rank)
        if header[:4] != bytes((0, 0, 8, rank)):
            raise InputError(f"{display_path}: not an IDX file, its magic number is {header[:4].hex() or 'missing'}")
        shape = struct.unpack(f">{rank}I", header[4:])
        num_bytes = math.prod(shape)
        if num_bytes > MAX_FILE_BYTES:
            raise InputError(f"{display_path}: the header declares {num_bytes} bytes, more than {MAX_FILE_BYTES}")
        body = stream.read(num_bytes + 1)  # one more byte, because gzip compares its checksum only at the end
    except (OSError, EOFError, zlib.error, struct.error) as e:
        raise InputError(f"{display_path}: truncated or damaged ({e})") from e
    if len(body) != num_bytes:
        raise InputError(
            f"{display_path}: {'truncated' if len(body) < num_bytes else 'longer than its header declares'}"
        )
    return np.frombuffer(body, np.uint8).reshape(shape)


# PyTorch's copy: the authors' page no longer serves the files. MD5 sums of publishers and torchvision.
_MNIST_URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_FMNIST_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"

MNIST = Source(
    reader=read_mnist,
    relative_paths=("mnist", "MNIST/raw"),
    remote_files=(
        RemoteFile(_MNIST_URL + "train-images-idx3-ubyte.gz", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
        RemoteFile(_MNIST_URL + "train-labels-idx1-ubyte.gz", "d53e105ee54ea40749a09fcbcd1e9432"),
        RemoteFile(_MNIST_URL + "t10k-images-idx3-ubyte.gz", "9fb629c4189551a2d022fa330f9573f3"),
        RemoteFile(_MNIST_URL + "t10k-labels-idx1-ubyte.gz", "ec29112dd5afa0611ce80d1b7f02629c"),
    ),
    mean=(0.1307,),
    std=(0.3081,),
    default_settings=PAPER_SIZES,
)
FMNIST = Source(
    reader=read_fmnist,
    relative_paths=("fmnist", "fashion-mnist", "FashionMNIST/raw"),
    system_paths=("/usr/share/datasets/fashion-mnist",),  # Debian's dataset-fashion-mnist
    remote_files=(
        RemoteFile(_FMNIST_URL + "train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
        RemoteFile(_FMNIST_URL + "train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe"),
        RemoteFile(_FMNIST_URL + "t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79"),
        RemoteFile(_FMNIST_URL + "t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310"),
    ),
    mean=(0.2860,),
    std=(0.3530,),
    default_settings=PAPER_SIZES,
)
EMNIST_LETTERS = Source(
    reader=read_emnist_letters,
    relative_paths=("emnist-letters", "emnist", "EMNIST/raw", "gzip.zip"),
    remote_files=(
        RemoteFile("https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip", "58c8d27c78d21e728a6bc7b3cc06412e"),
    ),
    mean=(0.1722,),
    std=(0.3309,),
    default_settings={**PAPER_SIZES, "num_classes": 10},  # FedCR uses the letters a to j
)
