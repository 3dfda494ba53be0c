"""Flower's simulation: one virtual node per client, two Ray workers of one thread that map the file of clients."""

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
    report_accuracy,
    report_begin,
    report_round,
)

client_app, server_app = ClientApp(), ServerApp()


@functools.cache
def open_clients_once(file: str) -> ClientsFile:
    """Map the file once per process."""
    return open_clients(file)


@client_app.train()
def fit(message: Message, context: Context) -> Message:
    """Train one epoch."""
    clients = open_clients_once(str(message.content["config"]["file"]))  # type: ignore[index,call-overload]
    x, y = clients.load_train(int(context.node_config["partition-id"]))
    net = make_layers()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())  # type: ignore[union-attr]
    optimizer = torch.optim.SGD(net.parameters(), LR)
    for indices in torch.split(torch.randperm(len(y)), BATCH_SIZE):
        optimizer.zero_grad()
        cross_entropy(net(x[indices]), y[indices]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    metrics = MetricRecord({"num-examples": len(y)})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)


class ReportingFedAvg(FedAvg):
    """Flower's FedAvg that reports the begin of the first round and the end of every round."""

    has_begun = False

    def configure_train(self, *args: Any, **kwargs: Any) -> Iterable[Message]:
        if not self.has_begun:
            self.has_begun = True
            report_begin()
        return super().configure_train(*args, **kwargs)

    def aggregate_train(self, *args: Any, **kwargs: Any) -> tuple[ArrayRecord | None, MetricRecord | None]:
        result = super().aggregate_train(*args, **kwargs)
        report_round()
        return result


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds."""
    del context
    file, rounds = parse_arguments()
    num_clients = open_clients_once(file).num_clients
    strategy = ReportingFedAvg(
        fraction_train=CLIENTS_PER_ROUND / num_clients,
        fraction_evaluate=0.0,
        min_train_nodes=CLIENTS_PER_ROUND,
        min_available_nodes=num_clients,
    )
    net = make_network(file)
    result = strategy.start(grid, ArrayRecord(net.state_dict()), rounds, train_config=ConfigRecord({"file": file}))
    net.load_state_dict(result.arrays.to_torch_state_dict())
    report_accuracy(file, net)


def run_federation() -> None:
    """Start the simulation."""
    warnings.simplefilter("ignore")
    logging.getLogger("flwr").setLevel(logging.ERROR)
    backend: Any = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": 2, "include_dashboard": False, "log_to_driver": False, "logging_level": 40},
    }
    run_simulation(server_app, client_app, open_clients_once(sys.argv[1]).num_clients, "ray", backend)


if __name__ == "__main__":
    from benchmarks.peers import clients_flower  # Ray's workers look functions up by the module's importable name

    clients_flower.run_federation()
