"""Agree on the shape of images and the classes of a federation: by the coordinator's configuration, or by majority.

A single silo can neither prevent the start by another shape nor enlarge the classifier by further classes. Tables agree
on their columns, and are scaled by the sums that the silos send.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from uefl.core.errors import InputError
from uefl.data.readers.labeled_files import index_names
from uefl.data.table_format import TableFormat, scale_by_sums
from uefl.flower.silo_registry import SiloInfo

NUM_LISTED = 5  # names of classes in one line


class DataFormat(NamedTuple):
    """Shape of images and names of classes, empty where the silos decide; of a table also its scaled format as JSON."""

    image_shape: tuple[int, ...] = ()
    classes: tuple[str, ...] = ()
    table: str = ""


DECIDED_BY_SILOS = DataFormat()


def parse_data_format(image_shape: str, classes: str) -> DataFormat:
    """Return the format that a run configuration sets: `image_shape = "1,28,28"` and `classes = "cat,dog"`."""
    try:
        shape = tuple(int(size) for size in image_shape.split(",")) if image_shape else ()
    except ValueError:
        shape = (0,)
    if min(shape, default=1) < 1:
        raise InputError(f"image_shape={image_shape} must be channels,height,width, such as 1,28,28")
    names = tuple(name.strip() for name in classes.split(",")) if classes else ()
    if len(set(names)) < len(names) or "" in names:
        raise InputError(f"classes={classes} must be different names, separated by commas")
    return DataFormat(shape, names)


def agree_on_format(silo_infos: Sequence[SiloInfo], configured: DataFormat) -> tuple[DataFormat, dict[str, str]]:
    """Return the format of a federation, and by silo the reasons why silos with another format cannot take part."""
    classes = configured.classes or choose_classes(silo_infos)
    if any(info.table for info in silo_infos):
        return agree_on_table(silo_infos, configured._replace(classes=classes))
    image_shape = configured.image_shape or choose_image_shape(silo_infos)
    agreed = DataFormat(image_shape, classes)
    reasons = {info.name: find_format_error(info, agreed) for info in silo_infos}
    return agreed, {name: reason for name, reason in reasons.items() if reason}


def check_positive(silo_infos: Sequence[SiloInfo], positive: Sequence[str]) -> None:
    """Raise an error if the setting `positive` divides the rows of no silo; a silo alone may have one class."""
    found = {name for info in silo_infos for name in info.classes}
    if positive and len(found) == 1:
        raise InputError(
            f"positive={','.join(positive)} makes every row of every silo {found.pop()}; set it to values of the label "
            "that some silo has"
        )


def agree_on_table(silo_infos: Sequence[SiloInfo], configured: DataFormat) -> tuple[DataFormat, dict[str, str]]:
    """Return the columns that most silos have, scaled by their sums, and the reasons against other silos."""
    counts = Counter(info.table for info in silo_infos)
    if not configured.table and 2 * max(counts.values()) <= len(silo_infos):
        raise InputError(
            "the tables of the silos differ in their columns; declare numeric, categorical and boolean ones, and levels"
        )
    table = TableFormat.from_json(configured.table or counts.most_common(1)[0][0])
    reasons = {info.name: find_table_error(info, table, configured.classes) for info in silo_infos}
    reasons = {name: reason for name, reason in reasons.items() if reason}
    if not configured.table:  # else a resumed run, whose scaling stays
        fitting = sorted(info for info in silo_infos if info.name not in reasons)
        table = scale_by_sums(table, [info.column_sums for info in fitting if info.column_sums])
    table = replace(table, classes=configured.classes)
    return DataFormat((table.num_features,), configured.classes, table.to_json()), reasons


def find_table_error(info: SiloInfo, table: TableFormat, classes: Sequence[str]) -> str:
    """Return why a silo's table does not fit that of the federation, or an empty string."""
    if not info.table:
        return f"silo {info.name} has images, but the federation uses a table"
    if difference := TableFormat.from_json(info.table).find_difference(table):
        return (
            f"silo {info.name} has another table than most silos: {difference}; declare numeric, categorical and "
            "boolean columns, and levels"
        )
    return find_class_error(info, classes)


def choose_image_shape(silo_infos: Sequence[SiloInfo]) -> tuple[int, ...]:
    """Return the shape of images that more than half of the silos have."""
    counts = Counter(info.image_shape for info in silo_infos)
    shape, count = counts.most_common(1)[0]
    if 2 * count > len(silo_infos):
        return shape
    shapes = {info.image_shape: info.name for info in silo_infos}
    listed = ", ".join(f"{format_shape(shape)} at {name}" for shape, name in shapes.items())
    remedy = "set data.image_size, or image_shape in the run configuration"
    raise InputError(f"silos have images of different shapes ({listed}); {remedy}")


def choose_classes(silo_infos: Sequence[SiloInfo]) -> tuple[str, ...]:
    """Return the classes that more than half of the silos have, in the order that most of these silos use."""
    counts = Counter(name for info in silo_infos for name in info.classes)
    chosen = {name for name, count in counts.items() if 2 * count > len(silo_infos)}
    if not chosen:
        raise InputError("no class exists at more than half of the silos; set classes in the run configuration")
    orders = Counter(info.classes for info in silo_infos if set(info.classes) == chosen)
    return orders.most_common(1)[0][0] if orders else index_names(sorted(chosen))[0]


def find_format_error(info: SiloInfo, agreed: DataFormat) -> str:
    """Return why a silo's images or classes do not fit those of the federation, or an empty string."""
    if info.image_shape != agreed.image_shape:
        return (
            f"silo {info.name} has images of shape {format_shape(info.image_shape)}, but the federation uses "
            f"{format_shape(agreed.image_shape)}; set data.image_size, or image_shape in the run configuration"
        )
    return find_class_error(info, agreed.classes)


def find_class_error(info: SiloInfo, classes: Sequence[str]) -> str:
    """Return which classes of a silo the federation does not use, or an empty string."""
    if extra := [name for name in info.classes if name not in set(classes)]:
        return (
            f"silo {info.name} has classes that the federation does not use: {format_names(extra)}; "
            "set classes in the run configuration"
        )
    return ""


def describe_format(agreed: DataFormat, configured: DataFormat) -> str:
    """Return one line that gives the format of the federation, and what decided it."""
    decided = ["the run configuration" if value else "the majority of silos" for value in configured]
    kind = "tables with features of shape" if agreed.table else "images of shape"
    return (
        f"{kind} {format_shape(agreed.image_shape)}, by {decided[0]}; "
        f"{len(agreed.classes)} classes, by {decided[1]}: {format_names(agreed.classes)}"
    )


def format_shape(shape: Sequence[int]) -> str:
    """Return a shape as text."""
    return "×".join(map(str, shape))


def format_names(names: Collection[str]) -> str:
    """Return some names, and how many more there are."""
    listed = [name[:40] for name in list(names)[:NUM_LISTED]]
    return ", ".join(listed) + (f" and {len(names) - NUM_LISTED} more" if len(names) > NUM_LISTED else "")
