"""Ours. The network has no dropout here, so one pass says all there is to say of a prediction."""

from __future__ import annotations

import torch

from benchmarks.everyone.task import BATCH, CLASSES, EVALUATION_BATCH, HIDDEN, RATE, SEED, Task, asked, encoder, say
from uefl.algorithms import FedAvg
from uefl.engines import Serial
from uefl.federation import Part, Server, Silo
from uefl.local import Local
from uefl.metrics import mean_over
from uefl.models.net import Net


def begun(task: Task) -> tuple[FedAvg, Serial, Server]:
    parts = zip(task.x, task.y, task.test_x, task.test_y)
    none = Part(task.x[0, :0], task.y[0, :0])
    silos = [Silo(f"s{i}", Part(x, y), none, Part(a, b)) for i, (x, y, a, b) in enumerate(parts)]
    local = Local(optimizer="sgd", momentum=0.0, rate=RATE, batch=BATCH, epochs=1, evaluation_batch=EVALUATION_BATCH)
    method = FedAvg(rounds=task.rounds, iterations=1, passes=1, watch_local=False, local=local)
    torch.manual_seed(SEED)
    net = Net(encoder(), CLASSES, (1, 28, 28), hidden=HIDDEN, dropout=0.0, normalise="none")
    clients = Serial(silos, net, seed=SEED)
    return method, clients, method.start(clients)


def main() -> None:
    task = asked()
    method, clients, server = begun(task)
    for _ in range(task.rounds):
        server = method.step(clients, server)
        # A round's model is measured when the next one begins, the last one's at the end.
        say(mean_over(server.records[-1]["silos"].values(), "accuracy") if server.records else 0.0)


if __name__ == "__main__":
    main()
