"""FedSR: a code of small norm that carries little information about an image beyond its label.

Nguyen, Torr, Lim, FedSR: a simple and effective domain generalization method for federated learning (NeurIPS 2022).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uefl.algorithms.fedavg import FedAvg
from uefl.algorithms.requirements import require_single_network
from uefl.core.federation import Batch, ClientModel
from uefl.core.field_rules import setting
from uefl.models.gaussian import MIN_DEVIATION, Gaussian, kl_divergence

PRIOR_PREFIX = "prior."


class ClassPrior(nn.Module):
    """r(z|y) = N(r_μ[y], σ_r[y]²), and the scale C₀ by which codes are multiplied before they are compared with it."""

    def __init__(self, num_classes: int, code_size: int) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(num_classes, code_size))
        self.raw = nn.Parameter(torch.ones(num_classes, code_size))  # σ_r = softplus(raw)
        self.log_scale = nn.Parameter(torch.zeros(()))  # C₀ = exp(log_scale) > 0

    def forward(self, y: Tensor) -> Gaussian:
        """Return the prior of each label."""
        return Gaussian(F.embedding(y, self.mean), F.softplus(F.embedding(y, self.raw)) + MIN_DEVIATION)

    def scale_code(self, q: Gaussian) -> Gaussian:
        """Return the distribution of C₀ z."""
        scale = self.log_scale.exp()
        return Gaussian(scale * q.mean, scale * q.deviation)


@dataclass(frozen=True, kw_only=True)
class FedSR(FedAvg):
    """FedAvg on a Gaussian code of bounded norm, close to a class prior that stays at the silo.

    With a codebook, features are quantized first and the code is drawn from the codewords.
    """

    l2r: float = setting(0.01, "Weight α_L2R of the norm of the code.", at_least=0)
    cmi: float = setting(0.001, "Weight α_CMI of the divergence from the class prior, a sum over D.", at_least=0)
    code_size: int = setting(0, "Size D of the code; 0 takes the size of the hidden layer.", at_least=0)
    eval_draws: int = setting(20, "Codes per image whose predictions are averaged in evaluation.", at_least=1)

    def adapt_network(self, net: nn.Module) -> nn.Module:
        built = require_single_network(net, "FedSR").use_gaussian_classifier(self.code_size, self.eval_draws)
        built.prior = ClassPrior(built.num_classes, self.code_size or built.hidden_size)
        return super().adapt_network(built)

    def client_state_names(self, net: nn.Module) -> Collection[str]:
        return [*super().client_state_names(net), *(n for n in net.state_dict() if n.startswith(PRIOR_PREFIX))]

    def personal_tensor_names(self, net: nn.Module) -> Collection[str]:
        return super().client_state_names(net)  # the class prior is part of the loss only

    def loss(self, model: ClientModel, batch: Batch) -> Tensor:
        quantized = model.call("encode_and_quantize", batch.x)
        q = model.call("classifier.posterior", quantized.z.flatten(1))
        z = model.call("classifier.sample", *q)  # [B, D]
        logits = model.call("classifier.head", z)
        # L = CE + α_L2R E‖z‖ + α_CMI E KL(N(C₀μ, C₀²σ²) ‖ N(r_μ[y], σ_r[y]²)); the norm is not squared
        norm: Tensor = torch.linalg.vector_norm(z, dim=-1).mean()
        divergence = kl_divergence(model.call("prior.scale_code", q), model.call("prior", batch.y)).mean()
        task = self.task_and_code_loss(model, logits.unsqueeze(0), quantized, batch)
        return task + self.l2r * norm + self.cmi * divergence
