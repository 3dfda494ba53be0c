"""From a list of labelled files to images: every file decoded, all of one shape."""

from __future__ import annotations

import math
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from uefl.data.files import Files
from uefl.data.images import Images
from uefl.data.pixels import CONVERTED, Pixels, decoded
from uefl.data.reading import Reading
from uefl.errors import InputError

PROBES = 101  # images looked at to learn the shape that most have
CHUNK = 64
# Pillow releases the GIL while it decodes, but around an image of 2 kB the threads fight for it more than they gain:
# 22 500 WebP images of 32×32 take 2.2 s in one thread and 3.0 s in two. Two free cores need 0.19 s for what one does in
# 0.22 s at 12 kB a file (JPEG), 0.20 for 0.36 at 58 kB (JPEG, resized) and 0.26 for 0.47 at 109 kB (PNG).
WORTH_THREADS = 20_000  # bytes of a file


class Entry(NamedTuple):
    """What a source says of one file."""

    file: str
    label: str
    test: bool = False
    owner: str = ""  # silo or domain


def imported(name: str, files: Files, entries: Sequence[Entry], reading: Reading, *, owners: str = "") -> Images:
    """Decode the entries; `owners` says what an entry's owner is: a "silo", a "domain" or nothing."""
    if not entries:
        raise InputError(f"{files.where}: no image found")
    x, kept = _stacked(files, entries, reading)
    rows = [entries[i] for i in kept]
    classes, y = indexed([row.label for row in rows])
    images = Images(name, x, y, classes, torch.tensor([row.test for row in rows]))
    if not owners:
        return images
    names, index = indexed([row.owner for row in rows])
    if owners == "domain":
        return replace(images, domain=index, domains=names)
    return replace(images, silo=index, silos=names)


def indexed(names: Sequence[str]) -> tuple[tuple[str, ...], Tensor]:
    """The different names, numbers in their order and words in the alphabet's, and where each name stands."""
    known = sorted(set(names), key=_natural)
    at = {name: i for i, name in enumerate(known)}
    return tuple(known), torch.tensor([at[name] for name in names], dtype=torch.int64)


def _natural(name: str) -> tuple[bool, int, str, str]:
    """Numbers by value, without making them one: int() refuses a name of 5000 digits."""
    if not (name.isascii() and name.isdecimal()):
        return True, 0, name, name
    digits = name.lstrip("0")
    return False, len(digits), digits, name


def _stacked(files: Files, entries: Sequence[Entry], reading: Reading) -> tuple[Tensor, list[int]]:
    """The decoded images [n, c, h, w], and which entries they are."""
    with warnings.catch_warnings():  # out here: filters are the whole process's, and the threads must not juggle them
        warnings.simplefilter("ignore")  # what Pillow mutters about odd metadata does not touch the pixels
        shape = _usual_shape(files, entries, reading)
        x = _room(files, (len(entries), *shape))
        kept: list[int] = []
        results = reading.watched(_each(files, entries, reading), f"decoding {files.where}", len(entries))
        for i, result in enumerate(results):
            if isinstance(result, InputError):
                reading.bad(str(result))
            elif result[0].shape != shape:
                reading.bad(f"{files.where}: {entries[i].file}: {_disagrees(result[0].shape, shape, reading)}")
            else:
                x[len(kept)] = result[0]
                kept.append(i)
                if result[1]:
                    reading.counts[CONVERTED[result[1]]] += 1
    if not kept:
        raise InputError(f"{files.where}: none of the {len(entries)} images is good; the first: {reading.skipped[0]}")
    return torch.from_numpy(x[: len(kept)]), kept


def _room(files: Files, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    try:
        return np.empty(shape, np.uint8)
    except MemoryError as e:
        need = f"{math.prod(shape) / 1e9:.0f} GB"
        raise InputError(f"{files.where}: {shape[0]} images need {need} of memory; give a size to resize all") from e


Result = tuple[Pixels, str] | InputError


def _one(files: Files, entry: Entry, size: int | None) -> Result:
    try:
        data = files.read(entry.file)  # names the file itself
    except InputError as e:
        return e
    try:
        return decoded(data, size)
    except InputError as e:
        return InputError(f"{files.where}: {entry.file}: {e}")


def _each(files: Files, entries: Sequence[Entry], reading: Reading) -> Iterator[Result]:
    """The results in the order of the entries, from several threads where that is quicker."""
    probed = entries[:: max(1, len(entries) // PROBES)]
    if np.mean([files.size(entry.file) for entry in probed]) < WORTH_THREADS:
        yield from (_one(files, entry, reading.size) for entry in entries)
        return
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for start in range(0, len(entries), CHUNK):  # in chunks, so that an error need not wait for all the others
            yield from pool.map(lambda entry: _one(files, entry, reading.size), entries[start : start + CHUNK])


def _usual_shape(files: Files, entries: Sequence[Entry], reading: Reading) -> tuple[int, ...]:
    """The shape most of the probed images have, so that one odd image does not make all others look odd."""
    shapes: Counter[tuple[int, ...]] = Counter()
    for entry in entries[:: max(1, len(entries) // PROBES)]:
        result = _one(files, entry, reading.size)
        if not isinstance(result, InputError):
            shapes[result[0].shape] += 1
        elif not reading.skip_bad:
            raise result
    if not shapes:
        raise InputError(f"{files.where}: none of the {len(entries)} images decodes; the first: {entries[0].file}")
    return min(shapes, key=lambda s: (-shapes[s], s))


def _disagrees(shape: tuple[int, ...], usual: tuple[int, ...], reading: Reading) -> str:
    hint = "" if reading.size else "; give a size to resize all"
    if shape[0] != usual[0]:
        return f"{shape[0]} channels where most images have {usual[0]}"
    return f"{shape[2]}×{shape[1]} pixels where most images have {usual[2]}×{usual[1]}{hint}"
