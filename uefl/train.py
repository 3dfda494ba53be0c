"""Library use: own silos, own encoder, a method, a result; nothing is written anywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from uefl.algorithms import FedAvg
from uefl.engines import IN_PROCESS, Serial, chosen
from uefl.federation import Server, Silo
from uefl.models.net import Net
from uefl.noise import key
from uefl.records import Record, summarise


@dataclass(frozen=True)
class Result:
    """What training left: a record of every round, a summary of them, the server and the clients."""

    records: list[Record]
    summary: dict[str, Any]
    server: Server
    clients: Serial

    @property
    def accuracy(self) -> float:
        """mA, mean of the last five rounds."""
        return float(self.summary["mean of last 5"]["mA"])

    @property
    def entropy(self) -> float:
        """mE, mean of the last five rounds."""
        return float(self.summary["mean of last 5"]["mE"])


def train(
    method: FedAvg,
    silos: Sequence[Silo],
    encoder: nn.Module,
    *,
    classes: int,
    hidden: int = 512,
    dropout: float = 0.1,
    augment: str = "",
    seed: int = 0,
    device: str = "cpu",
    engine: str = "auto",
    listen: Callable[[Record], None] = lambda _: None,
) -> Result:
    """Train a method on silos with any encoder; `listen` hears the record of every round."""
    shape = tuple(silos[0].train.x.shape[1:])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(key(seed, "weights"))
        net = method.build(Net(encoder, classes, shape, hidden=hidden, dropout=dropout, augment=augment))
    silos = list(method.prepare(silos))
    engine = chosen(engine, device, net, silos, method.local, method.budget)
    clients = IN_PROCESS[engine](silos, net, seed=seed, device=device)
    server, records = method.start(clients), list[Record]()
    while server.round < method.budget:
        server = method.step(clients, server)
        records += server.records
        for record in server.records:
            listen(record)
        server = server.but(records=())
    return Result(records, summarise(records, {s.name: s.domain for s in silos}), server, clients)
