"""UEFL: silos with unusually high uncertainty receive codewords of their own.

Uncertainty-based extensible codebook for federated learning in heterogeneous data silos (ICML 2025), Algorithm 1.
The round is FedAvg's (`fedavg.py`), the end of an iteration is the codebook's (`extensible_codebook.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from uefl.algorithms.alike_silos import list_unlike_silos
from uefl.algorithms.extensible_codebook import ExtensibleCodebook
from uefl.algorithms.fedavg import FedAvg
from uefl.algorithms.fine_tuning import FineTuning
from uefl.core.errors import InputError
from uefl.core.federation import Broadcast, Clients, Phase, Reply, ServerState, Update, is_codeword_tensor
from uefl.core.field_rules import setting

GROUP_LR_MULTIPLIER = 0.5  # of the first round's learning rate


@dataclass(frozen=True, kw_only=True)
class UEFL(FineTuning):
    """FedAvg with an extensible codebook: uncertain silos get codewords from K-means on their own features.

    Local fine-tuning after the last round is an option, as for FedAvg; the paper has none. The shared model stays.
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
        "Rounds after the last one in which groups of alike silos train one model per group, and silos alike to no "
        "other one together, at half of the learning rate, falling; then local fine-tuning. 0: none, as in the paper.",
        at_least=0,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.group_rounds and not self.codebook:
            raise InputError(f"group_rounds={self.group_rounds} needs a codebook, whose centroids find the groups")

    @property
    def has_own_models(self) -> bool:
        return super().has_own_models or self.group_rounds > 0

    def without_own_models(self) -> UEFL:
        return replace(self, fine_tuning_epochs=0, group_rounds=0)

    def make_shared_method(self) -> UEFL:
        return self.without_own_models()

    def train_own_models(
        self, clients: Clients, server: ServerState, broadcast: Broadcast, silo_names: tuple[str, ...]
    ) -> tuple[ServerState, list[Reply]]:
        if not self.group_rounds:
            return super().train_own_models(clients, server, broadcast, silo_names)
        assert self.codebook
        server, groups = self.codebook.find_alike_silos(self, clients, server, silo_names)
        unlike = list_unlike_silos(groups) if self.codebook.alike_rule == "halves" else ()
        groups = [group for group in groups if not set(group) & set(unlike)] + ([unlike] if unlike else [])
        replies: list[Reply] = []
        for group in groups:
            own = broadcast
            for i in range(self.group_rounds):
                lr = GROUP_LR_MULTIPLIER * self.local.lr * (1 - i / self.group_rounds)
                own = own._replace(round=server.round + 1 + i, participants=group, lr=lr)
                model_state, of_round = self.average_replies(clients, server, own, evaluate=i == 0)
                own, replies = own._replace(model_state={**own.model_state, **model_state}), [*replies, *of_round]
            replies += self.tune_locally(clients, server, own, group, evaluate=False)
        return server.replace(open_record={**server.open_record, "groups": groups, "unlike_silos": unlike}), replies

    def make_phases(self, broadcast: Broadcast) -> Sequence[Phase]:
        if broadcast.is_personal or broadcast.round <= self.total_rounds:
            return super().make_phases(broadcast)
        return [Phase([Update(self.loss, lambda n: not is_codeword_tensor(n))], self.local.epochs)]


@dataclass(frozen=True, kw_only=True)
class VQFedAvg(FedAvg):
    """FedAvg with a static codebook: one for all silos, or one per true domain (an oracle)."""

    codebook: ExtensibleCodebook | None = setting(
        default_factory=lambda: ExtensibleCodebook(extend="none"), help_text="Codebook of fixed size."
    )
