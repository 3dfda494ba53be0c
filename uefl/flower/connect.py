"""From a grid to clients: wait for silos, agree on classes and the shape of images, build the network."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence

from flwr.serverapp import Grid

from uefl.data.entries import indexed
from uefl.engines.flower import Flower
from uefl.errors import InputError
from uefl.experiment import DTYPES, Experiment
from uefl.flower.census import Census, Fact, Patience

Hear = Callable[[str, str], None]


def connect(
    grid: Grid,
    experiment: Experiment,
    *,
    silos: int,
    patience: Patience | None = None,
    half: bool = False,
    run: str = "",
    known: Sequence[Fact] = (),
    hear: Hear = lambda _silo, _doing: None,
) -> Flower:
    """The engine for an experiment with so many silos behind this grid; `known` are those of a run that goes on."""
    census = Census(grid, experiment.config(), patience or Patience(), hear)
    facts = census.gather(silos, known)
    shape, classes = agreed(facts)
    return Flower(
        census,
        experiment.network(shape, len(classes)),
        facts=facts,
        run=run or experiment.id(mark(facts)),
        seed=experiment.seed,
        classes=classes,
        shape=shape,
        dtype=DTYPES[experiment.precision],
        half=half,
        watch=hear,
    )


def agreed(facts: Sequence[Fact]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The shape of all images, and all classes that any silo has."""
    shapes = {fact.shape: fact.silo for fact in facts}
    if len(shapes) > 1:
        told = ", ".join(f"{'×'.join(map(str, shape))} at {silo}" for shape, silo in shapes.items())
        raise InputError(f"silos have images of different shapes: {told}; say data.size")
    orders = {fact.classes for fact in facts}
    classes = orders.pop() if len(orders) == 1 else indexed([name for fact in facts for name in fact.classes])[0]
    return facts[0].shape, classes


def mark(facts: Sequence[Fact]) -> str:
    """Hash of what the server knows of the data: names, counts, classes."""
    return hashlib.sha256(json.dumps(sorted(facts)).encode()).hexdigest()[:16]
