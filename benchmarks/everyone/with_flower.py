"""Flower's simulation: its own strategy, two Ray workers of one thread each, data cached in every worker."""

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

from benchmarks.everyone.plain import correct, train
from benchmarks.everyone.task import Task, load, network, say

client, server = ClientApp(), ServerApp()


@functools.cache
def data(file: str) -> Task:
    return load(file)


def received(message: Message) -> torch.nn.Module:
    net = network()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())  # type: ignore[union-attr]
    return net


@client.train()
def fit(message: Message, context: Context) -> Message:
    task, k = data(str(message.content["config"]["file"])), int(context.node_config["partition-id"])  # type: ignore[index,call-overload]
    net = received(message)
    train(net, task.x[k], task.y[k])
    metrics = MetricRecord({"num-examples": len(task.y[k])})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)


@client.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    task, k = data(str(message.content["config"]["file"])), int(context.node_config["partition-id"])  # type: ignore[index,call-overload]
    right = correct(received(message), task.test_x[k], task.test_y[k])
    n = len(task.test_y[k])
    return Message(RecordDict({"metrics": MetricRecord({"num-examples": n, "accuracy": right / n})}), reply_to=message)


class Told(FedAvg):
    """The stock strategy, but it says when a round is over."""

    def aggregate_evaluate(self, *args: Any, **kwargs: Any) -> MetricRecord | None:
        found = super().aggregate_evaluate(*args, **kwargs)
        say(float(found["accuracy"]) if found else float("nan"))  # type: ignore[arg-type]
        return found


@server.main()
def main(grid: Grid, context: Context) -> None:
    del context
    file, rounds = sys.argv[1], int(sys.argv[2])
    k = len(data(file).x)
    strategy = Told(min_train_nodes=k, min_evaluate_nodes=k, min_available_nodes=k)
    config = ConfigRecord({"file": file})
    first = ArrayRecord(network().state_dict())
    strategy.start(grid, first, rounds, train_config=config, evaluate_config=config)


def start() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("flwr").setLevel(logging.ERROR)
    backend: Any = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": 2, "include_dashboard": False, "log_to_driver": False, "logging_level": 40},
    }
    run_simulation(server, client, len(data(sys.argv[1]).x), "ray", backend)


if __name__ == "__main__":
    from benchmarks.everyone.with_flower import start as begin  # workers find functions by their module's real name

    begin()
