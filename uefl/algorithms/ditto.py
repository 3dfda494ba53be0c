"""Ditto: beside the shared weights, every silo trains weights of its own that stay near the shared ones.

Li et al., Ditto: fair and robust federated learning through personalization (ICML 2021).
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from uefl.algorithms.fedavg import FedAvg
from uefl.algorithms.requirements import require_training_data
from uefl.core.federation import Batch, Broadcast, ClientModel, Silo, Tensors, Update
from uefl.core.field_rules import setting

PERSONAL_PREFIX = "personal."  # of the silo's own weights v_k, a second copy within the network


@dataclass(frozen=True, kw_only=True)
class Ditto(FedAvg):
    """FedAvg on w, and at each silo F_k(v) + λ/2 ‖v − w‖² for its own weights v_k, by which it predicts.

    w is the received one, so that a silo's own training of w does not move its anchor. v_k starts as the first w and
    has its own batch-norm statistics. Every step trains both on the same batch; v_k never leaves the silo.
    """

    lam: float = setting(1.0, "Weight λ of the proximal term of a silo's own weights.", at_least=0)

    codebook_unsupported_reason: ClassVar[str] = "a silo's own weights would need codewords that no server extends"

    def prepare_silos(self, silos: Sequence[Silo]) -> Sequence[Silo]:
        return require_training_data(silos, "Ditto", "network")

    def adapt_network(self, net: nn.Module) -> nn.Module:
        net = super().adapt_network(net)
        net.personal = copy.deepcopy(net)
        return net

    def client_state_names(self, net: nn.Module) -> Collection[str]:
        own = [n for n in net.state_dict() if n.startswith(PERSONAL_PREFIX)]
        return list(dict.fromkeys([*super().client_state_names(net), *own]))

    def personal_tensor_names(self, net: nn.Module) -> Collection[str]:
        return [n for n in net.state_dict() if n.startswith(PERSONAL_PREFIX)]

    def select_prediction_network(self, net: nn.Module) -> nn.Module:
        return cast(nn.Module, net.personal)

    def make_updates(self, broadcast: Broadcast) -> Sequence[Update]:
        del broadcast
        return [
            Update(self.loss, lambda n: not n.startswith(PERSONAL_PREFIX)),
            Update(self.personal_loss, lambda n: n.startswith(PERSONAL_PREFIX)),
        ]

    def personal_loss(self, model: ClientModel, batch: Batch) -> Tensor:
        """Return F_k(v) + λ/2 ‖v − w‖², where w are the received weights."""
        own = select_personal_tensors(model)
        received = {n: w for n, w in model.received_state.items() if n in own and n in model.params}
        distances = [(own[n] - w).square().sum() for n, w in received.items()]
        return self.loss(model.with_params(own), batch) + self.lam / 2 * torch.stack(distances).sum()

    def evaluate(self, model: ClientModel, batch: Batch) -> Tensors:
        return super().evaluate(model.with_params(select_personal_tensors(model)), batch)


def select_personal_tensors(model: ClientModel) -> Tensors:
    """Return v_k by the names of w, so that both use the same layers and draw the same noise."""
    tensors = {**model.state_dict(), **model.params}
    return {n.removeprefix(PERSONAL_PREFIX): t for n, t in tensors.items() if n.startswith(PERSONAL_PREFIX)}
