"""Decode a list of labeled files into images of one shape."""

from __future__ import annotations

import math
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from uefl.core.errors import InputError
from uefl.core.memory import check_memory
from uefl.data.images import Images
from uefl.data.readers.archives import Files
from uefl.data.readers.context import ReadContext
from uefl.data.readers.decode import CONVERSION_NOTES, Pixels, decode_image

NUM_PROBES = 101  # images that are decoded to find the most common shape
FILES_PER_CHUNK = 64
# Pillow releases the GIL while it decodes, but for images of 2 kB waiting for the GIL costs more than threads gain:
# 22 500 WebP images of 32×32 take 2.2 s in one thread and 3.0 s in two. With files of 12 kB (JPEG), two free cores need
# 0.19 s where one needs 0.22 s; with 58 kB (JPEG, resized) 0.20 s and 0.36 s; with 109 kB (PNG) 0.26 s and 0.47 s.
MIN_BYTES_FOR_THREADS = 20_000  # average bytes per file


class LabeledFile(NamedTuple):
    """A file with its label, split and owner."""

    path: str
    label: str
    is_test: bool = False
    owner: str = ""  # silo or domain
    group: str = ""  # what stays together, such as a patient


def decode_files(
    name: str, files: Files, labeled_files: Sequence[LabeledFile], context: ReadContext, *, owner_kind: str = ""
) -> Images:
    """Decode the files; `owner_kind` is what the owner of a file is: "silo", "domain" or "" for none."""
    if not labeled_files:
        raise InputError(f"{files.display_path}: no images found")
    x, decoded = _decode_all(files, labeled_files, context)
    classes, y = index_names([file.label for file in decoded])
    images = Images(name, x, y, classes, torch.tensor([file.is_test for file in decoded]))
    if any(file.group for file in decoded):
        images = replace(images, group_ids=index_names([file.group for file in decoded])[1])
    if not owner_kind:
        return images
    names, owner_ids = index_names([file.owner for file in decoded])
    if owner_kind == "domain":
        return replace(images, domain_ids=owner_ids, domains=names)
    return replace(images, silo_ids=owner_ids, silos=names)


def index_names(names: Sequence[str]) -> tuple[tuple[str, ...], Tensor]:
    """Return the distinct names, numbers by value and then text in alphabetical order, and the index of each name."""
    distinct = sorted(set(names), key=_natural_sort_key)
    positions = {name: i for i, name in enumerate(distinct)}
    return tuple(distinct), torch.tensor([positions[name] for name in names], dtype=torch.int64)


def index_known_classes(path: Path, names: Sequence[str], classes: Sequence[str]) -> Tensor:
    """Return the position of each name among known classes, or an error that names an unknown one."""
    if unknown := [name for name in names if name not in classes]:
        raise InputError(f"{path}: class '{unknown[0]}' is not a class of the model: {', '.join(classes)}")
    return torch.tensor([classes.index(name) for name in names], dtype=torch.int64)


def _natural_sort_key(name: str) -> tuple[bool, int, str, str]:
    """Sort numbers by value without converting them: int() rejects a name of 5000 digits."""
    if not (name.isascii() and name.isdecimal()):
        return True, 0, name, name
    digits = name.lstrip("0")
    return False, len(digits), digits, name


def _decode_all(
    files: Files, labeled_files: Sequence[LabeledFile], context: ReadContext
) -> tuple[Tensor, list[LabeledFile]]:
    """Return the decoded images [n, c, h, w] and their files."""
    with warnings.catch_warnings():  # outside of the threads, because warning filters apply to the whole process
        warnings.simplefilter("ignore")  # Pillow's warnings about metadata do not concern the pixels
        shape = _find_common_shape(files, labeled_files, context)
        x = _allocate_pixels(files, (len(labeled_files), *shape))
        decoded: list[LabeledFile] = []
        results = context.track_progress(
            _decode_in_order(files, labeled_files, context), f"decoding {files.display_path}", len(labeled_files)
        )
        for file, result in zip(labeled_files, results, strict=True):
            if isinstance(result, InputError):
                context.skip_or_raise(_describe_bad_file(result, context))
                continue
            pixels, conversion = result
            if pixels.shape != shape:
                reason = _describe_mismatch(pixels.shape, shape, context)
                context.skip_or_raise(f"{files.display_path}: {file.path}: {reason}")
                continue
            x[len(decoded)] = pixels
            decoded.append(file)
            if conversion:
                context.note_counts[CONVERSION_NOTES[conversion]] += 1
    if not decoded:
        raise InputError(
            f"{files.display_path}: none of the {len(labeled_files)} images is usable; the first: "
            f"{context.skipped_messages[0]}"
        )
    return torch.from_numpy(x[: len(decoded)]), decoded


def _allocate_pixels(files: Files, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    purpose = f"{files.display_path}: {shape[0]} images of {shape[2]}×{shape[3]} pixels"
    check_memory(math.prod(shape), purpose, "set a smaller image_size")
    return np.empty(shape, np.uint8)


DecodeResult = tuple[Pixels, str] | InputError


def _decode_file(files: Files, labeled_file: LabeledFile, image_size: int | None) -> DecodeResult:
    try:
        data = files.read(labeled_file.path)  # its error names the file
    except InputError as e:
        return e
    try:
        return decode_image(data, image_size)
    except InputError as e:
        return InputError(f"{files.display_path}: {labeled_file.path}: {e}")


def _decode_in_order(
    files: Files, labeled_files: Sequence[LabeledFile], context: ReadContext
) -> Iterator[DecodeResult]:
    """Yield results in the order of the files, from several threads where that is faster."""
    if np.mean([files.size(file.path) for file in _select_probes(labeled_files)]) < MIN_BYTES_FOR_THREADS:
        yield from (_decode_file(files, file, context.image_size) for file in labeled_files)
        return
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        # In chunks, so that an error does not wait for all other files.
        for start in range(0, len(labeled_files), FILES_PER_CHUNK):
            chunk = labeled_files[start : start + FILES_PER_CHUNK]
            yield from pool.map(lambda file: _decode_file(files, file, context.image_size), chunk)


def _select_probes(labeled_files: Sequence[LabeledFile]) -> Sequence[LabeledFile]:
    return labeled_files[:: max(1, len(labeled_files) // NUM_PROBES)]


def _find_common_shape(files: Files, labeled_files: Sequence[LabeledFile], context: ReadContext) -> tuple[int, ...]:
    """Return the most common shape of the probed images, so that a single deviating image is the one reported."""
    shapes: Counter[tuple[int, ...]] = Counter()
    for file in _select_probes(labeled_files):
        result = _decode_file(files, file, context.image_size)
        if not isinstance(result, InputError):
            shapes[result[0].shape] += 1
        elif not context.skip_bad:
            raise InputError(_describe_bad_file(result, context))
    if not shapes:
        raise InputError(
            f"{files.display_path}: none of the {len(labeled_files)} images can be decoded; the first: "
            f"{labeled_files[0].path}"
        )
    return min(shapes, key=lambda shape: (-shapes[shape], shape))


def _describe_bad_file(error: InputError, context: ReadContext) -> str:
    return str(error) if context.skip_bad else f"{error}; --skip-bad skips such files"


def _describe_mismatch(shape: tuple[int, ...], common_shape: tuple[int, ...], context: ReadContext) -> str:
    hint = "" if context.image_size else "; set image_size to resize all images"
    if shape[0] != common_shape[0]:
        return f"{shape[0]} channels, but most images have {common_shape[0]}"
    return f"{shape[2]}×{shape[1]} pixels, but most images have {common_shape[2]}×{common_shape[1]}{hint}"
