"""The default settings of every data set and partitioner."""

from __future__ import annotations

from uefl.data import PARTITIONERS, SOURCES
from uefl.data.config import DataConfig


def get_default_config(name: str, partitioner: str = "") -> DataConfig:
    """Return the default settings of a data set and a partitioner: the paper's, where it uses them."""
    source = SOURCES[name]
    partitioner = partitioner or source.default_settings.get("partitioner", "domains")
    settings = {**source.default_settings, **PARTITIONERS[partitioner].default_settings}
    if source.default_target and partitioner in ("domains", "leave-one-domain-out"):  # use the domains of the source
        target = source.default_target if partitioner == "leave-one-domain-out" else ""
        settings |= {"shifts": (), "num_silos": (), "target": target}
    if source.default_settings.get("partitioner") == "natural" and partitioner == "leave-one-domain-out":
        settings |= {"shifts": (), "num_silos": (), "target": ""}  # the source names its silos: leave one of them out
    return DataConfig(**{**settings, "name": name, "partitioner": partitioner})
