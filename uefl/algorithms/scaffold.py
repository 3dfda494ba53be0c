"""SCAFFOLD: control variates take the drift out of local steps.

Karimireddy et al., SCAFFOLD: stochastic controlled averaging for federated learning (ICML 2020), option II.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from uefl.aggregate import summed
from uefl.algorithms.fedavg import FedAvg
from uefl.errors import InputError
from uefl.federation import Clients, Model, Part, Reply, Server, State, is_words
from uefl.local import Local

CONTROL = "control."  # prefix of control variates: the server's c among what is sent, a silo's c_k among what it keeps


@dataclass(frozen=True, kw_only=True)
class Scaffold(FedAvg):
    """FedAvg whose local steps are corrected by c − c_k, the federation's mean gradient less the silo's own.

    Codewords are not corrected: each is averaged over its users alone, and those all mean the same by it.
    """

    local: Local = field(default_factory=lambda: Local(optimizer="sgd", rate=0.01))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.local.optimizer != "sgd":
            raise InputError(
                f"Scaffold reads gradients off the weights, which needs optimizer=sgd, not {self.local.optimizer}"
            )
        if not 0 <= self.local.momentum < 1:
            raise InputError(f"momentum={self.local.momentum} must be at least 0 and less than 1")

    def suited(self, local: Local) -> Local:
        # Recipes speak of Adam; SGD with momentum wants a rate about ten times as large.
        return local if local.optimizer == "sgd" else replace(local, optimizer="sgd", rate=10 * local.rate)

    def start(self, clients: Clients) -> Server:
        server = super().start(clients)
        sharing = torch.tensor(sum(1 for n in clients.sizes.values() if n))  # K, whoever takes part in a round
        controls = {f"{CONTROL}{n}": torch.zeros_like(server.state[n]) for n in controlled(clients.net, server.state)}
        return server.but(memory={**server.memory, **controls, "clients": sharing})

    def first(self, net: nn.Module, address: int) -> State:
        del address
        tensors = net.state_dict()
        return {f"{CONTROL}{n}": torch.zeros_like(tensors[n]) for n in controlled(net, tensors)}

    def sent(self, server: Server) -> State:
        return {n: c for n, c in server.memory.items() if n.startswith(CONTROL)}

    def adjust(self, model: Model, gradients: State) -> State:
        # θ ← θ − η (g + c − c_k)
        return {
            n: g + model.sent[CONTROL + n] - model.kept[CONTROL + n] if CONTROL + n in model.sent else g
            for n, g in gradients.items()
        }

    def finish(self, model: Model, part: Part, *, steps: int, rate: float) -> tuple[State, State]:
        # c_k⁺ = c_k − c + (θ_global − θ_k) / (T η); momentum makes T steps longer, see `effective`
        del part
        length = (
            effective(steps, self.local.momentum) if self.local.fresh else steps / (1 - self.local.momentum)
        ) * rate
        new = {
            name: model.kept[name] - c + (model.received[n] - model.params[n].detach()) / length
            for name, c in model.sent.items()
            if (n := name.removeprefix(CONTROL)) in model.params
        }
        return {name: c - model.kept[name] for name, c in new.items()}, new

    def integrate(self, server: Server, replies: Sequence[Reply]) -> Server:
        # c ← c + 1/K Σ_k (c_k⁺ − c_k)
        memory, sharing = server.memory, int(server.memory["clients"])
        change = summed((r.extra for r in replies), self.sent(server))
        return server.but(memory=memory | {n: memory[n] + d.to(memory[n]) / sharing for n, d in change.items()})


def controlled(net: nn.Module, state: State) -> list[str]:
    """Names of the weights that have a control variate: all that learn, but for codewords."""
    return [n for n, _ in net.named_parameters() if n in state and not is_words(n)]


def effective(steps: int, momentum: float) -> float:
    """How far T steps of momentum ρ go down one unchanging gradient, in plain steps: Σ_t (1 − ρ^t) / (1 − ρ).

    Tends to T / (1 − ρ) for many steps; that limit would shrink c_k much too far where a round has few.
    """
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
