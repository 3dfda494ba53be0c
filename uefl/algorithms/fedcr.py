"""FedCR: a shared body, a personal head per silo, and class priors from the product of all silos' codes.

Zhang et al., FedCR: personalized federated learning based on across-client common representation with conditional
mutual information regularization (ICML 2023).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uefl.algorithms.fedavg import FedAvg
from uefl.algorithms.requirements import require_single_network, require_training_data
from uefl.core.aggregate import sum_tensors
from uefl.core.federation import (
    Batch,
    Broadcast,
    ClientModel,
    Clients,
    Examples,
    Reply,
    ServerState,
    Silo,
    Tensors,
    Update,
)
from uefl.core.field_rules import setting
from uefl.core.label_prior import adjust_logits
from uefl.core.local import clip_grad_norm
from uefl.models.gaussian import Gaussian, kl_divergence

HEAD_PREFIX = "classifier.head."
PRIOR_MEAN, PRIOR_DEVIATION = "prior.mean", "prior.deviation"


@dataclass(frozen=True, kw_only=True)
class FedCR(FedAvg):
    """FedAvg on a Gaussian code with personal heads; each code stays near a class prior that silos compute together.

    The last round trains heads alone: every silo takes part and the body stays. The method is personalized, so its
    accuracy is not that of one shared model.
    """

    beta: float = setting(1e-3, "Weight β of the divergence from the prior, a sum over D.", at_least=0)
    code_size: int = setting(256, "Size D of the code.", at_least=1)
    train_draws: int = setting(15, "Codes J per image in training.", at_least=1)
    eval_draws: int = setting(30, "Codes per image in evaluation.", at_least=1)
    prior_update_rate: float = setting(
        1.0, "Share of the new prior in the updated one, β₂ in the authors' code.", at_least=0, at_most=1
    )
    fedcr_max_grad_norm: float = setting(
        10.0,
        "Gradients are scaled down to this norm, whatever the recipe's local training sets; 0 sets no limit.",
        at_least=0,
    )

    codebook_unsupported_reason: ClassVar[str] = "its heads and priors already adapt shared features to every silo"

    # --- the server ---------------------------------------------------------------------------------------------

    def adapt_network(self, net: nn.Module) -> nn.Module:
        return super().adapt_network(
            require_single_network(net, "FedCR").use_gaussian_classifier(self.code_size, self.eval_draws)
        )

    def prepare_silos(self, silos: Sequence[Silo]) -> Sequence[Silo]:
        return require_training_data(silos, "FedCR", "head")

    def initialize_server(self, clients: Clients) -> ServerState:
        server, net = super().initialize_server(clients), require_single_network(clients.net, "FedCR")
        like = next(t for t in server.model_state.values() if t.is_floating_point()).new_zeros(
            net.num_classes, self.code_size
        )
        return server.replace(
            method_state={**server.method_state, PRIOR_MEAN: like, PRIOR_DEVIATION: torch.ones_like(like)}
        )

    def make_extras(self, server: ServerState) -> Tensors:
        return {n: server.method_state[n] for n in (PRIOR_MEAN, PRIOR_DEVIATION)}

    def select_participants(self, clients: Clients, server: ServerState) -> tuple[str, ...]:
        last = server.round + 1 == self.total_rounds
        return FedAvg.select_participants(replace(self, clients_per_round=0) if last else self, clients, server)

    def run_round(self, clients: Clients, server: ServerState) -> ServerState:
        after = super().run_round(clients, server)
        return after.replace(model_state=server.model_state) if after.round == self.total_rounds else after

    def update_method_state(self, server: ServerState, replies: Sequence[Reply]) -> ServerState:
        old = Gaussian(server.method_state[PRIOR_MEAN], server.method_state[PRIOR_DEVIATION])
        sums = sum_tensors((r.extras for r in replies), {"precision": old.mean, "shift": old.mean})
        if not sums:
            return server
        precision, shift = (sums[n].to(old.mean) for n in ("precision", "shift"))
        new = multiply_gaussians(precision, shift)
        present = (precision > 0).any(1, keepdim=True)  # the prior of a class without examples this round stays
        mean, deviation = (torch.where(present, torch.lerp(a, b, self.prior_update_rate), a) for a, b in zip(old, new))
        return server.replace(method_state={**server.method_state, PRIOR_MEAN: mean, PRIOR_DEVIATION: deviation})

    # --- the client ---------------------------------------------------------------------------------------------

    def client_state_names(self, net: nn.Module) -> Collection[str]:
        return [*super().client_state_names(net), *(n for n in net.state_dict() if n.startswith(HEAD_PREFIX))]

    def make_updates(self, broadcast: Broadcast) -> Sequence[Update]:
        return [Update(self.loss, lambda n: n.startswith(HEAD_PREFIX) or broadcast.round < self.total_rounds)]

    def loss(self, model: ClientModel, batch: Batch) -> Tensor:
        q = model.call("classifier.posterior", model.call("extract_features", batch.x))
        shape = (self.train_draws, *q.mean.shape)  # the code is drawn J times, the body runs once
        z = model.call("classifier.sample", q.mean.expand(shape), q.deviation.expand(shape))
        logits = model.call("classifier.head", z)  # [J, B, C]
        task = F.cross_entropy(adjust_logits(model, logits).flatten(0, 1), batch.y.repeat(self.train_draws))
        # β KL(prior ‖ code): priors become so narrow that the reverse divergence would explode
        prior = Gaussian(
            F.embedding(batch.y, model.extras[PRIOR_MEAN]), F.embedding(batch.y, model.extras[PRIOR_DEVIATION])
        )
        return task + self.beta * kl_divergence(prior, q).mean()

    def adjust_gradients(self, model: ClientModel, gradients: Tensors) -> Tensors:
        del model
        if not self.fedcr_max_grad_norm:
            return gradients
        return dict(zip(gradients, clip_grad_norm(list(gradients.values()), self.fedcr_max_grad_norm)))

    def finish_training(
        self, model: ClientModel, examples: Examples, *, num_steps: int, lr: float
    ) -> tuple[Tensors, Tensors]:
        """Return per class the product of this silo's codes: Σ 1/σ² and Σ μ/σ², zero for a class without examples."""
        del num_steps, lr
        size = self.local.eval_batch_size
        pieces = zip(torch.split(examples.x, size), torch.split(examples.y, size))
        statistics = [self.sum_class_statistics(model, Batch(x, y)) for x, y in pieces]
        return {n: torch.stack([piece[n] for piece in statistics]).sum(0) for n in statistics[0]}, {}

    def sum_class_statistics(self, model: ClientModel, batch: Batch) -> Tensors:
        q = model.call("classifier.posterior", model.call("extract_features", batch.x))
        precision = q.deviation.square().reciprocal()
        one_hot = F.one_hot(batch.y, len(model.extras[PRIOR_MEAN])).to(precision.dtype).t()  # [C, B]
        return {"precision": one_hot @ precision, "shift": one_hot @ (precision * q.mean)}


def multiply_gaussians(precision: Tensor, shift: Tensor) -> Gaussian:
    """Return the product of normal distributions given by Σ 1/σ² and Σ μ/σ², and one standard normal."""
    total = 1 + precision
    return Gaussian(shift / total, total.rsqrt())
