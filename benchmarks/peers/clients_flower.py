"""Flower's simulation: one virtual node per client, two Ray workers of one thread that map the file of clients.

Flower draws the nodes of a round. Its server cannot address a node by its partition, so a message tells which of the
round's clients its node stands for.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import warnings
from collections.abc import Iterable
from typing import Any

import torch

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch.nn.functional import cross_entropy

from benchmarks.peers.clients_file import (
    BATCH_SIZE,
    CLIENTS_PER_ROUND,
    LR,
    ClientsFile,
    make_layers,
    make_network,
    open_clients,
    parse_arguments,
    report_begin,
    report_model,
    report_round,
)

client_app, server_app = ClientApp(), ServerApp()


@functools.cache
def open_clients_once(file: str, precision: str) -> ClientsFile:
    """Map the file once per process."""
    return open_clients(file, precision)


@client_app.train()
def fit(message: Message, context: Context) -> Message:
    """Train one epoch."""
    del context
    config: Any = message.content["config"]
    clients = open_clients_once(config["file"], config["precision"])
    x, y = clients.load_train(config["server-round"], config["position"])
    net = make_layers().to(clients.dtype)
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())  # type: ignore[union-attr]
    optimizer = torch.optim.SGD(net.parameters(), LR)
    for images, labels in zip(torch.split(x, BATCH_SIZE), torch.split(y, BATCH_SIZE)):
        optimizer.zero_grad()
        cross_entropy(net(images), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    metrics = MetricRecord({"num-examples": len(y)})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)


class ReportingFedAvg(FedAvg):
    """Flower's FedAvg that gives each node of a round one of its clients, and reports when rounds begin and end."""

    has_begun = False

    def configure_train(self, *args: Any, **kwargs: Any) -> Iterable[Message]:
        if not self.has_begun:
            self.has_begun = True
            report_begin()
        messages = list(super().configure_train(*args, **kwargs))
        for position, message in enumerate(messages):
            config: Any = message.content["config"]
            numbered = ConfigRecord({**config, "position": position})
            message.content = RecordDict({**message.content, "config": numbered})
        return messages

    def aggregate_train(self, *args: Any, **kwargs: Any) -> tuple[ArrayRecord | None, MetricRecord | None]:
        result = super().aggregate_train(*args, **kwargs)
        report_round()
        return result


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds."""
    del context
    file, rounds, precision = parse_arguments()
    num_clients = open_clients_once(file, precision).num_clients
    strategy = ReportingFedAvg(
        fraction_train=CLIENTS_PER_ROUND / num_clients,
        fraction_evaluate=0.0,
        min_train_nodes=CLIENTS_PER_ROUND,
        min_available_nodes=num_clients,
    )
    net, config = make_network(file, precision), ConfigRecord({"file": file, "precision": precision})
    result = strategy.start(grid, ArrayRecord(net.state_dict()), rounds, train_config=config)
    net.load_state_dict(result.arrays.to_torch_state_dict())
    report_model(file, net)


def run_federation() -> None:
    """Start the simulation."""
    warnings.simplefilter("ignore")
    logging.getLogger("flwr").setLevel(logging.ERROR)
    backend: Any = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": 2, "include_dashboard": False, "log_to_driver": False, "logging_level": 40},
    }
    run_simulation(server_app, client_app, open_clients_once(sys.argv[1], sys.argv[3]).num_clients, "ray", backend)


if __name__ == "__main__":
    from benchmarks.peers import clients_flower  # Ray's workers look functions up by the module's importable name

    clients_flower.run_federation()
