"""SCAFFOLD: control variates remove the drift of local steps.

Karimireddy et al., SCAFFOLD: stochastic controlled averaging for federated learning (ICML 2020), option II.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from uefl.algorithms.fedavg import FedAvg
from uefl.core.aggregate import sum_tensors
from uefl.core.errors import InputError
from uefl.core.federation import ClientModel, Clients, Examples, Reply, ServerState, Tensors, is_codeword_tensor
from uefl.core.field_rules import setting
from uefl.core.local import LocalTraining

CONTROL_PREFIX = "control."  # of control variates: the server's c in extras, a silo's c_k in its client state


@dataclass(frozen=True, kw_only=True)
class Scaffold(FedAvg):
    """FedAvg whose local steps are corrected by c − c_k, the mean gradient of all silos minus the silo's own.

    Codewords are not corrected: each is averaged over the silos that use it.
    """

    local: LocalTraining = setting(
        default_factory=lambda: LocalTraining(optimizer="sgd", lr=0.01), help_text="Local training of a client."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.local.optimizer != "sgd":
            raise InputError(
                f"Scaffold computes gradients from weight changes and needs optimizer=sgd, not {self.local.optimizer}"
            )
        if not 0 <= self.local.momentum < 1:
            raise InputError(f"momentum={self.local.momentum} must be at least 0 and less than 1")

    def adapt_local_training(self, local: LocalTraining) -> LocalTraining:
        # Recipes are for Adam; SGD with momentum needs a learning rate about ten times as large.
        return local if local.optimizer == "sgd" else replace(local, optimizer="sgd", lr=10 * local.lr)

    def initialize_server(self, clients: Clients) -> ServerState:
        server = super().initialize_server(clients)
        num_clients = torch.tensor(sum(1 for n in clients.num_examples.values() if n))  # K, not only participants
        controls = {
            f"{CONTROL_PREFIX}{n}": torch.zeros_like(server.model_state[n])
            for n in controlled_names(clients.net, server.model_state)
        }
        return server.replace(method_state={**server.method_state, **controls, "num_clients": num_clients})

    def initial_client_state(self, net: nn.Module, noise_key: int) -> Tensors:
        del noise_key
        tensors = net.state_dict()
        return {f"{CONTROL_PREFIX}{n}": torch.zeros_like(tensors[n]) for n in controlled_names(net, tensors)}

    def make_extras(self, server: ServerState) -> Tensors:
        return {n: c for n, c in server.method_state.items() if n.startswith(CONTROL_PREFIX)}

    def adjust_gradients(self, model: ClientModel, gradients: Tensors) -> Tensors:
        # θ ← θ − η (g + c − c_k)
        return {
            n: g + model.extras[CONTROL_PREFIX + n] - model.client_state[CONTROL_PREFIX + n]
            if CONTROL_PREFIX + n in model.extras
            else g
            for n, g in gradients.items()
        }

    def finish_training(
        self, model: ClientModel, examples: Examples, *, num_steps: int, lr: float
    ) -> tuple[Tensors, Tensors]:
        # c_k⁺ = c_k − c + (θ_global − θ_k) / (T η); with momentum, T is the number of effective steps
        del examples
        momentum = self.local.momentum
        steps = effective_steps(num_steps, momentum) if self.local.reset_optimizer else num_steps / (1 - momentum)
        length = steps * lr
        new = {
            name: model.client_state[name] - c + (model.received_state[n] - model.params[n].detach()) / length
            for name, c in model.extras.items()
            if (n := name.removeprefix(CONTROL_PREFIX)) in model.params
        }
        return {name: c - model.client_state[name] for name, c in new.items()}, new

    def update_method_state(self, server: ServerState, replies: Sequence[Reply]) -> ServerState:
        # c ← c + 1/K Σ_k (c_k⁺ − c_k)
        state, num_clients = server.method_state, int(server.method_state["num_clients"])
        change = sum_tensors((r.extras for r in replies), self.make_extras(server))
        controls = {n: state[n] + d.to(state[n]) / num_clients for n, d in change.items()}
        return server.replace(method_state=state | controls)


def controlled_names(net: nn.Module, model_state: Tensors) -> list[str]:
    """Return names of the weights that have a control variate: all trainable ones but codewords."""
    return [n for n, _ in net.named_parameters() if n in model_state and not is_codeword_tensor(n)]


def effective_steps(num_steps: int, momentum: float) -> float:
    """Return the number of plain steps that T steps with momentum ρ equal on a constant gradient.

    It is Σ_t (1 − ρ^t) / (1 − ρ) and tends to T / (1 − ρ); with few steps per round that limit shrinks c_k too much.
    """
    return (num_steps - momentum * (1 - momentum**num_steps) / (1 - momentum)) / (1 - momentum)
