"""What is wrong or odd about images as a whole, once each of them is read."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import torch
from torch import Tensor

from uefl.data.images import Images
from uefl.data.reading import Reading, printable
from uefl.errors import InputError


def checked(images: Images, reading: Reading) -> Images:
    """Leave out (or refuse) what cannot be trained with, and count what is odd."""
    images = _without_unknown_classes(_without_untrained_silos(images, reading), reading)
    warnings = map(printable, [*_one_class(images), *_in_both_splits(images)])
    return replace(images, skipped=len(reading.skipped), warnings=tuple(warnings), notes=reading.notes())


def _without_untrained_silos(images: Images, reading: Reading) -> Images:
    """A silo that only tests has nothing to learn from."""
    if images.silo is None:
        return images
    counts = torch.bincount(images.silo[~images.test], minlength=len(images.silos))
    for k in (counts == 0).nonzero().flatten().tolist():
        reading.bad(f"{images.name}: silo '{images.silos[k]}' has no training image")
    names, index, keep = _compact(images.silos, images.silo, counts > 0)
    return replace(_taken(images, keep), silo=index[keep], silos=names)


def _without_unknown_classes(images: Images, reading: Reading) -> Images:
    """A class that stands only in the test split is outside the classes that can be learned."""
    if bool(images.test.all()):
        raise InputError(f"{images.name}: no training image, only test images")
    known = torch.bincount(images.y[~images.test], minlength=len(images.classes))
    seen = torch.bincount(images.y, minlength=len(images.classes))
    odd = (known == 0) & (seen > 0)
    if not odd.any():
        return images
    for c in odd.nonzero().flatten().tolist():
        reading.bad(f"{images.name}: label '{images.classes[c]}' is outside the classes of the training images")
    names, index, keep = _compact(images.classes, images.y, ~odd)
    return replace(_taken(images, keep), y=index[keep], classes=names)


def _compact(names: tuple[str, ...], index: Tensor, stays: Tensor) -> tuple[tuple[str, ...], Tensor, Tensor]:
    """The names that stay, every row's index into them (nonsense where its name goes), and which rows stay."""
    kept = tuple(name for name, stay in zip(names, stays.tolist(), strict=True) if stay)
    return kept, (stays.cumsum(0) - 1)[index], stays[index]


def _taken(images: Images, keep: Tensor) -> Images:
    if bool(keep.all()):
        return images
    rows = {field: getattr(images, field) for field in ("x", "y", "test", "domain", "silo")}
    return replace(images, **{field: rows[field][keep] for field in rows if rows[field] is not None})


def _one_class(images: Images) -> list[str]:
    if images.silo is None or len(images.classes) < 2:
        return []
    kinds = torch.zeros(len(images.silos), len(images.classes), dtype=torch.bool)
    kinds[images.silo[~images.test], images.y[~images.test]] = True
    lone = [name for name, count in zip(images.silos, kinds.sum(1).tolist(), strict=True) if count == 1]
    return [f"{len(lone)} silos train with one class only: {_some(lone)}"] if lone else []


def _in_both_splits(images: Images) -> list[str]:
    """Exact copies, found by a hash of the pixels."""
    if not images.test.any() or images.test.all():
        return []
    hashes = [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in images.x.numpy()]
    train = {h for h, test in zip(hashes, images.test.tolist(), strict=True) if not test}
    both = sum(h in train for h, test in zip(hashes, images.test.tolist(), strict=True) if test)
    return [f"{both} test images also stand in training"] if both else []


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
