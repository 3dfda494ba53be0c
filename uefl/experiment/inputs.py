"""Read the user's files as inputs of a trained model: with labels for a calibration, without for a watch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from uefl.core.errors import InputError
from uefl.core.federation import Examples, concatenate_examples
from uefl.data.images import resize_images
from uefl.data.input_format import InputFormat
from uefl.data.readers.context import ReadContext
from uefl.data.readers.labeled_files import index_known_classes
from uefl.data.readers.silo_column import SiloColumn
from uefl.data.readers.table import read_labeled_table
from uefl.data.readers.unlabeled_files import list_table_files, list_unlabeled_files
from uefl.data.sources import read_images
from uefl.data.table_config import TableConfig
from uefl.data.table_format import TableFormat
from uefl.experiment.prediction_rows import decode_file, read_table_inputs
from uefl.experiment.settings import from_dict
from uefl.experiment.silo_models import Description

PARTITIONERS_BY_COLUMN = ("natural", "leave-one-domain-out")  # their silos, or domains, are values of the silo column


def read_inputs(paths: Sequence[Path], description: Description, silo_name: str, context: ReadContext) -> Tensor:
    """Read images, or rows of tables, as a silo's model takes them; `context` collects a line for each bad one.

    Rows that name other silos are read too; `context` has a warning about them.
    """
    input_format = description.input_format
    if input_format.table:
        column = find_silo_column(description, silo_name)
        rows = read_table_inputs(list_table_files(paths, context), input_format, context, column.column)
        context.warnings += filter(None, [column.describe_others(rows.silo_values)])
        return rows.x
    _require_images(input_format)
    files = list_unlabeled_files(paths, context)
    decoded = [
        decode_file(file, input_format, context) for file in context.track_progress(files, "reading", len(files))
    ]
    pixels = [p for p in decoded if p is not None]
    if not pixels:
        raise InputError(f"none of the {len(decoded)} images is usable; the first: {context.skipped_messages[0]}")
    return input_format.convert(torch.stack(pixels))


def read_labeled_inputs(
    paths: Sequence[Path], description: Description, silo_name: str, context: ReadContext, label_column: str = ""
) -> Examples:
    """Read a silo's images in folders of their class, or tables with a label column, with the labels of the model."""
    input_format = description.input_format
    if input_format.table:
        config = _find_table_config(description, label_column)
        table = TableFormat.from_json(input_format.table)
        silo_column = find_silo_column(description, silo_name)
        pieces = [
            read_labeled_table(path, table, config, description.class_names, context, silo_column) for path in paths
        ]
        return concatenate_examples([p._replace(x=input_format.convert(p.x)) for p in pieces])
    _require_images(input_format)
    return concatenate_examples([_read_labeled_images(path, description, silo_name, context) for path in paths])


def find_silo_column(description: Description, silo_name: str) -> SiloColumn:
    """Return the column that named silos in training, and which of its values mean this silo and which others."""
    data, domains = description.origin.get("data", {}), description.origin.get("domains", {})
    own = {silo_name, domains.get(silo_name, silo_name)}
    facts = description.silos.get(silo_name)
    return SiloColumn(
        str((data.get("table") or {}).get("silo", "")),
        silo_name,
        frozenset(own),
        frozenset({*description.silo_names, *domains.values()} - own),
        data.get("partitioner") in PARTITIONERS_BY_COLUMN and not (facts and facts.has_joined),
    )


def _read_labeled_images(path: Path, description: Description, silo_name: str, context: ReadContext) -> Examples:
    input_format = description.input_format
    size = input_format.shape[-1]
    image_size = size if input_format.resizing == "reading" else None
    images = read_images("folder", str(path), skip_bad=True, image_size=image_size, is_one_silo=True)
    if len(images.silos) > 1:
        raise InputError(f"{path} has the silos {', '.join(images.silos)}; give the folder of one silo: <class>/…")
    others = set(description.silo_names) - {silo_name}
    if other := next((name for name in images.silos if name in others), ""):
        raise InputError(f"{path} has images of silo {other}, not {silo_name}; the files of a silo are its own")
    context.skipped_messages += [note for note in images.notes if "skipped" in note]
    x = resize_images(images.x, size) if input_format.resizing == "decoded" else images.x
    y = index_known_classes(path, images.classes, description.class_names)[images.y]
    return Examples(input_format.convert(x), y)


def _find_table_config(description: Description, label_column: str) -> TableConfig:
    """Return the settings of the training table; a silo's copy does not hold them."""
    stored = description.origin.get("data", {}).get("table")
    config = from_dict(TableConfig, stored) if stored else TableConfig()
    if not (label_column or config.label):
        raise InputError("this model does not name the column of labels; set label=<column>")
    return config if not label_column else TableConfig(label=label_column, positive=config.positive, silo=config.silo)


def _require_images(input_format: InputFormat) -> None:
    if not input_format.is_image:
        raise InputError("this model takes neither images nor tables; use Python")
