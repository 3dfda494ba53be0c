"""Federated learning across silos whose data do not look alike.

Public names are imported when they are used: `import uefl` does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from uefl.algorithms.extensible_codebook import ExtensibleCodebook as ExtensibleCodebook
    from uefl.algorithms.fedavg import FedAvg as FedAvg
    from uefl.algorithms.references import Centralized as Centralized
    from uefl.algorithms.references import LocalOnly as LocalOnly
    from uefl.algorithms.uefl import UEFL as UEFL
    from uefl.algorithms.uefl import VQFedAvg as VQFedAvg
    from uefl.core.codebook import Codebook as Codebook
    from uefl.core.errors import InputError as InputError
    from uefl.core.federation import Examples as Examples
    from uefl.core.federation import ServerState as ServerState
    from uefl.core.federation import Silo as Silo
    from uefl.core.kmeans import kmeans as kmeans
    from uefl.core.local import LocalTraining as LocalTraining
    from uefl.core.uncertainty import estimate_uncertainty as estimate_uncertainty
    from uefl.data.config import DataConfig as DataConfig
    from uefl.engines.serial import SerialEngine as SerialEngine
    from uefl.experiment.experiment import Experiment as Experiment
    from uefl.experiment.joining import join as join
    from uefl.experiment.loading import load as load
    from uefl.experiment.train import train as train
    from uefl.models.model_config import ModelConfig as ModelConfig
    from uefl.models.network import Net as Net

__version__ = "0.2.0"

_PUBLIC_NAMES = {
    "UEFL": "uefl.algorithms.uefl",
    "Centralized": "uefl.algorithms.references",
    "Codebook": "uefl.core.codebook",
    "DataConfig": "uefl.data.config",
    "Examples": "uefl.core.federation",
    "Experiment": "uefl.experiment.experiment",
    "ExtensibleCodebook": "uefl.algorithms.extensible_codebook",
    "FedAvg": "uefl.algorithms.fedavg",
    "InputError": "uefl.core.errors",
    "LocalOnly": "uefl.algorithms.references",
    "LocalTraining": "uefl.core.local",
    "ModelConfig": "uefl.models.model_config",
    "Net": "uefl.models.network",
    "SerialEngine": "uefl.engines.serial",
    "ServerState": "uefl.core.federation",
    "Silo": "uefl.core.federation",
    "VQFedAvg": "uefl.algorithms.uefl",
    "estimate_uncertainty": "uefl.core.uncertainty",
    "join": "uefl.experiment.joining",
    "kmeans": "uefl.core.kmeans",
    "load": "uefl.experiment.loading",
    "train": "uefl.experiment.train",
}
__all__ = list(_PUBLIC_NAMES)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC_NAMES:
        raise AttributeError(f"module 'uefl' has no attribute '{name}'")
    value = globals()[name] = getattr(import_module(_PUBLIC_NAMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC_NAMES})
