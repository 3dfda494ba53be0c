"""FedProx: local weights stay near the ones they started from.

Li et al., Federated optimization in heterogeneous networks (MLSys 2020).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from uefl.algorithms.checks import not_negative
from uefl.algorithms.fedavg import FedAvg
from uefl.federation import Batch, Model


@dataclass(frozen=True, kw_only=True)
class FedProx(FedAvg):
    """FedAvg with a pull towards the broadcast weights: μ/2 ‖θ − θ_global‖²."""

    mu: float = 0.01  # μ

    def __post_init__(self) -> None:
        super().__post_init__()
        not_negative(self, "mu")

    def loss(self, model: Model, batch: Batch) -> Tensor:
        # Parameters only: the statistics of batch norm are no weights. What a silo keeps has nothing to return to.
        far = [(p - model.received[n]).square().sum() for n, p in model.params.items() if n in model.received]
        return super().loss(model, batch) + self.mu / 2 * torch.stack(far).sum()
