"""A small federation over the in-process grid, and the same one in the serial engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from uefl.algorithms import algorithm
from uefl.data import Data
from uefl.engines import Serial
from uefl.experiment import DTYPES, Architecture, Experiment
from uefl.federation import Clients, Server
from uefl.flower.census import Patience
from uefl.flower.client import client_app
from uefl.flower.connect import connect
from uefl.flower.grid import InProcess
from uefl.flower.silo import loaded
from uefl.local import Local

QUICK = Patience(wait=0.2, deadline=0.2, poll=0.01, retries=1)
SILOS = ("D1-1", "D2-1", "D3-1")


def experiment(name: str = "uefl", **fields: Any) -> Experiment:
    """Three silos, dropout on, and an extension for the book to make: everyone above the least uncertain."""
    kind = algorithm(name)
    usual: dict[str, Any] = {"rounds": 2, "extra_rounds": 1, "iterations": 2, "passes": 3}
    usual["local"] = kind().suited(Local(batch=16))
    book = kind().codebook
    if book:
        usual["codebook"] = replace(book, words=8, warm_up=1, gamma=0.0, errors=0.0)
    return Experiment(
        method=kind(**{**usual, **fields}),
        data=Data(train=24, test=12, silos=(1, 1, 1), size=14),
        model=Architecture(width=4, hidden=16),
        precision="float64",
    )


def in_process(state: Path) -> InProcess:
    """Three nodes whose numbers say nothing about which silo they are."""
    return InProcess(client_app(state=state), {90 - i: {"partition-id": i} for i in range(3)})


def flower(
    grid: InProcess, what: Experiment, *, patience: Patience = QUICK, hear: Callable[[str, str], None] | None = None
) -> Any:
    return connect(grid, what, silos=3, patience=patience, hear=hear or (lambda _silo, _doing: None))


def serial(what: Experiment) -> Serial:
    silos, images = loaded(what.data, what.seed)
    net = what.network(tuple(silos[0].test.x.shape[1:]), len(images.classes))
    return Serial(silos, net, seed=what.seed, dtype=DTYPES[what.precision])


def driven(clients: Clients, what: Experiment, server: Server | None = None) -> tuple[Server, list[dict[str, Any]]]:
    """All rounds, and their records."""
    method, records = what.method, list[dict[str, Any]]()
    server = server or method.start(clients)  # type: ignore[arg-type]
    while server.round < method.budget:
        server = method.step(clients, server)
        records += server.records
        server = server.but(records=())
    return server, records


def timeless(value: Any) -> Any:
    """Records without their clock readings, the only thing two engines may disagree on."""
    if not isinstance(value, dict):
        return value
    return {name: timeless(inner) for name, inner in value.items() if "seconds" not in name}


def furthest(one: Server, other: Server) -> float:
    """The largest difference between two models."""
    assert one.state.keys() == other.state.keys()
    gaps = [(one.state[n].double() - other.state[n].double()).abs() for n in one.state]
    return float(torch.cat([gap.flatten() for gap in gaps]).max()) if gaps else 0.0
