"""uefl: `uefl run fedavg tensors path=FILE` as a user runs it, with records and checkpoints of every round.

After the final weights, the fifth argument is the number of clients that measure the model of every round; 0 measures
only after the last.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks.peers.clients_file import (
    BATCH_SIZE,
    CLIENTS_PER_ROUND,
    LR,
    SEED,
    Schedule,
    make_network,
    parse_arguments,
    report_begin,
    report_middle,
    report_model,
    report_round,
)
from uefl.algorithms.fedavg import FedAvg, draw_names
from uefl.core import noise_addresses as addresses
from uefl.core.local import LocalTraining
from uefl.core.noise import derive_key, permutation
from uefl.data.config import DataConfig
from uefl.experiment.checkpoint import load_checkpoint
from uefl.experiment.experiment import Experiment, Precision
from uefl.experiment.run import run
from uefl.experiment.run_folder import RunFolder
from uefl.models.model_config import ModelConfig


def make_experiment(file: str, rounds: int, eval_clients: int = 0, precision: Precision = "float32") -> Experiment:
    """Return the experiment of this workload."""
    local = LocalTraining(optimizer="sgd", momentum=0.0, lr=LR, batch_size=BATCH_SIZE, epochs=1)
    method = FedAvg(
        rounds=rounds,
        iterations=1,
        clients_per_round=CLIENTS_PER_ROUND,
        eval_clients=eval_clients or CLIENTS_PER_ROUND,
        evaluate_every=1 if eval_clients else rounds + 1,
        mc_samples=1,
        local=local,
    )
    everything: dict[str, Any] = {"shifts": (), "num_silos": (), "train_per_silo": 0, "test_per_silo": 0}
    data = DataConfig(name="tensors", path=file, partitioner="natural", validation_fraction=0, **everything)
    model = ModelConfig(encoder="lenet-fmnist", width=64, hidden_size=32, dropout=0.0, feature_norm="none")
    return Experiment(method=method, data=data, model=model, seed=SEED, precision=precision)


def draw_schedule(experiment: Experiment) -> Schedule:
    """Draw the clients of every round and the order of their training images, as a run of this experiment does."""
    participants, orders = [], []
    trainable = {
        partition.silo.name: partition.train
        for partition in experiment.data.make_partitions(experiment.data.read_images(), SEED)
    }
    for round_number in range(1, experiment.method.rounds + 1):
        key = derive_key(SEED, round_number, addresses.PARTICIPANTS)
        drawn = sorted(draw_names(key, list(trainable), CLIENTS_PER_ROUND))
        participants.append([int(name) for name in drawn])
        for name in drawn:
            order_key = derive_key(SEED, name, round_number, 0, addresses.BATCH_ORDER)
            orders.append(trainable[name][permutation(order_key, len(trainable[name]))])
    starts = torch.tensor([0, *itertools.accumulate(map(len, orders))])
    return Schedule(torch.tensor(participants), torch.cat(orders), starts)


def main() -> None:
    """Run the federation."""
    (file, rounds, precision), trained = parse_arguments(), 0

    def on_event(event: dict[str, Any]) -> None:
        nonlocal trained
        if event["kind"] == "silo" and event["activity"] == "training":
            if trained % CLIENTS_PER_ROUND == 0:
                report_round() if trained else report_begin()
            trained += 1
            if trained % CLIENTS_PER_ROUND == CLIENTS_PER_ROUND // 2:
                report_middle()

    with tempfile.TemporaryDirectory() as folder:
        experiment = make_experiment(file, rounds, int(sys.argv[5]), cast(Precision, precision))
        path = run(experiment, Path(folder), engine="serial", on_event=on_event)
        report_round()
        server, _ = load_checkpoint(RunFolder(path).server_path, "cpu")
    net = make_network(file, precision)
    net.load_state_dict(dict(zip(net.state_dict(), server.model_state.values(), strict=True)))
    report_model(file, net)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
