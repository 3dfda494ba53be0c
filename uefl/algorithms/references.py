"""References for a federation: each silo alone, and all data in one place."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import nn

from uefl.algorithms.fedavg import FedAvg
from uefl.algorithms.requirements import require_training_data
from uefl.core import noise_addresses as addresses
from uefl.core.federation import Examples, Silo, concatenate_examples, concatenate_groups

CENTRAL_SILO = addresses.CENTRAL_SILO


@dataclass(frozen=True, kw_only=True)
class LocalOnly(FedAvg):
    """Train each silo alone, without communication: a federation must beat this to be worth joining."""

    codebook_unsupported_reason: ClassVar[str] = "codewords come from a server, which it does not have"

    def prepare_silos(self, silos: Sequence[Silo]) -> Sequence[Silo]:
        return require_training_data(silos, "local-only", "network")

    def client_state_names(self, net: nn.Module) -> Collection[str]:
        return list(net.state_dict())


@dataclass(frozen=True, kw_only=True)
class Centralized(FedAvg):
    """Train on all data in one place, which a federation cannot do: an upper bound."""

    network_unsupported_reason: ClassVar[str] = "it needs all data in one place"
    validates_untrained_silos: ClassVar[bool] = True  # the central silo trains on their images

    @property
    def uses_label_prior(self) -> bool:
        return False  # one prior for all data is a constant, which the last layer's bias contains

    def prepare_silos(self, silos: Sequence[Silo]) -> Sequence[Silo]:
        without_training = [replace(s, train=Examples(s.train.x[:0], s.train.y[:0]), train_groups=None) for s in silos]
        ordered = sorted(silos, key=lambda s: s.name)  # the result does not depend on the order of silos
        no_examples = without_training[0].train
        central_silo = Silo(
            CENTRAL_SILO,
            concatenate_examples([s.train for s in ordered]),
            no_examples,
            no_examples,
            domain=CENTRAL_SILO,
            public=ordered[0].public,
            train_groups=concatenate_groups(ordered),
        )
        return [*without_training, central_silo]
