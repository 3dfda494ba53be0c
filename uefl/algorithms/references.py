"""References for a federation: each silo alone, and all data in one place."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from uefl.algorithms.fedavg import FedAvg
from uefl.algorithms.requirements import require_training_data
from uefl.core import noise_addresses as addresses
from uefl.core.federation import (
    Batch,
    ClientModel,
    Examples,
    Silo,
    Tensors,
    concatenate_examples,
    concatenate_groups,
)
from uefl.core.label_prior import LOG_PRIOR, compute_log_priors, split_marked_labels

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

    def prepare_silos(self, silos: Sequence[Silo]) -> Sequence[Silo]:
        without_training = [self._move_training_data(silo) for silo in silos]
        ordered = sorted(silos, key=lambda s: s.name)  # the result does not depend on the order of silos
        sizes = torch.tensor([len(silo.train.y) for silo in ordered])
        no_examples = without_training[0].train
        central_silo = Silo(
            CENTRAL_SILO,
            concatenate_examples([s.train for s in ordered]),
            no_examples,
            no_examples,
            domain=CENTRAL_SILO,
            public=ordered[0].public,
            train_groups=concatenate_groups(ordered),
            sources=torch.arange(len(ordered)).repeat_interleave(sizes) if self.uses_label_prior else None,
        )
        return [*without_training, central_silo]

    def _move_training_data(self, silo: Silo) -> Silo:
        """Return a silo after the central one took its training examples; their labels are still its label prior."""
        no_examples = Examples(silo.train.x[:0], silo.train.y[:0])
        moved_labels = silo.train.y if self.uses_label_prior else None
        return replace(silo, train=no_examples, train_groups=None, moved_labels=moved_labels)

    def compute_label_state(self, net: nn.Module, y: Tensor) -> Tensors:
        if not self.uses_label_prior:
            return {}
        return {LOG_PRIOR: compute_log_priors(y.cpu(), cast(int, net.num_classes))}

    def loss(self, model: ClientModel, batch: Batch) -> Tensor:
        return super().loss(*self._select_priors(model, batch))

    def evaluate(self, model: ClientModel, batch: Batch) -> Tensors:
        return super().evaluate(*self._select_priors(model, batch))

    def _select_priors(self, model: ClientModel, batch: Batch) -> tuple[ClientModel, Batch]:
        """Return the model with the log prior of each example's silo [B, C], and the batch with labels alone."""
        log_priors = model.client_state.get(LOG_PRIOR)
        if log_priors is None:
            return model, batch
        sources, y = split_marked_labels(batch.y)
        adjusted = copy.copy(model)
        adjusted.client_state = {**model.client_state, LOG_PRIOR: log_priors[sources]}
        return adjusted, batch._replace(y=y)
