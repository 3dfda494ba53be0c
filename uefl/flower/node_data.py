"""Load the data of a node: its own folder when deployed, one partition of the data set in a simulation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from uefl.core.errors import InputError
from uefl.core.federation import Silo, map_examples
from uefl.data import SOURCES
from uefl.data.config import DataConfig, encode_silo
from uefl.data.images import Images
from uefl.data.readers.context import ReadContext
from uefl.data.readers.csv_rows import read_csv
from uefl.data.table_config import TableConfig, parse_column_values
from uefl.data.table_format import TableFormat
from uefl.experiment.experiment import Experiment
from uefl.flower.silo_errors import SiloDataError, describe_data_error

NodeConfig = Mapping[str, Any]
"""A node's own configuration, which the server cannot change: data_path, silo; optional: state_path, domain, device."""


class NodeData(NamedTuple):
    """The silo of one node, and the names of its classes in the order of its labels."""

    silo: Silo
    classes: tuple[str, ...]
    table: TableFormat | None = None  # of a table: its format before scaling; the silo holds parsed cells


NodeDataLoader = Callable[[Experiment, NodeConfig], NodeData]


def load_node_data(experiment: Experiment, node_config: NodeConfig) -> NodeData:
    """Return the silo of a node, by its `data_path` or, in a simulation, by its partition id."""
    if "data_path" in node_config:
        if "silo" not in node_config:
            raise InputError('the node configuration has data_path="…" but no silo="…", the name of the silo')
        path, name, domain = (str(node_config.get(key, "")) for key in ("data_path", "silo", "domain"))
        return load_own_folder(experiment, path, name, domain)
    if "partition-id" in node_config:
        silos = load_simulated_silos(experiment)
        index = int(node_config["partition-id"])
        if index >= len(silos):
            raise InputError(f"node {index} has no silo: this experiment has {len(silos)} silos")
        return silos[index]
    raise InputError('the node configuration has neither data_path="…" nor a partition-id')


def load_simulated_silos(experiment: Experiment) -> list[NodeData]:
    """Return all silos of a simulation, sorted by name."""
    is_table = SOURCES[experiment.data.name].is_table
    silos, images = (load_cells_once if is_table else load_data_once)(experiment.data, experiment.seed)
    silos = sorted(experiment.method.prepare_silos(silos), key=lambda silo: silo.name)
    return [NodeData(silo, images.classes, images.table) for silo in silos]


@lru_cache(maxsize=1)
def load_data_once(config: DataConfig, seed: int) -> tuple[list[Silo], Images]:
    """Load the silos of a data set; a process reads them once for all its messages."""
    return config.load(seed)


@lru_cache(maxsize=1)
def load_cells_once(config: DataConfig, seed: int) -> tuple[list[Silo], Images]:
    """Load the silos of a table before scaling, which needs the sums of all silos."""
    images = config.read_images(show_progress=False)
    return config.make_silos(images, seed), images


def load_own_folder(experiment: Experiment, path: str, silo_name: str, domain: str = "") -> NodeData:
    """Return a silo from the node's own folder. The server decides how it is split, never which path is read."""
    config, weights = experiment.data, experiment.model.pretrained_weights
    if SOURCES[config.name].is_embedded:
        raise InputError(f"data={config.name} reads no folder; a node with data_path needs a data set read from files")
    if Path(weights).name != weights:
        raise InputError(f"pretrained_weights={weights} is a file path; a silo never opens a path sent by the server")
    try:
        config = adapt_to_own_table(config, Path(path)) if SOURCES[config.name].is_table else config
        images = replace(config, path=path).read_images(show_progress=False, is_one_silo=True)
    except Exception as e:  # the message of a reader names files
        raise SiloDataError(describe_data_error(Path(path))) from e
    if images.table:
        require_declared_levels(images.table, config.table)
    images = replace(images, silo_ids=torch.zeros_like(images.y), silos=(silo_name,))
    if config.num_held_out:
        raise InputError(
            f"public_data={config.public_data} would take public images from this silo's own folder; "
            "set another data set, which all silos can read"
        )
    config = replace(config, partitioner="natural", shifts=(), num_silos=(), train_sizes=(), target="")
    (silo,) = config.make_silos(images, experiment.seed)
    return NodeData(replace(silo, domain=domain or silo_name), images.classes, images.table)


def adapt_to_own_table(config: DataConfig, path: Path) -> DataConfig:
    """Return the settings for the table of one silo: a column that names silos is not used."""
    table = config.table
    if not table.silo:
        return config
    columns = read_csv(path, [table.label], ReadContext(skip_bad=True)).columns
    ignore = (*table.ignore, table.silo) if table.silo in columns else table.ignore
    return replace(config, table=replace(table, silo="", ignore=ignore))


def require_declared_levels(table: TableFormat, config: TableConfig) -> None:
    """Raise an error if the levels of a column were found in this silo's rows: another silo may have others."""
    declared = parse_column_values("levels", config.levels)
    if undeclared := [column.name for column in table.columns if column.levels and column.name not in declared]:
        raise InputError(
            f"column '{undeclared[0]}' is categorical; declare its levels in the settings of the run: "
            f"levels.{undeclared[0]}=…"
        )


def scale_table(silo: Silo, node_data: NodeData, table_json: str) -> Silo:
    """Return the silo with features in place of the cells of its table, in the format of the federation."""
    if not node_data.table:
        return silo
    table = TableFormat.from_json(table_json)
    if difference := node_data.table.find_difference(table):
        raise InputError(f"this silo has another table than the federation: {difference}")
    return encode_silo(silo, table)


def align_labels(node_data: NodeData, classes: tuple[str, ...]) -> Silo:
    """Return the silo with labels that index the federation's classes, of which the silo may have only some."""
    if node_data.classes == classes:
        return node_data.silo
    for name in node_data.classes:
        if name not in classes:
            raise InputError(f"class '{name}' is not a class of the federation: {', '.join(classes)}")
    new_labels = torch.tensor([classes.index(name) for name in node_data.classes])

    return map_examples(node_data.silo, lambda examples: examples._replace(y=new_labels[examples.y]))
