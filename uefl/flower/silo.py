"""Where a node's data come from: its own folder when deployed, its part of the cut in a simulation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from uefl.data.images import Images
from uefl.data.sources import SOURCES, read
from uefl.data.spec import Data, first_classes
from uefl.errors import InputError
from uefl.experiment import Experiment
from uefl.federation import Part, Silo, Split

Node = Mapping[str, Any]
"""A node's own configuration. The server cannot change it: data="…" silo="…", and if wished state, domain, device."""


class Own(NamedTuple):
    """One node's silo, and the names of its classes in the order of its labels."""

    silo: Silo
    classes: tuple[str, ...]


Find = Callable[[Experiment, Node], Own]


def find(experiment: Experiment, node: Node) -> Own:
    """The silo of a node."""
    if "data" in node:
        if "silo" not in node:
            raise InputError('node configuration has data="…" but no silo="…", the silo\'s name')
        return own(experiment, str(node["data"]), str(node["silo"]), str(node.get("domain", "")))
    if "partition-id" in node:
        everyone = cut(experiment)
        number = int(node["partition-id"])
        if number >= len(everyone):
            raise InputError(f"node {number} has no silo, this experiment has {len(everyone)}")
        return everyone[number]
    raise InputError('node configuration names neither data="…" nor a partition-id')


def cut(experiment: Experiment) -> list[Own]:
    """All silos of a simulation, by name."""
    silos, images = loaded(experiment.data, experiment.seed)
    prepared = sorted(experiment.method.prepare(silos), key=lambda silo: silo.name)
    return [Own(silo, images.classes) for silo in prepared]


@lru_cache(maxsize=1)
def loaded(data: Data, seed: int) -> tuple[list[Silo], Images]:
    """A process reads its data once, however many messages it answers."""
    return data.load(seed)


def own(experiment: Experiment, path: str, name: str, domain: str = "") -> Own:
    """A silo from a folder that is all its own. The server says how to read and split it, never where it lies."""
    data = experiment.data
    if SOURCES[data.name].importer is None:
        raise InputError(
            f"data={data.name} reads no folder; a node with its own data needs data=folder or another reader"
        )
    if Path(experiment.model.pretrained).name != experiment.model.pretrained:
        raise InputError(f"pretrained={experiment.model.pretrained} names a file; a silo opens only its own")
    early = data.size if data.name in ("folder", "pacs") else None  # as in `Data.load`
    found = read(data.name, path, skip_bad=data.skip_bad, strict=data.strict, size=early or None, progress=False)
    images = first_classes(found, data.only)
    alone = replace(images, silo=torch.zeros_like(images.y), silos=(name,))
    (silo,) = replace(data, cut="given", shifts=(), silos=(), sizes=(), target="").divide(alone, experiment.seed)
    return Own(replace(silo, domain=domain or name), images.classes)


def aligned(mine: Own, classes: tuple[str, ...]) -> Silo:
    """The silo with its labels counted in the federation's classes, of which it may have only some."""
    if mine.classes == classes:
        return mine.silo
    for name in mine.classes:
        if name not in classes:
            raise InputError(f"class '{name}' is not one of the federation's: {', '.join(classes)}")
    at = torch.tensor([classes.index(name) for name in mine.classes])

    def part(split: Split) -> Part:
        found = mine.silo.part(split)
        return found._replace(y=at[found.y])

    return replace(mine.silo, train=part("train"), validation=part("validation"), test=part("test"))
