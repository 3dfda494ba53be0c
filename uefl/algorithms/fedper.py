"""FedPer: every silo has its own classifier on shared features.

Arivazhagan et al., Federated learning with personalization layers (2019).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from uefl.algorithms.fedavg import FedAvg
from uefl.algorithms.requirements import list_classifiers, require_training_data
from uefl.core.federation import Silo
from uefl.core.field_rules import setting


@dataclass(frozen=True, kw_only=True)
class FedPer(FedAvg):
    """FedAvg in which the classifier, or its last layer, stays at the silo; both parts train together in every round.

    A silo that has not trained yet uses the initial classifier; a silo without training data is an error.
    """

    personal_layers: Literal["classifier", "last", "none"] = setting(
        "classifier", "Layers that stay at the silo: the classifier from its hidden layer on, its last layer, or none."
    )

    def prepare_silos(self, silos: Sequence[Silo]) -> Sequence[Silo]:
        silos = super().prepare_silos(silos)
        return silos if self.personal_layers == "none" else require_training_data(silos, "FedPer", "classifier")

    def client_state_names(self, net: nn.Module) -> Collection[str]:
        return [*super().client_state_names(net), *self.list_personal_names(net)]

    def list_personal_names(self, net: nn.Module) -> list[str]:
        """Return names of the classifier's tensors that stay at the silo."""
        layers: list[str] = []
        for classifier in list_classifiers(net) if self.personal_layers != "none" else ():
            named_modules = net.get_submodule(classifier).named_modules(prefix=classifier)
            linear = [name for name, module in named_modules if isinstance(module, nn.Linear)]
            layers += linear[-1:] if self.personal_layers == "last" else linear
        return [n for n in net.state_dict() if n.rpartition(".")[0] in layers]
