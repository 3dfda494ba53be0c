"""Labeled images as every reader returns them, and what is done to them before training."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from uefl.core.errors import InputError
from uefl.core.lazy_tensor import select_inputs
from uefl.data.table_format import TableFormat

_IMAGES_PER_BLOCK = 4096  # images resized at once, which bounds the memory of their float copies


@dataclass(frozen=True, eq=False)
class Images:
    """Labeled images of a source, or labeled rows of a table, before they are divided among silos."""

    name: str
    x: Tensor  # uint8 [n, c, h, w], or the parsed cells of a table: float64 [n, columns], NaN where missing
    y: Tensor  # int64 [n]
    classes: tuple[str, ...]
    is_test: Tensor  # bool [n]: the test split of the source
    domain_ids: Tensor | None = None  # int64 [n], an index into `domains`
    domains: tuple[str, ...] = ()
    # Fixed per data set, one per channel, of pixels in [0, 1]; never computed from silos.
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)
    silo_ids: Tensor | None = None  # int64 [n], an index into `silos`: the silo that the source names
    silos: tuple[str, ...] = ()
    num_skipped: int = 0  # bad items that were skipped
    warnings: tuple[str, ...] = ()  # one line per kind of problem; `strict` turns them into an error
    notes: tuple[str, ...] = ()  # conversions of pixels and skipped files, one line per kind
    group_ids: Tensor | None = None  # int64 [n]: images of one group, such as a patient, stay in one split of one silo
    table: TableFormat | None = None  # of a table: what turns its cells into features

    @cached_property
    def known_hashes(self) -> dict[int, bytes]:
        """Hashes of pixels by the index of an image, kept for further seeds, which draw from the same images."""
        return {}

    def hash_pixels(self, indices: Tensor) -> list[bytes]:
        """Return a hash of the pixels of each of these images; copies have equal ones."""
        missing = [i for i in indices.tolist() if i not in self.known_hashes]
        rows = self.x[torch.tensor(missing, dtype=torch.int64)].numpy()
        hashes = (hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in rows)
        self.known_hashes.update(zip(missing, hashes))
        return [self.known_hashes[i] for i in indices.tolist()]


def select_first_classes(images: Images, num_classes: int) -> Images:
    """Keep only the images of the first classes, such as the letters a to j; 0 keeps all."""
    if not num_classes:
        return images
    if num_classes > len(images.classes):
        raise InputError(
            f"num_classes={num_classes} must be at most {len(images.classes)}, the classes of {images.name}"
        )
    return replace(select_rows(images, images.y < num_classes), classes=images.classes[:num_classes])


def select_rows(images: Images, keep: Tensor) -> Images:
    """Keep only the images where the mask [n] is true."""
    if bool(keep.all()):
        return images
    rows = {name: getattr(images, name) for name in ("x", "y", "is_test", "domain_ids", "silo_ids", "group_ids")}
    indices = keep.nonzero()[:, 0]
    return replace(images, **{n: select_inputs(tensor, indices) for n, tensor in rows.items() if tensor is not None})


def resize_images(x: Tensor, image_size: int) -> Tensor:
    """Resize decoded uint8 images [n, c, h, w] to a square, bilinear with antialiasing; 0 keeps their size."""
    if not image_size or x.shape[-2:] == (image_size, image_size):
        return x
    if not len(x):  # an empty split has a shape too, and the network is built for it
        return x.new_empty((*x.shape[:-2], image_size, image_size))
    return torch.cat([_resize_block(block, image_size) for block in torch.split(x, _IMAGES_PER_BLOCK)])


def _resize_block(x: Tensor, image_size: int) -> Tensor:
    resized = F.interpolate(x.float(), (image_size, image_size), mode="bilinear", antialias=True, align_corners=False)
    return resized.round().clamp(0, 255).to(torch.uint8)


def standardize_images(x: Tensor, images: Images) -> Tensor:
    """Standardize pixels by the fixed constants of their data set (D13)."""
    return standardize_pixels(x, images.mean, images.std)


def standardize_pixels(x: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Scale pixels to [0, 1], subtract the mean of each channel and divide by its deviation."""
    return (x.float() / 255 - torch.tensor(mean).view(-1, 1, 1)) / torch.tensor(std).view(-1, 1, 1)
