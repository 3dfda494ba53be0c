"""uefl. The network has no dropout here, so one sample gives the prediction.

After the final weights, the fifth argument is the engine, `serial` without it, and the sixth its number of workers.
"""

from __future__ import annotations

import sys

from torch import Tensor

from benchmarks.peers.workload import (
    BATCH_SIZE,
    EVAL_BATCH_SIZE,
    HIDDEN,
    LR,
    NUM_CLASSES,
    SEED,
    Workload,
    make_encoder,
    name_silo,
    parse_arguments,
    report_round,
    save_weights,
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
        Silo(name_silo(i), Examples(x, y), empty, Examples(test_x, test_y))
        for i, (x, y, test_x, test_y) in enumerate(tensors)
    ]
    local = LocalTraining(
        optimizer="sgd", momentum=0.0, lr=LR, batch_size=BATCH_SIZE, epochs=1, eval_batch_size=EVAL_BATCH_SIZE
    )
    method = FedAvg(rounds=workload.rounds, iterations=1, mc_samples=1, evaluate_local=False, local=local)
    net = Net(make_encoder(), NUM_CLASSES, (1, 28, 28), hidden_size=HIDDEN, dropout=0.0, feature_norm="none")
    initial = {n: reorder_columns(t, to_tokens=True) for n, t in workload.initial.items()}
    net.load_state_dict(dict(zip(net.state_dict(), initial.values(), strict=True)))
    settings = {"num_workers": num_workers} if engine == "processes" else {}
    clients: SerialEngine = ENGINES[engine](silos, net, seed=SEED, dtype=workload.x.dtype, **settings)
    return method, clients, method.initialize_server(clients)


def reorder_columns(weight: Tensor, *, to_tokens: bool) -> Tensor:
    """Reorder the columns of the layer behind the encoder: uefl has the channels of each position together."""
    if weight.shape != (HIDDEN, 1568):
        return weight
    shape, order = ((HIDDEN, 32, 7, 7), (0, 2, 3, 1)) if to_tokens else ((HIDDEN, 7, 7, 32), (0, 3, 1, 2))
    return weight.reshape(shape).permute(order).reshape(HIDDEN, 1568)


def main() -> None:
    """Run the federation."""
    workload, engine = parse_arguments(), sys.argv[5] if len(sys.argv) > 5 else "serial"
    method, clients, server = start_federation(workload, engine, int(sys.argv[6]) if len(sys.argv) > 6 else 0)
    for _ in range(workload.rounds):
        server = method.step(clients, server)
        # A round's model is evaluated when the next round begins, the last one's at the end.
        records = server.completed_records
        report_round(mean_metric(records[-1]["silos"].values(), "accuracy") if records else 0.0)
    save_weights({n: reorder_columns(t, to_tokens=False) for n, t in server.model_state.items()})
    clients.release()


if __name__ == "__main__":
    main()
