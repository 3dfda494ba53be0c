"""UEFL: silos with unusually high uncertainty receive codewords of their own.

Uncertainty-based extensible codebook for federated learning in heterogeneous data silos (ICML 2025), Algorithm 1.
The round is FedAvg's (`fedavg.py`), the end of an iteration is the codebook's (`extensible_codebook.py`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from uefl.algorithms.alike_silos import list_unlike_silos
from uefl.algorithms.extensible_codebook import ExtensibleCodebook
from uefl.algorithms.fedavg import FedAvg
from uefl.algorithms.fine_tuning import FineTuning
from uefl.algorithms.group_models import (
    drop_groups,
    get_group_model,
    has_groups,
    list_groups,
    list_shared_metrics,
    move_group_models,
    name_group_tensors,
    read_shared_metrics,
    record_groups,
    split_broadcast,
    store_groups,
)
from uefl.algorithms.round_record import record_kmeans_time
from uefl.core.errors import InputError
from uefl.core.federation import Broadcast, Clients, Phase, Reply, ServerState, Tensors, Update, is_codeword_tensor
from uefl.core.field_rules import setting


@dataclass(frozen=True, kw_only=True)
class UEFL(FineTuning):
    """FedAvg with an extensible codebook: uncertain silos get codewords from K-means on their own features.

    Two options, which the paper does not have, give silos models of their own: in the last rounds, groups of alike
    silos train one model per group, and after the last round every silo trains on its own data, as with FedAvg. The
    shared model and the codewords stay as they were.
    """

    fine_tuning_epochs: int = setting(
        0,
        "Passes over a silo's training examples after the last round, at a tenth of the learning rate; 0: no local "
        "fine-tuning, as in the paper; the preset default has 5 (D34).",
        at_least=0,
    )

    codebook: ExtensibleCodebook | None = setting(
        default_factory=ExtensibleCodebook, help_text="Codebook between encoder and classifier."
    )

    group_rounds: int = setting(
        0,
        "Rounds at the end of a run, but none of its first iteration, in which groups of alike silos train one model "
        "per group, and silos alike to no other one together, at half of the learning rate, falling; codewords stay. "
        "0: none, as in the paper; the preset default has the last iteration, if it is the third or a later one (D35).",
        at_least=0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group_rounds and not self.codebook:
            raise InputError(f"group_rounds={self.group_rounds} needs a codebook, whose centroids find the groups")

    # --- rounds -------------------------------------------------------------------------------------------------

    @property
    def shared_rounds(self) -> int:
        return max(self.rounds, self.total_rounds - self.group_rounds)

    def lr_at(self, round_number: int) -> float:
        num_in_groups = self.total_rounds - self.shared_rounds
        return self.local.lr_at(round_number, self.total_rounds, num_in_groups or None)

    def add_rounds(self, num_rounds: int) -> UEFL:
        num = self.total_rounds - self.shared_rounds  # in groups, after the further rounds
        return replace(self, rounds=self.total_rounds + num_rounds, iterations=2, extra_rounds=num, group_rounds=num)

    # --- own models ---------------------------------------------------------------------------------------------

    @property
    def has_own_models(self) -> bool:
        return super().has_own_models or self.shared_rounds < self.total_rounds

    def without_own_models(self) -> UEFL:
        return replace(self, fine_tuning_epochs=0, group_rounds=0)

    def make_shared_method(self) -> UEFL:
        return self.without_own_models()

    def resume_server(self, server: ServerState) -> ServerState:
        return drop_groups(server)

    # --- group rounds -------------------------------------------------------------------------------------------

    def run_round(self, clients: Clients, server: ServerState) -> ServerState:
        is_first = server.round == self.shared_rounds < self.total_rounds  # of the group rounds
        if is_first:
            server = self.find_groups(clients, server)
        after = super().run_round(clients, server)
        if not has_groups(server):
            return after
        if is_first:  # the round has completed the record of the last shared model
            shared_metrics = list_shared_metrics(after.completed_records[0], server.open_record)
        else:
            shared_metrics = read_shared_metrics(server.open_record)
        return record_groups(move_group_models(after), shared_metrics)

    def find_groups(self, clients: Clients, server: ServerState) -> ServerState:
        """Divide the silos with training data into groups of alike ones; with `halves`, the others are one group."""
        assert self.codebook
        started, trainable = time.perf_counter(), tuple(name for name, n in clients.num_examples.items() if n)
        server, groups = self.codebook.find_alike_silos(self, clients, server, trainable)
        unlike = list_unlike_silos(groups) if self.codebook.alike_rule == "halves" else ()
        groups = [group for group in groups if not set(group) & set(unlike)] + ([unlike] if unlike else [])
        return record_kmeans_time(store_groups(server, groups, unlike), time.perf_counter() - started)

    def select_participants(self, clients: Clients, server: ServerState) -> tuple[str, ...]:
        participants = super().select_participants(clients, server)
        if not has_groups(server):
            return participants
        grouped = {name for group in list_groups(server) for name in group}  # over a network, silos may get data later
        return tuple(name for name in participants if name in grouped)

    def make_broadcasts(self, clients: Clients, server: ServerState) -> Sequence[Broadcast]:
        return split_broadcast(self.make_broadcast(clients, server), server)

    def average_replies(
        self, clients: Clients, server: ServerState, broadcast: Broadcast, *, evaluate: bool
    ) -> tuple[Tensors, list[Reply]]:
        if not has_groups(server):
            return super().average_replies(clients, server, broadcast, evaluate=evaluate)
        averaged: Tensors = dict(server.model_state)
        replies: list[Reply] = []
        for i, group in enumerate(list_groups(server)):
            if participants := tuple(name for name in broadcast.participants if name in group):
                own = broadcast._replace(model_state=get_group_model(server, i), participants=participants)
                model_state, own_replies = super().average_replies(clients, server, own, evaluate=evaluate)
                averaged |= name_group_tensors(i, model_state)
                replies += own_replies
        return averaged, replies

    def train_own_models(
        self, clients: Clients, server: ServerState, broadcast: Broadcast, silo_names: tuple[str, ...]
    ) -> tuple[ServerState, list[Reply]]:
        if not has_groups(server):
            return super().train_own_models(clients, server, broadcast, silo_names)
        replies: list[Reply] = []
        for own in split_broadcast(broadcast, server):
            if participants := tuple(name for name in own.participants if name in silo_names):
                replies += self.tune_locally(clients, server, own, participants, evaluate=False)
        return server, replies

    def make_phases(self, broadcast: Broadcast) -> Sequence[Phase]:
        if broadcast.is_personal or broadcast.round <= self.shared_rounds:
            return super().make_phases(broadcast)
        return [Phase([Update(self.loss, lambda n: not is_codeword_tensor(n))], self.local.epochs)]


@dataclass(frozen=True, kw_only=True)
class VQFedAvg(FedAvg):
    """FedAvg with a static codebook: one for all silos, or one per true domain (an oracle)."""

    codebook: ExtensibleCodebook | None = setting(
        default_factory=lambda: ExtensibleCodebook(extend="none"), help_text="Codebook of fixed size."
    )
