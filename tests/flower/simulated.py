"""Run by the simulation tests in a process of its own: what Ray leaves behind must not disturb other tests."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from federating import driven, experiment, flower, furthest, in_process, serial
from flwr.app import Message
from flwr.clientapp import ClientApp
from test_flower_faults import late
from test_flower_replies import POISON, forged

from uefl.errors import Stopped
from uefl.flower.census import Patience
from uefl.flower.client import client_app
from uefl.flower.connect import connect
from uefl.flower.simulation import simulation
from uefl.flower.wire import body

Fault = Callable[[Message, Callable[[], Message]], Message]


def agrees(state: Path) -> None:
    what = experiment("uefl")
    here, _ = driven(serial(what), what)
    with simulation(3, state=state) as grid:
        there, _ = driven(connect(grid, what, silos=3), what)
    assert torch.equal(here.access, there.access)
    assert furthest(here, there) < 1e-9


def faulty(state: Path, fault: Fault) -> ClientApp:
    """The usual app, but with a fault when it is to train."""
    app, usual = ClientApp(), client_app(state=state)
    app.query()(usual)
    app.evaluate()(usual)
    app.train()(lambda message, context: fault(message, lambda: usual(message, context)))
    return app


def dies(state: Path) -> None:
    """Processes die when they are to train, as if they were out of memory."""
    what = experiment("fedavg")
    with simulation(3, state=state, app=faulty(state, lambda *_: os._exit(1))) as grid:
        try:
            driven(connect(grid, what, silos=3, patience=Patience(deadline=60, retries=1)), what)
        except Stopped as e:
            sys.stdout.write(str(e))


def lies(state: Path) -> None:
    """D2-1 sends another poisoned reply every round: it is refused and named, and the round goes on."""
    name = "another name"  # after it the node is asked anew who it is, which may take a round
    kinds = [*(poison for kind, poison in POISON.items() if kind != name), POISON[name]]

    def fault(message: Message, answer: Callable[[], Message]) -> Message:
        changes, told, _ = kinds[body(message)["round"] - 1]
        return forged("tensors", changes, told)(message, answer())

    what = experiment("vq-fedavg", rounds=len(kinds), iterations=1)
    with simulation(3, state=state, app=faulty(state, fault)) as grid:
        server, records = driven(connect(grid, what, silos=3), what)
    for (_, _, why), record in zip(kinds, records, strict=True):
        assert why in record["silos"]["D2-1"]["refused"], record["silos"]["D2-1"]["refused"]
        assert "refused" not in record["silos"]["D1-1"]
    assert all(bool(torch.isfinite(t).all()) for t in server.state.values())


def straggles(state: Path) -> None:
    """D2-1 answers two seconds too late in round 2. What it then sends and keeps changes nothing."""
    patience = Patience(deadline=20)

    def fault(message: Message, answer: Callable[[], Message]) -> Message:
        reply = answer()
        if (body(message)["silo"], body(message)["round"]) == ("D2-1", 2):
            time.sleep(patience.deadline + 2)
        return reply

    what = experiment("scaffold", rounds=6, iterations=1)
    with simulation(3, state=state / "there", app=faulty(state / "there", fault)) as grid:
        there, records = driven(connect(grid, what, silos=3, patience=patience), what)
    missing = [record["silos"]["D2-1"].get("refused", "") for record in records]
    assert missing == ["", "missing: no answer within 20 s", "", "", "", ""]
    here = in_process(state / "here")
    here.tamper = late("D2-1", {2})
    assert furthest(there, driven(flower(here, what), what)[0]) < 1e-9


if __name__ == "__main__":
    {"agrees": agrees, "dies": dies, "lies": lies, "straggles": straggles}[sys.argv[1]](Path(sys.argv[2]))
