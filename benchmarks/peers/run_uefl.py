"""uefl. The network has no dropout here, so one sample gives the prediction.

The third argument is the engine, `serial` without it, and the fourth the number of its workers.
"""

from __future__ import annotations

import sys

import torch

from benchmarks.peers.workload import (
    BATCH_SIZE,
    EVAL_BATCH_SIZE,
    HIDDEN,
    LR,
    NUM_CLASSES,
    SEED,
    Workload,
    make_encoder,
    parse_arguments,
    report_round,
)
from uefl.algorithms.fedavg import FedAvg
from uefl.core.federation import Examples, ServerState, Silo
from uefl.core.local import LocalTraining
from uefl.core.metrics import mean_metric
from uefl.engines import ENGINES
from uefl.engines.serial import SerialEngine
from uefl.models.network import Net


def start_federation(
    workload: Workload, engine: str = "serial", num_workers: int = 0
) -> tuple[FedAvg, SerialEngine, ServerState]:
    """Make the method, the clients and the initial server state."""
    tensors = zip(workload.x, workload.y, workload.test_x, workload.test_y)
    empty = Examples(workload.x[0, :0], workload.y[0, :0])
    silos = [
        Silo(f"s{i}", Examples(x, y), empty, Examples(test_x, test_y))
        for i, (x, y, test_x, test_y) in enumerate(tensors)
    ]
    local = LocalTraining(
        optimizer="sgd", momentum=0.0, lr=LR, batch_size=BATCH_SIZE, epochs=1, eval_batch_size=EVAL_BATCH_SIZE
    )
    method = FedAvg(rounds=workload.rounds, iterations=1, mc_samples=1, evaluate_local=False, local=local)
    torch.manual_seed(SEED)
    net = Net(make_encoder(), NUM_CLASSES, (1, 28, 28), hidden_size=HIDDEN, dropout=0.0, feature_norm="none")
    settings = {"num_workers": num_workers} if engine == "processes" else {}
    clients: SerialEngine = ENGINES[engine](silos, net, seed=SEED, **settings)
    return method, clients, method.initialize_server(clients)


def main() -> None:
    """Run the federation."""
    workload, engine = parse_arguments(), sys.argv[3] if len(sys.argv) > 3 else "serial"
    method, clients, server = start_federation(workload, engine, int(sys.argv[4]) if len(sys.argv) > 4 else 0)
    for _ in range(workload.rounds):
        server = method.step(clients, server)
        # A round's model is evaluated when the next round begins, the last one's at the end.
        records = server.completed_records
        report_round(mean_metric(records[-1]["silos"].values(), "accuracy") if records else 0.0)
    clients.release()


if __name__ == "__main__":
    main()
