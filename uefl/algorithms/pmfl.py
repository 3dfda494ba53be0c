"""PMFL: a shared part of every tensor is meta-learned, the rest of it stays at the silo.

Zhang et al., PMFL: partial meta-federated learning for heterogeneous tasks and its applications on real-world medical
records (IEEE BigData 2022). The authors train networks for text; `docs/deviations.md` lists what is ours on images.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.func import grad

from uefl.algorithms.fedavg import FedAvg
from uefl.algorithms.requirements import require_training_data
from uefl.core.federation import Batch, Broadcast, ClientModel, Clients, Examples, Phase, ServerState, Silo, Tensors
from uefl.core.field_rules import setting

OWN_PREFIX = "own."  # of a silo's own rows in its client state
GRADIENT_PREFIX = "gradient."  # of query gradients, until they take the place of the weights in the reply
MEAN_PREFIX, SQUARE_PREFIX, STEP = "adam.mean.", "adam.square.", "adam.step"  # Adam's state at the server
ADAM_BETAS, ADAM_EPSILON = (0.9, 0.999), 1e-8  # PyTorch's defaults, which the authors use
SUPPORT_FRACTION = 0.5  # of a silo's training examples; the others are the query examples


@dataclass(frozen=True, kw_only=True)
class PMFL(FedAvg):
    """The first rows of every tensor are shared, the others are a silo's own; the server learns from query gradients.

    A silo starts each round with its own weights, in which the shared rows are replaced by the server's. It trains on
    one half of its examples and sends the gradient of the loss on the other half, of the shared rows alone. The method
    is personalized, so its accuracy is not that of one shared model.
    """

    shared_fraction: float = setting(
        0.5, "Fraction of every tensor that is shared: its first rows, rounded up.", above=0, at_most=1
    )
    server_update: Literal["adam", "average"] = setting(
        "adam",
        "Update of the shared rows: Adam with the mean query gradient, or the average of trained rows; "
        "silos then train on all their examples.",
    )
    server_lr: float = setting(1e-3, "Learning rate of the server's Adam.", above=0)

    codebook_unsupported_reason: ClassVar[str] = "it would share one half of the codewords, whatever silos use them"

    # --- the server ---------------------------------------------------------------------------------------------

    def prepare_silos(self, silos: Sequence[Silo]) -> Sequence[Silo]:
        return require_training_data(silos, "PMFL", "rows of every tensor")

    def initialize_server(self, clients: Clients) -> ServerState:
        server = super().initialize_server(clients)
        server = server.replace(model_state=self.select_shared_rows(server.model_state))
        if self.server_update == "average":
            return server
        names = [n for n, p in clients.net.named_parameters() if p.requires_grad and n in server.model_state]
        zeros = {
            prefix + n: torch.zeros_like(server.model_state[n])
            for prefix in (MEAN_PREFIX, SQUARE_PREFIX)
            for n in names
        }
        return server.replace(method_state={**server.method_state, **zeros, STEP: torch.zeros(())})

    def select_shared_rows(self, tensors: Tensors) -> Tensors:
        """Return the shared rows of every tensor; a tensor without rows is shared as a whole."""
        return {n: t[: math.ceil(len(t) * self.shared_fraction)].clone() if t.dim() else t for n, t in tensors.items()}

    def run_round(self, clients: Clients, server: ServerState) -> ServerState:
        after = super().run_round(clients, server)
        # The replies had gradients in the place of weights. A tensor without a valid reply keeps its identity.
        gradients = {
            n: g
            for n, g in after.model_state.items()
            if MEAN_PREFIX + n in server.method_state and g is not server.model_state[n]
        }
        if not gradients:
            return after
        state, model_state = dict(after.method_state), dict(after.model_state)
        state[STEP] = state[STEP] + 1
        for n, g in gradients.items():
            moments = state[MEAN_PREFIX + n], state[SQUARE_PREFIX + n]
            model_state[n], state[MEAN_PREFIX + n], state[SQUARE_PREFIX + n] = take_adam_step(
                server.model_state[n], g, *moments, step=int(state[STEP]), lr=self.server_lr
            )
        return after.replace(model_state=model_state, method_state=state)

    # --- the client ---------------------------------------------------------------------------------------------

    def personal_tensor_names(self, net: nn.Module) -> Collection[str]:
        tensors = net.state_dict()
        shared = self.select_shared_rows(tensors)
        return [n for n, t in shared.items() if t.dim() and len(t) < len(tensors[n])]  # the others are all shared

    def initialize_client(self, initial: Tensors, received: Tensors, client_state: Tensors) -> Tensors:
        return {
            n: torch.cat([shared.to(initial[n]), client_state.get(OWN_PREFIX + n, initial[n][len(shared) :])])
            for n, shared in received.items()
            if shared.dim() and len(shared) < len(initial[n])
        }

    def make_phases(self, broadcast: Broadcast) -> Sequence[Phase]:
        fraction = SUPPORT_FRACTION if self.server_update == "adam" else 1.0
        return [Phase(self.make_updates(broadcast), self.local.epochs, fraction)]

    def finish_training(
        self, model: ClientModel, examples: Examples, *, num_steps: int, lr: float
    ) -> tuple[Tensors, Tensors]:
        """Return the query gradient of the shared rows, and the silo's own rows."""
        del num_steps, lr
        tensors, received = model.state_dict(), model.received_state
        own = {
            OWN_PREFIX + n: tensors[n][len(shared) :].clone()
            for n, shared in received.items()
            if shared.dim() and len(shared) < len(tensors[n])
        }
        if self.server_update == "average":
            return {}, own
        gradients = self.compute_query_gradients(model, select_query_examples(examples))
        return {GRADIENT_PREFIX + n: g[: len(received[n])] for n, g in gradients.items() if n in received}, own

    def compute_query_gradients(self, model: ClientModel, query: Examples) -> Tensors:
        """Return the gradient of the mean loss on the query examples at the trained weights, in evaluation mode."""

        def sum_losses(params: Tensors, x: Tensor, y: Tensor) -> Tensor:
            return self.loss(model.with_params(params), Batch(x, y)) * len(y)

        params, size = {n: p.detach() for n, p in model.params.items()}, self.local.eval_batch_size
        sums = {n: torch.zeros_like(p) for n, p in params.items()}
        for x, y in zip(torch.split(query.x, size), torch.split(query.y, size)):
            gradients = grad(sum_losses)(params, x, y)
            sums = {n: total + gradients[n] for n, total in sums.items()}
        return {n: total / len(query.y) for n, total in sums.items()}

    def pack_reply(self, tensors: Tensors, extras: Tensors) -> tuple[Tensors, Tensors]:
        """Send the shared rows alone, and the query gradient in the place of the weights."""
        shared = self.select_shared_rows(tensors)
        return {n: extras.get(GRADIENT_PREFIX + n, t) for n, t in shared.items()}, {}


def select_query_examples(examples: Examples) -> Examples:
    """Return the examples that are no support examples; of a single example, the example itself."""
    num_support = min(max(1, int(len(examples.y) * SUPPORT_FRACTION)), len(examples.y) - 1)
    return Examples(examples.x[num_support:], examples.y[num_support:])


def take_adam_step(
    weight: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, *, step: int, lr: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a weight after a step of Adam, and the updated moments."""
    beta1, beta2 = ADAM_BETAS
    mean = beta1 * mean + (1 - beta1) * gradient
    square = beta2 * square + (1 - beta2) * gradient.square()
    denominator = (square / (1 - beta2**step)).sqrt() + ADAM_EPSILON
    return weight - lr / (1 - beta1**step) * mean / denominator, mean, square
