"""Read CIFAR10 and CIFAR100: the official Python archives, packed or not, or folders train/<class>/, test/<class>/."""

from __future__ import annotations

import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from uefl.core.errors import InputError
from uefl.core.fetch import RemoteFile
from uefl.data.images import Images
from uefl.data.readers.archives import MAX_FILE_BYTES, open_files
from uefl.data.readers.context import ReadContext
from uefl.data.readers.image_folder import read_image_files
from uefl.data.readers.safe_pickle import unpickle_dict
from uefl.data.sources import PAPER_SIZES, Source


class BatchLayout(NamedTuple):
    """The members of an official archive, and the keys inside them."""

    train: tuple[str, ...]
    test: tuple[str, ...]
    meta: str
    labels_key: str
    class_names_key: str

    @property
    def member_names(self) -> tuple[str, ...]:
        return (*self.train, *self.test, self.meta)


CIFAR10_LAYOUT = BatchLayout(
    tuple(f"data_batch_{i}" for i in range(1, 6)), ("test_batch",), "batches.meta", "labels", "label_names"
)
CIFAR100_LAYOUT = BatchLayout(("train",), ("test",), "meta", "fine_labels", "fine_label_names")


def read_cifar10(path: Path, context: ReadContext) -> Images:
    """Read ten classes of objects, 32×32 in color."""
    return _read_cifar("cifar10", path, context, CIFAR10_LAYOUT)


def read_cifar100(path: Path, context: ReadContext) -> Images:
    """Read a hundred classes of objects, 32×32 in color, with the fine labels."""
    return _read_cifar("cifar100", path, context, CIFAR100_LAYOUT)


def _read_cifar(name: str, path: Path, context: ReadContext, layout: BatchLayout) -> Images:
    if path.is_file() and not path.name.lower().endswith(".zip"):
        return _read_batches(name, str(path), _read_tar_members(path, layout.member_names), layout, context)
    files = open_files(path, context)
    tar_names = [file for file in files.names if file.endswith(("-python.tar.gz", "-python.tar"))]
    if tar_names and path.is_dir():
        tar_path = path / tar_names[0]
        return _read_batches(name, str(tar_path), _read_tar_members(tar_path, layout.member_names), layout, context)
    batch_files = {PurePosixPath(file).name: file for file in files.names}
    members = {member: files.read(batch_files[member]) for member in layout.member_names if member in batch_files}
    if members:
        return _read_batches(name, files.display_path, members, layout, context)
    return read_image_files(name, files, context, owner_kind="")


def _read_tar_members(path: Path, member_names: Sequence[str]) -> dict[str, bytes]:
    """Return members by their base name, in memory: nothing is unpacked to disk, so no path inside can do harm."""
    members = {}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                name = PurePosixPath(member.name).name
                file = archive.extractfile(member) if member.isfile() and name in member_names else None
                if file is not None and member.size <= MAX_FILE_BYTES:
                    members[name] = file.read()
    except Exception as e:  # tar, gzip, bz2, lzma and header errors have no common base class
        raise InputError(f"{path}: not a tar archive, or truncated ({e})") from e
    return members


def _read_batches(
    name: str, display_path: str, members: Mapping[str, bytes], layout: BatchLayout, context: ReadContext
) -> Images:
    missing = [member for member in layout.member_names if member not in members]
    if missing:
        raise InputError(f"{display_path}: no member '{missing[0]}'")
    meta = unpickle_dict(members[layout.meta], display_path)
    classes = _parse_class_names(meta.get(layout.class_names_key), display_path)
    xs, ys, tests = [], [], []
    for batch in (*layout.train, *layout.test):
        batch_path = f"{display_path}: {batch}"
        x, y = _parse_batch(unpickle_dict(members[batch], batch_path), batch_path, layout.labels_key)
        is_valid = (y >= 0) & (y < len(classes))
        for i in np.flatnonzero(~is_valid):
            context.skip_or_raise(f"{batch_path}: label {y[i]} of image {i} must be 0 to {len(classes) - 1}")
        xs.append(x[is_valid])
        ys.append(y[is_valid])
        tests.append(np.full(int(is_valid.sum()), batch in layout.test))
    x_all, y_all, is_test = (torch.from_numpy(np.concatenate(arrays)) for arrays in (xs, ys, tests))
    return Images(name, x_all, y_all, classes, is_test)


def _parse_class_names(raw_names: Any, display_path: str) -> tuple[str, ...]:
    if not (isinstance(raw_names, list) and raw_names and all(isinstance(n, bytes | str) for n in raw_names)):
        raise InputError(f"{display_path}: the meta file contains no class names")
    return tuple(n.decode("latin-1") if isinstance(n, bytes) else n for n in raw_names)


def _parse_batch(
    raw_batch: Mapping[str, Any], display_path: str, labels_key: str
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    x, y = raw_batch.get("data"), raw_batch.get(labels_key)
    if not isinstance(x, np.ndarray) or x.ndim != 2 or x.shape[1] != 3 * 32 * 32:
        raise InputError(f"{display_path}: 'data' must be an array with rows of 3072 bytes")
    if not isinstance(y, list) or len(y) != len(x) or not all(type(v) is int and abs(v) < 1 << 31 for v in y):
        raise InputError(f"{display_path}: '{labels_key}' must be a list of {len(x)} integers")
    return x.reshape(-1, 3, 32, 32), np.array(y, dtype=np.int64)


_BASE_URL = "https://www.cs.toronto.edu/~kriz/"

CIFAR10 = Source(
    reader=read_cifar10,
    relative_paths=("cifar10", "cifar-10-python.tar.gz", "cifar-10-batches-py", "cifar10.zip"),
    remote_files=(RemoteFile(_BASE_URL + "cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a"),),
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
    default_settings=PAPER_SIZES,
)
CIFAR100 = Source(
    reader=read_cifar100,
    relative_paths=("cifar100", "cifar-100-python.tar.gz", "cifar-100-python", "cifar100.zip"),
    remote_files=(RemoteFile(_BASE_URL + "cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85"),),
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
    default_settings={**PAPER_SIZES, "train_per_silo": 4000},
)
