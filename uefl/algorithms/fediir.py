"""FedIIR: classifier gradients that agree across silos, and so features with the same meaning everywhere.

Guo et al., Out-of-distribution generalization of federated learning via implicit invariant relationships (ICML 2023).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.func import grad_and_value

from uefl.algorithms.fedavg import FedAvg, compute_task_loss
from uefl.algorithms.requirements import require_single_network
from uefl.algorithms.round_record import record_query_cost
from uefl.core.aggregate import sum_tensors
from uefl.core.federation import Batch, ClientModel, Clients, ClientTask, ServerState, Tensors
from uefl.core.field_rules import setting

CLASSIFIER_PREFIX = "classifier."
GRADIENT_PREFIX = "gradient."  # of the mean gradient ḡ in method_state and extras


@dataclass(frozen=True, kw_only=True)
class FedIIR(FedAvg):
    """FedAvg with a penalty on the distance of a batch's classifier gradient from the mean gradient of all silos.

    A round has two messages: first the gradient of the received model over all training examples in evaluation mode,
    then training. Every example has the same weight, so the mean does not depend on the batch size.
    """

    penalty_weight: float = setting(0.01, "Weight λ of the gradient penalty.", at_least=0)
    decay: float = setting(0.95, "Decay m of the running mean of gradients, which starts at 0.", at_least=0, below=1)

    codebook_unsupported_reason: ClassVar[str] = (
        "silos with their own codewords have other features, so their gradients need not agree"
    )

    def adapt_network(self, net: nn.Module) -> nn.Module:
        return super().adapt_network(require_single_network(net, "FedIIR"))

    def initialize_server(self, clients: Clients) -> ServerState:
        server = super().initialize_server(clients)
        zeros = {
            GRADIENT_PREFIX + n: torch.zeros_like(t)
            for n, t in server.model_state.items()
            if n.startswith(CLASSIFIER_PREFIX)
        }
        return server.replace(method_state={**server.method_state, **zeros})

    def run_round(self, clients: Clients, server: ServerState) -> ServerState:
        started = time.perf_counter()
        broadcast = self.make_broadcast(clients, server)._replace(
            round=server.round + 1, participants=self.select_participants(clients, server), extras={}
        )
        replies = [r for r in clients.query(self, "sum_classifier_gradients", broadcast, ("train",)) if not r.rejected]
        like = {"num_examples": torch.zeros(()), **self.make_extras(server)}
        total = sum_tensors((r.answers.get("train", {}) for r in replies), like)
        # ḡ ← m ḡ + (1 − m) Σ g / n
        new = {n: g / total["num_examples"] for n, g in total.items() if n.startswith(GRADIENT_PREFIX)}
        state = server.method_state
        state = state | {n: self.decay * state[n] + (1 - self.decay) * g.to(state[n]) for n, g in new.items()}
        seconds = time.perf_counter() - started
        return record_query_cost(super().run_round(clients, server.replace(method_state=state)), replies, seconds)

    def make_extras(self, server: ServerState) -> Tensors:
        return {n: g for n, g in server.method_state.items() if n.startswith(GRADIENT_PREFIX)}

    def loss(self, model: ClientModel, batch: Batch) -> Tensor:
        # L = CE + λ ‖∇_h CE − ḡ‖²; only the classifier h is differentiated twice
        g, task = classifier_gradient_and_loss(model, batch)
        gap = torch.stack([(g[n] - model.extras[GRADIENT_PREFIX + n]).square().sum() for n in g]).sum()
        return task + self.penalty_weight * gap

    @property
    def client_tasks(self) -> Mapping[str, ClientTask]:
        return {**super().client_tasks, "sum_classifier_gradients": ClientTask(self.sum_classifier_gradients)}

    def sum_classifier_gradients(self, model: ClientModel, batch: Batch) -> Tensors:
        """Return ∇_h CE summed over examples, and their number."""
        g, _ = classifier_gradient_and_loss(model, batch)
        count = torch.tensor(float(len(batch.y)), dtype=torch.float64, device=batch.x.device)
        return {"num_examples": count} | {GRADIENT_PREFIX + n: t * len(batch.y) for n, t in g.items()}


def classifier_gradient_and_loss(model: ClientModel, batch: Batch) -> tuple[Tensors, Tensor]:
    """Return ∇_h CE of the classifier h, itself differentiable, and CE."""
    features = model.call("extract_features", batch.x)

    def task(head: Tensors) -> Tensor:
        logits = model.with_params(head).call("classifier", features)
        return compute_task_loss(model, logits.unsqueeze(0), batch.y)

    head = {n: p for n, p in model.params.items() if n.startswith(CLASSIFIER_PREFIX)}
    found: tuple[Tensors, Tensor] = grad_and_value(task)(head)
    return found
