"""FedBN: every silo has its own batch norm.

Li et al., FedBN: federated learning on non-IID features via local batch normalization (ICLR 2021).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from uefl.algorithms.fedavg import FedAvg
from uefl.algorithms.requirements import require_training_data
from uefl.core.federation import Silo


@dataclass(frozen=True, kw_only=True)
class FedBN(FedAvg):
    """FedAvg in which scale, shift and statistics of batch norm stay at the silo.

    A silo that has not trained yet uses the initial batch norm; a silo without training data is an error.
    """

    def prepare_silos(self, silos: Sequence[Silo]) -> Sequence[Silo]:
        return require_training_data(silos, "FedBN", "batch norm")

    def client_state_names(self, net: nn.Module) -> Collection[str]:
        # By type, since names differ between encoders, such as `downsample.1`.
        norms = [name for name, layer in net.named_modules() if isinstance(layer, _BatchNorm)]
        return [n for n in net.state_dict() if n.rpartition(".")[0] in norms]
