"""FedBN: every silo keeps its batch norm.

Li et al., FedBN: federated learning on non-IID features via local batch normalization (ICLR 2021).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from uefl.algorithms.checks import all_train
from uefl.algorithms.fedavg import FedAvg
from uefl.federation import Silo


@dataclass(frozen=True, kw_only=True)
class FedBN(FedAvg):
    """FedAvg, but scale, shift and statistics of batch norm stay with the silo.

    A silo that has not trained yet uses the norms the network began with; one that never will is refused.
    """

    def prepare(self, silos: Sequence[Silo]) -> Sequence[Silo]:
        return all_train(silos, "FedBN", "batch norm")

    def keeps(self, net: nn.Module) -> Collection[str]:
        # By type: names differ from encoder to encoder, such as `downsample.1`.
        norms = [name for name, layer in net.named_modules() if isinstance(layer, _BatchNorm)]
        return [n for n in net.state_dict() if n.rpartition(".")[0] in norms]
