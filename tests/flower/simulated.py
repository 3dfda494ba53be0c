"""Run by the simulation tests in a process of its own: what Ray leaves behind must not disturb other tests."""

import os
import sys
from pathlib import Path

import torch
from federating import driven, experiment, furthest, serial
from flwr.clientapp import ClientApp

from uefl.errors import Stopped
from uefl.flower.census import Patience
from uefl.flower.client import client_app
from uefl.flower.connect import connect
from uefl.flower.simulation import simulation


def agrees(state: Path) -> None:
    what = experiment("uefl")
    here, _ = driven(serial(what), what)
    with simulation(3, state=state) as grid:
        there, _ = driven(connect(grid, what, silos=3), what)
    assert torch.equal(here.access, there.access)
    assert furthest(here, there) < 1e-9


def dies(state: Path) -> None:
    """Processes die when they are to train, as if they were out of memory."""
    app, usual = ClientApp(), client_app(state=state)
    app.query()(usual)
    app.evaluate()(usual)
    app.train()(lambda *_: os._exit(1))
    what = experiment("fedavg")
    with simulation(3, state=state, app=app) as grid:
        try:
            driven(connect(grid, what, silos=3, patience=Patience(deadline=60, retries=1)), what)
        except Stopped as e:
            sys.stdout.write(str(e))


if __name__ == "__main__":
    {"agrees": agrees, "dies": dies}[sys.argv[1]](Path(sys.argv[2]))
