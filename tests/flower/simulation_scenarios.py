"""Scenarios of the simulation tests, each run in a separate process, because Ray leaves global state behind."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from flwr.app import Message
from flwr.clientapp import ClientApp
from small_federation import (
    make_experiment,
    make_flower_engine,
    make_grid,
    make_serial_engine,
    max_difference,
    run_rounds,
)
from test_flower_faults import delay_replies
from test_flower_replies import POISONED_REPLIES, forge_replies

from uefl.core.errors import ResumableError
from uefl.flower.client import make_client_app
from uefl.flower.connect import connect
from uefl.flower.silo_registry import RoundPolicy
from uefl.flower.simulation import simulate_nodes
from uefl.flower.wire import read_payload

Fault = Callable[[Message, Callable[[], Message]], Message]


def check_agreement(state_folder: Path) -> None:
    experiment = make_experiment("uefl")
    serial, _ = run_rounds(make_serial_engine(experiment), experiment)
    with simulate_nodes(3, state_folder=state_folder) as grid:
        simulated, _ = run_rounds(connect(grid, experiment, num_silos=3), experiment)
    assert torch.equal(serial.access, simulated.access)
    assert max_difference(serial, simulated) < 1e-9


def make_faulty_app(state_folder: Path, fault: Fault) -> ClientApp:
    """Return the client app with a fault in training."""
    app, client_app = ClientApp(), make_client_app(state_folder=state_folder)
    app.query()(client_app)
    app.evaluate()(client_app)
    app.train()(lambda message, context: fault(message, lambda: client_app(message, context)))
    return app


def run_dying_nodes(state_folder: Path) -> None:
    """Worker processes die at the start of training, as if they were out of memory."""
    experiment, policy = make_experiment("fedavg"), RoundPolicy(reply_timeout=60, retries=1)
    app = make_faulty_app(state_folder, lambda *_: os._exit(1))
    with simulate_nodes(3, state_folder=state_folder, app=app) as grid:
        try:
            run_rounds(connect(grid, experiment, num_silos=3, policy=policy), experiment)
        except ResumableError as e:
            sys.stdout.write(str(e))


def run_poisoned_replies(state_folder: Path) -> None:
    """Silo D2-1 sends another kind of poisoned reply every round; each is rejected with its reason."""
    last = "another name"  # afterwards the node must register again, which may take a round
    poisons = [*(poison for kind, poison in POISONED_REPLIES.items() if kind != last), POISONED_REPLIES[last]]

    def fault(message: Message, reply: Callable[[], Message]) -> Message:
        changes, payload_changes, _ = poisons[read_payload(message)["round"] - 1]
        return forge_replies("tensors", changes, payload_changes)(message, reply())

    experiment = make_experiment("vq-fedavg", rounds=len(poisons), iterations=1)
    with simulate_nodes(3, state_folder=state_folder, app=make_faulty_app(state_folder, fault)) as grid:
        server, records = run_rounds(connect(grid, experiment, num_silos=3), experiment)
    for (_, _, reason), record in zip(poisons, records, strict=True):
        assert reason in record["silos"]["D2-1"]["rejected"], record["silos"]["D2-1"]["rejected"]
        assert "rejected" not in record["silos"]["D1-1"]
    assert all(bool(torch.isfinite(t).all()) for t in server.model_state.values())


def run_straggler(state_folder: Path) -> None:
    """Silo D2-1 replies two seconds too late in round 2; neither this reply nor its client state has an effect."""
    policy, folder = RoundPolicy(reply_timeout=20), state_folder / "simulated"

    def fault(message: Message, reply: Callable[[], Message]) -> Message:
        late_reply, payload = reply(), read_payload(message)
        if (payload["silo"], payload["round"]) == ("D2-1", 2):
            time.sleep(policy.reply_timeout + 2)
        return late_reply

    experiment = make_experiment("scaffold", rounds=6, iterations=1)
    with simulate_nodes(3, state_folder=folder, app=make_faulty_app(folder, fault)) as grid:
        simulated, records = run_rounds(connect(grid, experiment, num_silos=3, policy=policy), experiment)
    reasons = [record["silos"]["D2-1"].get("rejected", "") for record in records]
    assert reasons == ["", "missing: no reply within 20 s", "", "", "", ""], reasons
    grid = make_grid(state_folder / "in-process")
    grid.tamper = delay_replies("D2-1", {2})
    assert max_difference(simulated, run_rounds(make_flower_engine(grid, experiment), experiment)[0]) < 1e-9


SCENARIOS = {
    "agreement": check_agreement,
    "dying-nodes": run_dying_nodes,
    "poisoned-replies": run_poisoned_replies,
    "straggler": run_straggler,
}

if __name__ == "__main__":
    SCENARIOS[sys.argv[1]](Path(sys.argv[2]))
