"""Simulate silos on Flower's runtime (Ray), with as many worker processes as the cores allow."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from uefl.core.errors import ResumableError
from uefl.experiment.experiment import Experiment
from uefl.flower.client import make_client_app
from uefl.flower.connect import connect
from uefl.flower.engine import FlowerEngine
from uefl.flower.silo_registry import SiloListener

LOOPBACK_ADDRESS = "127.0.0.1"  # by default Ray listens on all interfaces
START_TIMEOUT_SECONDS = 600


@contextmanager
def simulate_nodes(
    num_nodes: int, *, state_folder: Path, num_cpus: int = 1, num_gpus: float = 0.0, app: ClientApp | None = None
) -> Iterator[Grid]:
    """Open a grid of simulated nodes, each with this number of cores; all processes end with the block."""
    from flwr.simulation import run_simulation  # slow to import, because it imports Ray

    logging.getLogger("flwr").setLevel(logging.ERROR)
    grids: queue.Queue[Grid] = queue.Queue()
    is_finished, server_app = threading.Event(), ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        del context
        grids.put(grid)
        is_finished.wait()

    backend_config: Any = {
        "client_resources": {"num_cpus": num_cpus, "num_gpus": num_gpus},
        "init_args": {
            "include_dashboard": False,
            "log_to_driver": False,
            "logging_level": 40,
            "_node_ip_address": LOOPBACK_ADDRESS,
        },
    }
    client_app, errors = app or make_client_app(state_folder=state_folder), list[str]()

    def run_in_thread() -> None:
        try:
            run_simulation(server_app, client_app, num_nodes, "ray", backend_config)
        except BaseException as e:  # an error in a thread is not raised anywhere else
            errors.append(f"the simulation ended: {e!r}")
        is_finished.set()

    thread = threading.Thread(target=run_in_thread, name="flower-simulation")
    thread.start()
    try:
        yield _raise_when_ended(grids.get(timeout=START_TIMEOUT_SECONDS), errors)
    finally:
        is_finished.set()
        thread.join()


@contextmanager
def simulate_clients(
    experiment: Experiment,
    num_silos: int,
    *,
    state_folder: Path,
    run_id: str,
    on_silo_event: SiloListener = lambda _silo, _activity: None,
) -> Iterator[FlowerEngine]:
    """Open the engine of an experiment whose clients are simulated, one node per silo."""
    with simulate_nodes(num_silos, state_folder=state_folder) as grid:
        yield connect(grid, experiment, num_silos=num_silos, run_id=run_id, on_silo_event=on_silo_event)


def _raise_when_ended(grid: Grid, errors: list[str]) -> Grid:
    """Return the grid, which now raises an error after the simulation ended instead of waiting without end."""
    get_node_ids, pull_messages = grid.get_node_ids, grid.pull_messages

    def checked_get_node_ids() -> Any:
        if errors:
            raise ResumableError(f"{errors[0]}; run the same command again to resume")
        return get_node_ids()

    def checked_pull_messages(message_ids: Any) -> Any:
        checked_get_node_ids()
        return pull_messages(message_ids)

    grid.get_node_ids = checked_get_node_ids  # type: ignore[method-assign]
    grid.pull_messages = checked_pull_messages  # type: ignore[method-assign]
    return grid
