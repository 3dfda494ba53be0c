"""Apple's pfl-research 0.6, following its examples; its data are tensors in memory too.

With several workers, which `torchrun` starts, the first one prints the rounds. pfl's sampler for silos gives a worker
the same silos in every round. Without it, workers draw from a common cycle, each at its own speed: of nine silos and
two workers, one silo trains twice in the second round and another one not at all.
"""

from __future__ import annotations

import logging
import os
from typing import Any

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.callback.central_evaluation import CentralEvaluationCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.peers.workload import (
    BATCH_SIZE,
    EVAL_BATCH_SIZE,
    LR,
    Workload,
    draw_order,
    parse_arguments,
    report_round,
    save_weights,
    start_network,
)


class PflModel(nn.Module):
    """The interface that pfl requires of a model: a loss and metrics."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.net, self.dtype = start_network(workload), workload.x.dtype

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.train()
        return cross_entropy(self.net(x.to(self.dtype)), y)  # pfl passes float32

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        self.eval()
        return {"accuracy": Weighted(int((self.net(x.to(self.dtype)).argmax(1) == y).sum()), len(y))}


class RoundReporter(TrainingProcessCallback):
    """Report the end of a round, after the evaluation, and number the round that comes next."""

    def __init__(self) -> None:
        self.round_number = 1  # of the present round

    def after_central_iteration(
        self, aggregate_metrics: Any, model: Any, *, central_iteration: int
    ) -> tuple[bool, Any]:
        del model
        accuracies = [value.overall_value for name, value in aggregate_metrics if "accuracy" in str(name)]
        if os.environ.get("RANK", "0") == "0":
            report_round(accuracies[0] if central_iteration else 0.0)  # pfl first evaluates before the first round
        self.round_number = central_iteration + 2  # pfl counts from 0
        return False, Metrics()


def make_users(workload: Workload, reporter: RoundReporter) -> FederatedDataset:
    """Make a dataset from which every silo is drawn once per round, with its examples in the order of that round."""

    def make_dataset(silo: int) -> Dataset:
        order = draw_order(silo, reporter.round_number, len(workload.y[silo]))  # pfl makes batches of it as it is
        return Dataset(raw_data=[workload.x[silo][order], workload.y[silo][order]])

    silos = list(range(len(workload.x)))
    return FederatedDataset(make_dataset, get_user_sampler("minimize_reuse", silos, num_silos=len(silos)))


def main() -> None:
    """Run the federation."""
    logging.disable(logging.WARNING)
    workload = parse_arguments()
    net, reporter = PflModel(workload), RoundReporter()
    users = make_users(workload, reporter)
    model = PyTorchModel(
        model=net, local_optimizer_create=torch.optim.SGD, central_optimizer=torch.optim.SGD(net.parameters(), 1.0)
    )
    test = Dataset(raw_data=[workload.test_x.flatten(0, 1), workload.test_y.flatten()])
    eval_params = NNEvalHyperParams(local_batch_size=EVAL_BATCH_SIZE)
    np.random.seed(0)
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=workload.rounds,
            evaluation_frequency=workload.rounds + 1,  # no evaluation on training data: no other contender has it
            train_cohort_size=len(workload.x),
            val_cohort_size=None,
        ),
        backend=SimulatedBackend(training_data=users, val_data=users),
        model=model,
        model_train_params=NNTrainHyperParams(local_num_epochs=1, local_learning_rate=LR, local_batch_size=BATCH_SIZE),
        model_eval_params=eval_params,
        callbacks=[CentralEvaluationCallback(test, eval_params), reporter],
    )
    save_weights(net.net.state_dict())


if __name__ == "__main__":
    main()
