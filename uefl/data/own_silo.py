"""Read the data of one silo from its own folder or table, as the settings of a federation say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from uefl.core.errors import InputError
from uefl.core.federation import Silo, map_examples
from uefl.data.config import DataConfig, encode_silo
from uefl.data.images import Images
from uefl.data.readers.context import ReadContext
from uefl.data.readers.csv_rows import check_one_silo, read_csv
from uefl.data.table_config import TableConfig
from uefl.data.table_format import TableFormat


class OwnSilo(NamedTuple):
    """A silo, and the names of its classes in the order of its labels."""

    silo: Silo
    classes: tuple[str, ...]
    table: TableFormat | None = None  # of a table: its format before scaling; the silo holds parsed cells


def make_own_silo(config: DataConfig, images: Images, name: str, seed: int, domain: str = "") -> OwnSilo:
    """Return all images or rows of a source as one silo, split as the settings say."""
    images = replace(images, silo_ids=torch.zeros_like(images.y), silos=(name,))
    config = replace(config, partitioner="natural", shifts=(), num_silos=(), train_sizes=(), target="")
    (silo,) = config.make_silos(images, seed)
    return OwnSilo(replace(silo, domain=domain or name), images.classes, images.table)


def adapt_to_own_table(config: DataConfig, path: Path) -> DataConfig:
    """Return the settings for the table of one silo: a column that names silos may name one, and is not used."""
    table = config.table
    if not table.silo:
        return config
    csv_table = read_csv(path, [table.label], ReadContext(skip_bad=True))
    check_one_silo(path, csv_table, table.silo)
    ignore = (*table.ignore, table.silo) if table.silo in csv_table.columns else table.ignore
    return replace(config, table=replace(table, silo="", ignore=ignore))


def declare_columns(config: TableConfig, table: TableFormat) -> TableConfig:
    """Return settings with the kinds and levels of a format, so that the rows of one silo are read alike."""
    numeric, boolean = (tuple(c.name for c in table.columns if c.kind == kind) for kind in ("numeric", "boolean"))
    levels = tuple(f"{c.name}={','.join(c.levels)}" for c in table.columns if c.levels)
    return replace(config, numeric=numeric, boolean=boolean, categorical=(), levels=levels)


def scale_table(own: OwnSilo, silo: Silo, table_json: str) -> Silo:
    """Return the silo with features in place of the cells of its table, in the format of the federation."""
    if not own.table:
        return silo
    table = TableFormat.from_json(table_json)
    if difference := own.table.find_difference(table):
        raise InputError(f"this silo has another table than the federation: {difference}")
    return encode_silo(silo, table)


def align_labels(own: OwnSilo, classes: tuple[str, ...]) -> Silo:
    """Return the silo with labels that index the federation's classes, of which the silo may have only some."""
    if own.classes == classes:
        return own.silo
    for name in own.classes:
        if name not in classes:
            raise InputError(f"class '{name}' is not a class of the federation: {', '.join(classes)}")
    new_labels = torch.tensor([classes.index(name) for name in own.classes])
    return map_examples(own.silo, lambda examples: examples._replace(y=new_labels[examples.y]))
