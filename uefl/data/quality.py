"""Check images and silos as a whole: drop what cannot be trained with, and warn about what is unusual."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from uefl.core.errors import InputError
from uefl.core.federation import Silo
from uefl.data.images import Images, select_rows
from uefl.data.partitioners.partition import Partition
from uefl.data.readers.context import ReadContext, sanitize_line

_MAX_NAMES = 5


def check_images(images: Images, context: ReadContext) -> Images:
    """Skip or reject silos and classes without training images, and count test images that were trained with."""
    images = _drop_test_only_classes(_drop_untrained_silos(images, context), context)
    return replace(
        images,
        num_skipped=len(context.skipped_messages),
        warnings=tuple(map(sanitize_line, _warn_train_test_duplicates(images) + _warn_separated_groups(images))),
        notes=context.format_notes(),
    )


def collect_warnings(silos: Sequence[Silo], images: Images) -> list[str]:
    """Return one line per kind of problem of the images and of the silos made from them."""
    return [*images.warnings, *images.notes, *warn_single_class_silos(silos)]


def warn_single_class_silos(silos: Sequence[Silo]) -> list[str]:
    """Return a line that names the silos with training images of only one class."""
    names = [silo.name for silo in silos if len(silo.train.y) and bool((silo.train.y == silo.train.y[0]).all())]
    if not names:
        return []
    return [f"{len(names)} of {len(silos)} silos have training examples of only one class: {join_names(names)}"]


def _drop_untrained_silos(images: Images, context: ReadContext) -> Images:
    """Drop silos without training images."""
    if images.silo_ids is None:
        return images
    counts = torch.bincount(images.silo_ids[~images.is_test], minlength=len(images.silos))
    for k in (counts == 0).nonzero().flatten().tolist():
        context.skip_or_raise(f"{images.name}: silo '{images.silos[k]}' has no training image")
    names, silo_ids, keep = _reindex_names(images.silos, images.silo_ids, counts > 0)
    return select_rows(replace(images, silo_ids=silo_ids, silos=names), keep)


def _drop_test_only_classes(images: Images, context: ReadContext) -> Images:
    """Drop classes that occur only in the test split and therefore cannot be learned."""
    if bool(images.is_test.all()):
        raise InputError(f"{images.name}: no training image, only test images")
    num_train = torch.bincount(images.y[~images.is_test], minlength=len(images.classes))
    num_images = torch.bincount(images.y, minlength=len(images.classes))
    test_only = (num_train == 0) & (num_images > 0)
    if not test_only.any():
        return images
    for c in test_only.nonzero().flatten().tolist():
        context.skip_or_raise(f"{images.name}: label '{images.classes[c]}' does not occur in the training images")
    names, y, keep = _reindex_names(images.classes, images.y, ~test_only)
    return select_rows(replace(images, y=y, classes=names), keep)


def _reindex_names(names: tuple[str, ...], index: Tensor, keep_mask: Tensor) -> tuple[tuple[str, ...], Tensor, Tensor]:
    """Return the remaining names, the new index of every row (undefined for dropped rows), and which rows remain."""
    remaining = tuple(name for name, keep in zip(names, keep_mask.tolist(), strict=True) if keep)
    return remaining, (keep_mask.cumsum(0) - 1)[index], keep_mask[index]


def _warn_train_test_duplicates(images: Images) -> list[str]:
    """Count test images that are exact copies of training images, by a hash of their pixels."""
    if not images.is_test.any() or images.is_test.all():
        return []
    train_hashes = set(images.hash_pixels((~images.is_test).nonzero()[:, 0]))
    count = sum(pixels in train_hashes for pixels in images.hash_pixels(images.is_test.nonzero()[:, 0]))
    return [f"{count} test examples also occur in the training split"] if count else []


def _warn_separated_groups(images: Images) -> list[str]:
    """Count groups that the source itself separates: over its splits, or over silos."""
    if images.group_ids is None:
        return []
    kinds = {"the training and the test split": images.is_test.long(), "more than one silo": images.silo_ids}
    lines = []
    for kind, ids in kinds.items():
        if ids is None:
            continue
        owners = {(group, owner) for group, owner in zip(images.group_ids.tolist(), ids.tolist())}
        count = sum(number > 1 for number in Counter(group for group, _ in owners).values())
        lines += [f"{count} groups occur in {kind} of the source"] if count else []
    return lines


def warn_separated_copies(partitions: Sequence[Partition], images: Images) -> list[str]:
    """Count test images whose copies a split that is drawn here has put among the training images.

    Copies across the splits of the source itself are counted when it is read.
    """
    train = torch.cat([indices for p in partitions for indices in (p.train, p.validation)])
    test = torch.cat([p.test for p in partitions])
    test = test[~torch.isin(test, train)]  # some partitioners show the same images to several silos by design
    count = 0
    for is_test in (False, True):
        own_train, own_test = (indices[images.is_test[indices] == is_test] for indices in (train, test))
        if len(own_train) and len(own_test):
            train_hashes = set(images.hash_pixels(own_train))
            count += sum(pixels in train_hashes for pixels in images.hash_pixels(own_test))
    return [f"{count} test examples are copies of training examples, which the split separated"] if count else []


def join_names(names: Sequence[str]) -> str:
    """Return the first names as a list in words, with the number of the others."""
    num_more = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {num_more} more" if num_more > 0 else "")
