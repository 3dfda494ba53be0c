"""Apple's pfl-research: its federated dataset reads a client from the mapped file when it is drawn.

pfl weights clients alike unless told otherwise. Its batches are the examples in the order in which they are given.
"""

from __future__ import annotations

import itertools
import logging
from functools import partial
from typing import Any

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.peers.clients_file import (
    BATCH_SIZE,
    CLIENTS_PER_ROUND,
    LR,
    make_network,
    open_clients,
    parse_arguments,
    report_begin,
    report_model,
    report_round,
)
from benchmarks.peers.workload import DTYPES


class PflModel(nn.Module):
    """The interface that pfl requires of a model: a loss and metrics."""

    def __init__(self, path: str, precision: str) -> None:
        super().__init__()
        self.net, self.dtype = make_network(path, precision), DTYPES[precision]

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.train()
        return cross_entropy(self.net(x.to(self.dtype)), y)  # pfl passes float32

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        del x, y
        return {}


class RoundReporter(TrainingProcessCallback):
    """Report the end of a round."""

    def after_central_iteration(
        self, aggregate_metrics: Any, model: Any, *, central_iteration: int
    ) -> tuple[bool, Any]:
        del aggregate_metrics, model, central_iteration
        report_round()
        return False, Metrics()


def main() -> None:
    """Run the federation."""
    logging.disable(logging.WARNING)
    (file, rounds, precision), has_begun = parse_arguments(), False
    net, clients = PflModel(file, precision), open_clients(file, precision)

    def make_dataset(user: tuple[int, int]) -> Dataset:
        nonlocal has_begun
        if not has_begun:
            has_begun = True
            report_begin()
        return Dataset(raw_data=list(clients.load_train(*user)))

    schedule = itertools.product(range(1, rounds + 1), range(CLIENTS_PER_ROUND))  # round and position of each user
    users = FederatedDataset(make_dataset, partial(next, schedule))
    model = PyTorchModel(
        model=net, local_optimizer_create=torch.optim.SGD, central_optimizer=torch.optim.SGD(net.parameters(), 1.0)
    )
    np.random.seed(0)
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds + 1,
            train_cohort_size=CLIENTS_PER_ROUND,
            val_cohort_size=None,
        ),
        backend=SimulatedBackend(users, users, [WeightByDatapoints()]),
        model=model,
        model_train_params=NNTrainHyperParams(local_num_epochs=1, local_learning_rate=LR, local_batch_size=BATCH_SIZE),
        model_eval_params=NNEvalHyperParams(local_batch_size=BATCH_SIZE),
        callbacks=[RoundReporter()],
    )
    report_model(file, net.net)


if __name__ == "__main__":
    main()
