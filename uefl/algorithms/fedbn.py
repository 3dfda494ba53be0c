"""FedBN: every silo has its own batch norm.

Li et al., FedBN: federated learning on non-IID features via local batch normalization (ICLR 2021).
"""

from __future__ import annotations

from dataclasses import dataclass

from uefl.algorithms.fedavg import BatchNorm, FedAvg
from uefl.core.errors import InputError
from uefl.core.field_rules import setting


@dataclass(frozen=True, kw_only=True)
class FedBN(FedAvg):
    """FedAvg in which scale, shift and statistics of batch norm stay at the silo: `batch_norm=personal`.

    A silo that has not trained yet uses the initial batch norm; a silo without training data is an error.
    """

    batch_norm: BatchNorm = setting("personal", "Batch norm of FedBN: scale, shift and statistics stay at the silo.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_norm != "personal":
            raise InputError(f"batch_norm={self.batch_norm}: FedBN is batch_norm=personal; use fedavg for other values")
