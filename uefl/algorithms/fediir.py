"""FedIIR: silos agree on how the classifier should move, and so on features that mean the same everywhere.

Guo et al., Out-of-distribution generalization of federated learning via implicit invariant relationships (ICML 2023).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.func import grad_and_value

from uefl.aggregate import summed
from uefl.algorithms.checks import not_negative, one_network
from uefl.algorithms.fedavg import FedAvg, cross_entropy
from uefl.algorithms.record import counted
from uefl.errors import InputError
from uefl.federation import Batch, Clients, Model, Server, State

HEAD = "classifier."
MEAN = "gradient."  # prefix of the mean gradient ḡ among what is remembered and sent


@dataclass(frozen=True, kw_only=True)
class FedIIR(FedAvg):
    """FedAvg with a penalty on how far a batch's classifier gradient is from the federation's mean gradient.

    Two messages a round: the gradient of the received model, over all training data and in evaluation mode, then
    training. Examples count equally, so batches of any size give the same mean.
    """

    penalty: float = 0.01  # λ
    decay: float = 0.95  # m, of the running mean of gradients; it starts at 0 and is not corrected for that

    no_codebook: ClassVar[str] = "silos with words of their own see other features, so their gradients need not agree"

    def __post_init__(self) -> None:
        super().__post_init__()
        not_negative(self, "penalty")
        if not 0 <= self.decay < 1:
            raise InputError(f"decay={self.decay} must be at least 0 and less than 1")

    def build(self, net: nn.Module) -> nn.Module:
        return super().build(one_network(net, "FedIIR"))

    def start(self, clients: Clients) -> Server:
        server = super().start(clients)
        zeros = {MEAN + n: torch.zeros_like(t) for n, t in server.state.items() if n.startswith(HEAD)}
        return server.but(memory={**server.memory, **zeros})

    def round(self, clients: Clients, server: Server) -> Server:
        started = time.perf_counter()
        say = self.say(clients, server)._replace(round=server.round + 1, who=self.takes_part(clients, server), sent={})
        replies = [r for r in clients.ask(self, "head_gradient", say, ("train",)) if not r.refused]
        like = {"count": torch.zeros(()), **self.sent(server)}
        total = summed((r.answers.get("train", {}) for r in replies), like)
        # ḡ ← m ḡ + (1 − m) Σ g / n
        new = {n: g / total["count"] for n, g in total.items() if n.startswith(MEAN)}
        old = server.memory
        memory = old | {n: self.decay * old[n] + (1 - self.decay) * g.to(old[n]) for n, g in new.items()}
        seconds = time.perf_counter() - started
        return counted(super().round(clients, server.but(memory=memory)), replies, seconds)

    def sent(self, server: Server) -> State:
        return {n: g for n, g in server.memory.items() if n.startswith(MEAN)}

    def loss(self, model: Model, batch: Batch) -> Tensor:
        # L = CE + λ ‖∇_h CE − ḡ‖²; only the head is differentiated twice
        g, task = gradient(model, batch)
        gap = torch.stack([(g[n] - model.sent[MEAN + n]).square().sum() for n in g]).sum()
        return task + self.penalty * gap

    def head_gradient(self, model: Model, batch: Batch) -> State:
        """∇_h CE summed over examples, and how many they are."""
        g, _ = gradient(model, batch)
        count = torch.tensor(float(len(batch.y)), dtype=torch.float64, device=batch.x.device)
        return {"count": count} | {MEAN + n: t * len(batch.y) for n, t in g.items()}


def gradient(model: Model, batch: Batch) -> tuple[State, Tensor]:
    """∇_h CE over the classifier h, differentiable itself, and CE."""
    features = model.call("features", batch.x)

    def task(head: State) -> Tensor:
        return cross_entropy(model.at(head).call("classifier", features).unsqueeze(0), batch.y)

    head = {n: p for n, p in model.params.items() if n.startswith(HEAD)}
    found: tuple[State, Tensor] = grad_and_value(task)(head)
    return found
