"""CIFAR10 and CIFAR100: the official python archives, packed or not, or a tree train/<class>/, test/<class>/."""

from __future__ import annotations

import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from uefl.data.files import LARGEST, opened
from uefl.data.images import Images
from uefl.data.reading import Reading
from uefl.data.tree import from_files
from uefl.data.unpickle import unpickled
from uefl.errors import InputError

TEN = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"], "meta": ["batches.meta"]}
HUNDRED = {"train": ["train"], "test": ["test"], "meta": ["meta"]}


def cifar10(path: Path, reading: Reading) -> Images:
    """Ten things, 32×32 in colour."""
    return _read("cifar10", path, reading, TEN, ("labels", "label_names"))


def cifar100(path: Path, reading: Reading) -> Images:
    """A hundred things, 32×32 in colour; the fine labels."""
    return _read("cifar100", path, reading, HUNDRED, ("fine_labels", "fine_label_names"))


def _read(name: str, path: Path, reading: Reading, batches: Mapping[str, list[str]], keys: tuple[str, str]) -> Images:
    wanted = [batch for group in batches.values() for batch in group]
    if path.is_file() and not path.name.lower().endswith(".zip"):
        return _official(name, str(path), _untarred(path, wanted), (batches, keys), reading)
    files = opened(path, reading)
    packed = [n for n in files.names if n.endswith(("-python.tar.gz", "-python.tar"))]
    if packed and path.is_dir():
        return _official(name, str(path / packed[0]), _untarred(path / packed[0], wanted), (batches, keys), reading)
    found = {PurePosixPath(n).name: n for n in files.names if PurePosixPath(n).name in wanted}
    if found:
        return _official(name, files.where, {k: files.read(n) for k, n in found.items()}, (batches, keys), reading)
    return from_files(name, files, reading, owners="")


def _untarred(path: Path, wanted: Sequence[str]) -> dict[str, bytes]:
    """The wanted members by their last name, in memory: nothing is unpacked to disk, so no path in it can harm."""
    found = {}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                name = PurePosixPath(member.name).name
                file = archive.extractfile(member) if member.isfile() and name in wanted else None
                if file is not None and member.size <= LARGEST:
                    found[name] = file.read()
    except Exception as e:  # tar, gzip, bz2, lzma and header errors share no ancestor
        raise InputError(f"{path}: not a tar archive, or a truncated one ({e})") from e
    return found


def _official(
    name: str,
    where: str,
    members: Mapping[str, bytes],
    layout: tuple[Mapping[str, list[str]], tuple[str, str]],
    reading: Reading,
) -> Images:
    batches, (labels, names) = layout
    missing = [batch for group in batches.values() for batch in group if batch not in members]
    if missing:
        raise InputError(f"{where}: no member '{missing[0]}'")
    classes = _names(unpickled(members[batches["meta"][0]], where).get(names), where)
    xs, ys, tests = [], [], []
    for split in ("train", "test"):
        for batch in batches[split]:
            x, y = _batch(unpickled(members[batch], f"{where}: {batch}"), f"{where}: {batch}", labels)
            good = (y >= 0) & (y < len(classes))
            for i in np.flatnonzero(~good):
                reading.bad(f"{where}: {batch}: label {y[i]} of image {i} is outside the {len(classes)} classes")
            xs.append(x[good])
            ys.append(y[good])
            tests.append(np.full(int(good.sum()), split == "test"))
    stacked = [torch.from_numpy(np.concatenate(part)) for part in (xs, ys, tests)]
    return Images(name, stacked[0], stacked[1], classes, stacked[2])


def _names(found: Any, where: str) -> tuple[str, ...]:
    if not (isinstance(found, list) and found and all(isinstance(n, bytes | str) for n in found)):
        raise InputError(f"{where}: the meta file names no classes")
    return tuple(n.decode("latin-1") if isinstance(n, bytes) else n for n in found)


def _batch(found: Mapping[str, Any], where: str, labels: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    x, y = found.get("data"), found.get(labels)
    if not isinstance(x, np.ndarray) or x.ndim != 2 or x.shape[1] != 3 * 32 * 32:
        raise InputError(f"{where}: 'data' is no array of rows of 3072 bytes")
    if not isinstance(y, list) or len(y) != len(x) or not all(type(v) is int and abs(v) < 1 << 31 for v in y):
        raise InputError(f"{where}: '{labels}' is no list of {len(x)} integers")
    return x.reshape(-1, 3, 32, 32), np.array(y, dtype=np.int64)
