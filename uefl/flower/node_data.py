"""Load the data of a node: its own folder when deployed, one partition of the data set in a simulation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from uefl.core.errors import InputError
from uefl.core.federation import Silo
from uefl.data import SOURCES
from uefl.data.config import DataConfig
from uefl.data.images import Images
from uefl.data.own_silo import OwnSilo, adapt_to_own_table, align_labels, make_own_silo, scale_table
from uefl.data.table_config import TableConfig, parse_column_values
from uefl.data.table_format import TableFormat
from uefl.experiment.experiment import Experiment
from uefl.flower.silo_errors import SiloDataError, describe_data_error

NodeConfig = Mapping[str, Any]
"""A node's own configuration, which the server cannot change: data_path, silo; optional: state_path, domain, device."""


NodeData = OwnSilo  # the silo of one node
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
    if config.num_held_out:
        raise InputError(
            f"public_data={config.public_data} would take public images from this silo's own folder; "
            "set another data set, which all silos can read"
        )
    return make_own_silo(config, images, silo_name, experiment.seed, domain)


def require_declared_levels(table: TableFormat, config: TableConfig) -> None:
    """Raise an error if the levels of a column were found in this silo's rows: another silo may have others."""
    declared = parse_column_values("levels", config.levels)
    if undeclared := [column.name for column in table.columns if column.levels and column.name not in declared]:
        raise InputError(
            f"column '{undeclared[0]}' is categorical; declare its levels in the settings of the run: "
            f"levels.{undeclared[0]}=…"
        )


def fit_to_federation(node_data: NodeData, payload: Mapping[str, Any]) -> Silo:
    """Return the silo with the classes, the table format and the image shape of the federation, or raise an error."""
    if payload["silo"] != node_data.silo.name:
        raise InputError(
            f"the message is addressed to silo {payload['silo']}, but this node is silo {node_data.silo.name}"
        )
    silo = scale_table(node_data, align_labels(node_data, tuple(payload["classes"])), str(payload.get("table", "")))
    image_shape, local_shape = tuple(payload["image_shape"]), tuple(silo.test.x.shape[1:])
    if local_shape != image_shape:
        raise InputError(
            f"this silo's images have shape {local_shape}, but the federation uses {image_shape}; set data.image_size"
        )
    return silo
