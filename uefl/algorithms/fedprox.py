"""FedProx: a proximal term keeps local weights near the received ones.

Li et al., Federated optimization in heterogeneous networks (MLSys 2020).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from uefl.algorithms.fedavg import FedAvg
from uefl.core.federation import Batch, ClientModel
from uefl.core.field_rules import setting


@dataclass(frozen=True, kw_only=True)
class FedProx(FedAvg):
    """FedAvg with the proximal term μ/2 ‖θ − θ_global‖² in the local loss."""

    mu: float = setting(0.01, "Weight μ of the proximal term.", at_least=0)

    def loss(self, model: ClientModel, batch: Batch) -> Tensor:
        # Only parameters that the server sent: batch-norm statistics are no weights, client state has no global value.
        received = {n: t for n, t in model.received_state.items() if n in model.params}
        distances = [(p - received[n]).square().sum() for n, p in model.params.items() if n in received]
        return super().loss(model, batch) + self.mu / 2 * torch.stack(distances).sum()
