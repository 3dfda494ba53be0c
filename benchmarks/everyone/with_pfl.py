"""Apple's pfl-research 0.6, after its own examples; its data are tensors in memory too."""

from __future__ import annotations

import logging
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

from benchmarks.everyone.task import BATCH, EVALUATION_BATCH, RATE, asked, network, say


class Net(nn.Module):
    """What pfl asks of a model: a loss and metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.train()
        return cross_entropy(self.net(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        self.eval()
        return {"accuracy": Weighted(int((self.net(x).argmax(1) == y).sum()), len(y))}


class Tell(TrainingProcessCallback):
    """Comes after the evaluation, and says that the round is over."""

    def after_central_iteration(
        self, aggregate_metrics: Any, model: Any, *, central_iteration: int
    ) -> tuple[bool, Any]:
        del model
        found = [value.overall_value for name, value in aggregate_metrics if "accuracy" in str(name)]
        say(found[0] if central_iteration else 0.0)  # pfl's first evaluation comes before the first round
        return False, Metrics()


def main() -> None:
    logging.disable(logging.WARNING)
    task, net = asked(), Net()
    users = FederatedDataset(
        lambda i: Dataset(raw_data=[task.x[i], task.y[i]]), get_user_sampler("minimize_reuse", list(range(len(task.x))))
    )
    model = PyTorchModel(
        model=net, local_optimizer_create=torch.optim.SGD, central_optimizer=torch.optim.SGD(net.parameters(), 1.0)
    )
    held = Dataset(raw_data=[task.test_x.flatten(0, 1), task.test_y.flatten()])
    evaluation = NNEvalHyperParams(local_batch_size=EVALUATION_BATCH)
    np.random.seed(0)
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=task.rounds,
            evaluation_frequency=task.rounds + 1,  # of every user's own training data: nobody else does that
            train_cohort_size=len(task.x),
            val_cohort_size=None,
        ),
        backend=SimulatedBackend(training_data=users, val_data=users),
        model=model,
        model_train_params=NNTrainHyperParams(local_num_epochs=1, local_learning_rate=RATE, local_batch_size=BATCH),
        model_eval_params=evaluation,
        callbacks=[CentralEvaluationCallback(held, evaluation), Tell()],
    )


if __name__ == "__main__":
    main()
