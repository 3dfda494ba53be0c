"""Read a safetensors file of images: the pixels stay in the file, which is mapped, so it may be larger than memory."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from uefl.core.errors import InputError
from uefl.core.lazy_tensor import LazyTensor
from uefl.data.images import Images
from uefl.data.readers.context import ReadContext
from uefl.data.sources import Source

_MAX_SILOS = 10_000_000


def read_tensor_file(path: Path, context: ReadContext) -> Images:
    """Read x uint8 [n, c, h, w], y int64 [n] and, if the file has them, silo int64 [n] and is_test bool [n]."""
    if context.group:
        raise InputError(f"group={context.group} has no effect: {path} has no names; give each group to one silo")
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            tensors = {name: file.get_tensor(name).clone() for name in names & {"y", "silo", "is_test"}}
        x = LazyTensor.from_array(map_pixels(path))
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, struct.error) as e:
        raise InputError(f"{path}: not a safetensors file with x and y ({str(e).splitlines()[0]})") from None
    y = _check_indices(path, "y", tensors.get("y"), len(x))
    silo_ids, silos = None, tuple[str, ...]()
    if "silo" in names:
        silo_ids = _check_indices(path, "silo", tensors["silo"], len(x), _MAX_SILOS)
        used, silo_ids = torch.unique(silo_ids, return_inverse=True)
        width = len(str(int(used[-1])))
        silos = tuple(str(number).zfill(width) for number in used.tolist())  # so that names sort as numbers do
    is_test = tensors.get("is_test", torch.zeros(len(x), dtype=torch.bool))
    if is_test.dtype != torch.bool or is_test.shape != (len(x),):
        raise InputError(f"{path}: is_test is {is_test.dtype} {list(is_test.shape)}; it must be bool [{len(x)}]")
    pixels: Any = x  # read like a tensor
    return Images(
        *("tensors", pixels, y, tuple(map(str, range(int(y.max()) + 1))), is_test),
        silo_ids=silo_ids,
        silos=silos,
    )


def map_pixels(path: Path) -> Any:
    """Map the pixels of a file; safetensors states where they are in a header of JSON."""
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        entry = json.loads(file.read(size))["x"]
    shape, (start, end) = tuple(entry["shape"]), entry["data_offsets"]
    if entry["dtype"] != "U8" or len(shape) != 4 or not shape[0]:
        raise InputError(f"{path}: x is {entry['dtype']} {list(shape)}; it must be uint8 [n, c, h, w]")
    if end - start != np.prod(shape, dtype=np.int64):
        raise ValueError("the size of x does not fit its shape")
    return np.memmap(path, np.uint8, "r", 8 + size + start, shape)


def _check_indices(path: Path, name: str, ids: Tensor | None, count: int, limit: int = 100_000) -> Tensor:
    """Return class or silo numbers, or raise an error that says what they must be."""
    if ids is None:
        raise InputError(f"{path}: has no tensor {name}; it must have x uint8 [n, c, h, w] and y int64 [n]")
    if ids.dtype != torch.int64 or ids.shape != (count,):
        raise InputError(f"{path}: {name} is {ids.dtype} {list(ids.shape)}; it must be int64 [{count}]")
    if int(ids.min()) < 0 or int(ids.max()) >= limit:
        raise InputError(f"{path}: {name} has {int(ids.min())} to {int(ids.max())}; it must be 0 to {limit - 1}")
    return ids


TENSORS = Source(reader=read_tensor_file, path_kind="safetensors file", is_mapped=True)
