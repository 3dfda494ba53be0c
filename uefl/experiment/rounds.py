"""The loop over rounds that every run, training, study and test uses."""

from __future__ import annotations

from collections.abc import Iterator

from uefl.algorithms.fedavg import FedAvg
from uefl.core.federation import Clients, ServerState


def iterate_rounds(
    method: FedAvg, clients: Clients, server: ServerState | None = None, *, num_rounds: int | None = None
) -> Iterator[ServerState]:
    """Run the remaining rounds, or `num_rounds` of them, and yield the server after each, with its completed records.

    Without a server, training starts from the initial model.
    """
    server = server or method.initialize_server(clients)
    last_round = method.total_rounds if num_rounds is None else server.round + num_rounds
    while server.round < last_round:
        server = method.step(clients, server)
        yield server
