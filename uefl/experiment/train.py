"""Train a method from Python on your own silos and encoder; nothing is written to disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from uefl.algorithms.fedavg import FedAvg
from uefl.algorithms.requirements import require_enough_silos
from uefl.core.errors import unknown_value_error
from uefl.core.federation import ServerState, Silo
from uefl.engines import ENGINES, IN_PROCESS_ENGINES
from uefl.engines.choosing import choose_engine
from uefl.engines.serial import SerialEngine
from uefl.experiment.records import DEFAULT_AGGREGATION, Record, summarize_records
from uefl.experiment.rounds import iterate_rounds
from uefl.models.network import Net, initialize_network


@dataclass(frozen=True)
class TrainingResult:
    """A record of every round, their summary, the final server and the clients."""

    records: list[Record]
    summary: dict[str, Any]
    server: ServerState
    clients: SerialEngine

    @property
    def accuracy(self) -> float:
        """mA, the mean accuracy over silos, averaged over the last five rounds."""
        return float(self.summary[DEFAULT_AGGREGATION]["mA"])

    @property
    def entropy(self) -> float:
        """mE, the mean predictive entropy over silos, averaged over the last five rounds."""
        return float(self.summary[DEFAULT_AGGREGATION]["mE"])


def train(
    method: FedAvg,
    silos: Sequence[Silo],
    encoder: nn.Module,
    *,
    num_classes: int,
    hidden_size: int = 512,
    dropout: float = 0.1,
    augment: str = "",
    seed: int = 0,
    device: str = "cpu",
    engine: str = "auto",
    on_record: Callable[[Record], None] = lambda _: None,
) -> TrainingResult:
    """Train a method on silos with any encoder; `on_record` is called with the record of every round."""
    if engine not in ("auto", *IN_PROCESS_ENGINES):
        raise unknown_value_error("engine", engine, ("auto", *IN_PROCESS_ENGINES))
    input_shape = tuple(silos[0].train.x.shape[1:])
    build = partial(Net, encoder, num_classes, input_shape, hidden_size=hidden_size, dropout=dropout, augment=augment)
    net = initialize_network(seed, build, method.adapt_network)
    silos = list(method.prepare_silos(require_enough_silos(silos, method.clients_per_round)))
    engine = choose_engine(engine, device, net, silos, method.local, method.total_rounds)
    clients = ENGINES[engine](silos, net, seed=seed, device=device)
    records: list[Record] = []
    for server in iterate_rounds(method, clients):
        records += server.completed_records
        for record in server.completed_records:
            on_record(record)
    clients.release()
    summary = summarize_records(records, {silo.name: silo.domain for silo in silos})
    return TrainingResult(records, summary, server.replace(completed_records=()), clients)
