"""Flower's simulation with its strategy FedAvg, Ray workers of one thread each, data cached in every worker.

The third argument is the number of workers, two without it.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import warnings
from typing import Any

import torch

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from benchmarks.peers.run_pytorch import count_correct, train_epoch
from benchmarks.peers.workload import (
    Workload,
    draw_order,
    load_workload,
    make_network,
    report_round,
    save_weights,
    start_network,
)

client_app, server_app = ClientApp(), ServerApp()


@functools.cache
def load_cached_workload(file: str, precision: str) -> Workload:
    """Load the workload once per process."""
    return load_workload(file, precision=precision)


def read_request(message: Message, context: Context) -> tuple[Workload, int]:
    """Return the workload and the number of the silo that a message is for."""
    config: Any = message.content["config"]
    return load_cached_workload(config["file"], config["precision"]), int(context.node_config["partition-id"])


def load_received_network(message: Message, workload: Workload) -> torch.nn.Module:
    """Return the network with the received weights."""
    net = make_network().to(workload.x.dtype)
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())  # type: ignore[union-attr]
    return net


@client_app.train()
def fit(message: Message, context: Context) -> Message:
    """Train one epoch."""
    workload, k = read_request(message, context)
    net, config = load_received_network(message, workload), message.content["config"]
    order = draw_order(k, int(config["server-round"]), len(workload.y[k]))  # type: ignore[arg-type,index,call-overload]
    train_epoch(net, workload.x[k], workload.y[k], order)
    metrics = MetricRecord({"num-examples": len(workload.y[k])})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)


@client_app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate on the test images."""
    workload, k = read_request(message, context)
    correct = count_correct(load_received_network(message, workload), workload.test_x[k], workload.test_y[k])
    n = len(workload.test_y[k])
    return Message(
        RecordDict({"metrics": MetricRecord({"num-examples": n, "accuracy": correct / n})}), reply_to=message
    )


class ReportingFedAvg(FedAvg):
    """Flower's FedAvg that reports the end of every round."""

    def aggregate_evaluate(self, *args: Any, **kwargs: Any) -> MetricRecord | None:
        metrics = super().aggregate_evaluate(*args, **kwargs)
        report_round(float(metrics["accuracy"]) if metrics else float("nan"))  # type: ignore[arg-type]
        return metrics


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds."""
    del context
    file, rounds, precision = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    workload = load_cached_workload(file, precision)
    num_silos = len(workload.x)
    strategy = ReportingFedAvg(min_train_nodes=num_silos, min_evaluate_nodes=num_silos, min_available_nodes=num_silos)
    config = ConfigRecord({"file": file, "precision": precision})
    initial_weights = ArrayRecord(start_network(workload).state_dict())
    result = strategy.start(grid, initial_weights, rounds, train_config=config, evaluate_config=config)
    save_weights(result.arrays.to_torch_state_dict())


def run_federation() -> None:
    """Start the simulation."""
    warnings.simplefilter("ignore")
    logging.getLogger("flwr").setLevel(logging.ERROR)
    num_workers = int(sys.argv[5]) if len(sys.argv) > 5 else 2
    backend: Any = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": num_workers, "include_dashboard": False, "log_to_driver": False, "logging_level": 40},
    }
    run_simulation(server_app, client_app, len(load_cached_workload(sys.argv[1], sys.argv[3]).x), "ray", backend)


if __name__ == "__main__":
    from benchmarks.peers import run_flower  # Ray's workers look functions up by the module's importable name

    run_flower.run_federation()
