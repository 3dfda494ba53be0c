"""Silos simulated on Flower's runtime (Ray): as many worker processes as there are cores to give."""

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

from uefl.engines.flower import Flower
from uefl.errors import Stopped
from uefl.experiment import Experiment
from uefl.flower.client import client_app
from uefl.flower.connect import Hear, connect

LOOPBACK = "127.0.0.1"  # Ray would listen to everyone


@contextmanager
def simulation(
    nodes: int, *, state: Path, cpus: int = 1, gpus: float = 0.0, app: ClientApp | None = None
) -> Iterator[Grid]:
    """A grid of so many simulated nodes, each with so many cores; all processes are gone when the block ends."""
    from flwr.simulation import run_simulation  # slow to import, with Ray behind it

    logging.getLogger("flwr").setLevel(logging.ERROR)
    grids: queue.Queue[Grid] = queue.Queue()
    done, server = threading.Event(), ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        del context
        grids.put(grid)
        done.wait()

    config: Any = {
        "client_resources": {"num_cpus": cpus, "num_gpus": gpus},
        "init_args": {
            "include_dashboard": False,
            "log_to_driver": False,
            "logging_level": 40,
            "_node_ip_address": LOOPBACK,
        },
    }
    ended: list[str] = []

    def work() -> None:
        try:
            run_simulation(server, app or client_app(state=state), nodes, "ray", config)
        except BaseException as e:  # in a thread, nobody else would hear of it
            ended.append(f"the simulation ended: {e!r}")
        done.set()

    thread = threading.Thread(target=work, name="flower-simulation")
    thread.start()
    try:
        yield _attended(grids.get(timeout=600), ended)
    finally:
        done.set()
        thread.join()


@contextmanager
def simulated(
    experiment: Experiment, silos: int, *, state: Path, run: str, hear: Hear = lambda _silo, _doing: None
) -> Iterator[Flower]:
    """The clients of an experiment, simulated: one node for each of its silos."""
    with simulation(silos, state=state) as grid:
        yield connect(grid, experiment, silos=silos, run=run, hear=hear)


def _attended(grid: Grid, ended: list[str]) -> Grid:
    """The grid, but whoever waits at it hears when the simulation is gone, instead of waiting for nothing."""
    look = grid.get_node_ids

    def get_node_ids() -> Any:
        if ended:
            raise Stopped(f"{ended[0]}; the run can be resumed")
        return look()

    pull = grid.pull_messages

    def pull_messages(message_ids: Any) -> Any:
        get_node_ids()
        return pull(message_ids)

    grid.get_node_ids = get_node_ids  # type: ignore[method-assign]
    grid.pull_messages = pull_messages  # type: ignore[method-assign]
    return grid
