"""FedAvg with local fine-tuning: after the last round, every silo trains the final model on its own data."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from torch import nn

from uefl.algorithms.fedavg import FedAvg
from uefl.algorithms.round_record import record_query_cost, record_rejections, record_shared_model
from uefl.core.federation import Broadcast, Clients, Phase, Reply, ServerState, Tensors, Update, is_codeword_tensor
from uefl.core.field_rules import setting

LR_MULTIPLIER = 0.1  # of the first round's learning rate, since a schedule may end near 0


@dataclass(frozen=True, kw_only=True)
class FineTuning(FedAvg):
    """FedAvg, after whose last round every silo trains the final model on its own data and sends nothing.

    The last record and predictions are those of the fine-tuned models. Codewords stay as the server sent them. A silo
    without training data uses the model of the last round.
    """

    fine_tuning_epochs: int = setting(
        5, "Passes over a silo's training examples after the last round, at a tenth of the learning rate.", at_least=0
    )

    @property
    def has_own_models(self) -> bool:
        """Whether silos end with models of their own."""
        return self.fine_tuning_epochs > 0

    def finish_rounds(self, clients: Clients, server: ServerState) -> ServerState:
        if not self.has_own_models:
            return server
        started, trainable = time.perf_counter(), tuple(name for name, n in clients.num_examples.items() if n)
        server, replies = self.train_own_models(clients, server, self.make_broadcast(clients, server), trainable)
        server = record_rejections(record_query_cost(server, replies, time.perf_counter() - started), replies)
        server = record_shared_model(server, replies, self.codebook_hooks.code_loss_weight, self.specificity)
        return server.replace(open_record={**server.open_record, "is_fine_tuned": True})

    def train_own_models(
        self, clients: Clients, server: ServerState, broadcast: Broadcast, silo_names: tuple[str, ...]
    ) -> tuple[ServerState, list[Reply]]:
        """Let these silos measure the model that all share, train it further and keep it."""
        return server, self.tune_locally(clients, server, broadcast, silo_names, evaluate=True)

    def tune_locally(
        self,
        clients: Clients,
        server: ServerState,
        broadcast: Broadcast,
        silo_names: tuple[str, ...],
        *,
        evaluate: bool,
    ) -> list[Reply]:
        """Let these silos train the model of a broadcast further and keep it; before, they may measure it."""
        broadcast = broadcast._replace(
            round=server.round + 1, participants=silo_names, lr=LR_MULTIPLIER * self.local.lr, is_personal=True
        )
        return list(clients.fit(self, broadcast, evaluate=evaluate))

    def make_phases(self, broadcast: Broadcast) -> Sequence[Phase]:
        if not broadcast.is_personal:
            return super().make_phases(broadcast)
        # Which codewords a silo may use is the server's decision, and so are their values.
        return [Phase([Update(self.loss, lambda n: not is_codeword_tensor(n))], self.fine_tuning_epochs)]

    def initialize_client(self, initial: Tensors, received: Tensors, client_state: Tensors) -> Tensors:
        """Start with the fine-tuned weights as soon as there are any."""
        del initial
        if not self.has_own_models:
            return {}
        return {n: client_state.get(n, t) for n, t in received.items() if not is_codeword_tensor(n)}

    def make_shared_method(self) -> FedAvg:
        """Return FedAvg, whose model stays as it was; a silo that joins fine-tunes all weights nevertheless."""
        return replace(self, fine_tuning_epochs=0)

    def resume_client_state(self, net: nn.Module, client_state: Tensors) -> Tensors:
        """Drop the fine-tuned tensors, so that further rounds start with the server's model; own models follow them."""
        dropped = set(net.state_dict()) - set(self.client_state_names(net))
        return {n: t for n, t in client_state.items() if n not in dropped}

    def personal_tensor_names(self, net: nn.Module) -> Collection[str]:
        if not self.has_own_models:
            return super().personal_tensor_names(net)
        return [n for n in net.state_dict() if not is_codeword_tensor(n)]
