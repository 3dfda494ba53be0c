"""FedSR: a code of small norm that says little about the image beyond its label.

Nguyen, Torr, Lim, FedSR: a simple and effective domain generalization method for federated learning (NeurIPS 2022).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uefl.algorithms.checks import at_least_one, not_negative, one_network
from uefl.algorithms.fedavg import FedAvg
from uefl.federation import Batch, Model
from uefl.gaussian import LEAST, Gaussian, divergence

PRIOR = "prior."


class Prior(nn.Module):
    """r(z|y) = N(r_μ[y], σ_r[y]²), and the scale C₀ that frees its comparison with z from the size of z."""

    def __init__(self, classes: int, dimensions: int) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(classes, dimensions))
        self.raw = nn.Parameter(torch.ones(classes, dimensions))  # σ_r = softplus(raw)
        self.log_scale = nn.Parameter(torch.zeros(()))  # C₀ = exp(log_scale) > 0, or its logarithm would be lost

    def forward(self, y: Tensor) -> Gaussian:
        """The prior of each label."""
        return Gaussian(F.embedding(y, self.mean), F.softplus(F.embedding(y, self.raw)) + LEAST)

    def scaled(self, q: Gaussian) -> Gaussian:
        """The distribution of C₀ z."""
        scale = self.log_scale.exp()
        return Gaussian(scale * q.mean, scale * q.deviation)


@dataclass(frozen=True, kw_only=True)
class FedSR(FedAvg):
    """FedAvg on a Gaussian code of bounded norm, close to a prior of its class that every silo keeps to itself.

    With a codebook, encoder features become words first and the code is drawn from those.
    """

    l2r: float = 0.01  # α_L2R
    cmi: float = 0.001  # α_CMI; the divergence is a sum over D, so it grows with D
    dimensions: int = 0  # D of the code; 0: as wide as the classifier's hidden layer
    draws: int = 20  # codes whose predictions are averaged at test time

    def __post_init__(self) -> None:
        super().__post_init__()
        not_negative(self, "l2r", "cmi", "dimensions")
        at_least_one(self, "draws")

    def build(self, net: nn.Module) -> nn.Module:
        built = one_network(net, "FedSR").with_gaussian(self.dimensions, self.draws)
        built.prior = Prior(built.classes, self.dimensions or built.hidden)
        return super().build(built)

    def keeps(self, net: nn.Module) -> Collection[str]:
        return [*super().keeps(net), *(n for n in net.state_dict() if n.startswith(PRIOR))]

    def loss(self, model: Model, batch: Batch) -> Tensor:
        coded = model.call("represent", batch.x)
        q = model.call("classifier.posterior", coded.z.flatten(1))
        z = model.call("classifier.sample", *q)  # [B, D]
        logits = model.call("classifier.head", z)
        # L = CE + α_L2R E‖z‖ + α_CMI E KL(N(C₀μ, C₀²σ²) ‖ N(r_μ[y], σ_r[y]²)); the norm is not squared
        small: Tensor = torch.linalg.vector_norm(z, dim=-1).mean()
        close = divergence(model.call("prior.scaled", q), model.call("prior", batch.y)).mean()
        task = self.task(logits.unsqueeze(0), coded, batch)
        return task + self.l2r * small + self.cmi * close
