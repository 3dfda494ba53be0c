"""An experiment is a value: method, data, model, seed. Its run id is a hash of all that can change a result."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
from torch import nn

from uefl.algorithms import METHODS
from uefl.algorithms.fedavg import FedAvg
from uefl.core.federation import MatmulPrecision, Silo
from uefl.core.field_rules import setting
from uefl.core.lazy_tensor import is_lazy
from uefl.data import SOURCES
from uefl.data.config import DataConfig
from uefl.experiment.settings import from_dict, to_dict
from uefl.models.model_config import ModelConfig
from uefl.models.network import initialize_network

RESULTS_VERSION = 4  # incremented when a code change alters results
Precision = Literal["auto", "float32", "tf32", "bf16", "float64"]
# Storage types of tensors; tf32 and bf16 apply to matrix products only.
_NUM_READ_SILOS = 100  # of lazy silos, those of which the fingerprint reads an input
DTYPES = {p: torch.float64 if p == "float64" else torch.float32 for p in get_args(Precision)}


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """All settings that determine a result."""

    method: FedAvg = field(default_factory=FedAvg)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    seed: int = setting(0, "Seed of the partitions, initial weights and all other random draws.")
    precision: Precision = setting(
        "auto", "Number format of tensors and matrix products; auto: float32 on a CPU, tf32 on CUDA."
    )

    def resolve_precision(self, device: str) -> Experiment:
        """Return the experiment with `precision=auto` replaced by the precision used on this device."""
        if self.precision != "auto":
            return self
        return replace(self, precision="tf32" if device.startswith("cuda") else "float32")

    @property
    def matmul_precision(self) -> MatmulPrecision:
        """Precision of matrix products."""
        return cast(MatmulPrecision, self.precision if self.precision in get_args(MatmulPrecision) else "full")

    @property
    def method_name(self) -> str:
        """Name of the method on the command line."""
        return METHODS.find_name(type(self.method))

    def build_network(self, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Build the method's network; its initial weights depend on the seed alone."""
        source = SOURCES[self.data.name]
        constants = {"pixel_mean": source.mean, "pixel_std": source.std}
        build = partial(self.model.build_network, input_shape, num_classes, **constants)
        return initialize_network(self.seed, build, self.method.adapt_network)

    def to_config(self) -> dict[str, Any]:
        """Return the experiment as a dictionary for JSON, as stored in the run folder."""
        settings: dict[str, Any] = to_dict(self)
        return {"name": self.method_name, **settings}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Experiment:
        """Return the experiment stored by `to_config`; an unknown name or field is an `InputError`."""
        rest = {name: value for name, value in config.items() if name not in ("name", "method")}
        method = from_dict(METHODS[str(config.get("name"))], config.get("method"))
        return replace(from_dict(cls, rest), method=method)

    def run_id(self, fingerprint: str) -> str:
        """Return a hash of experiment, data and results version; engine and device are not part of it."""
        settings = {"name": self.method_name, **to_dict(self, for_run_id=True)}
        text = json.dumps([RESULTS_VERSION, settings, fingerprint], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def fingerprint_silos(silos: Sequence[Silo]) -> str:
    """Return a hash of every silo's name and data that does not depend on their order.

    Reading all images of a file that is larger than memory would take longer than a run. Of lazy silos, the hash covers
    all labels, and the first training input of a hundred of them.
    """
    digest = hashlib.sha256()
    for i, silo in enumerate(sorted(silos, key=lambda s: s.name)):
        digest.update(f"{silo.name}\x1f{silo.domain}\x1f".encode())
        if is_lazy(silo.train.x) and i % -(-len(silos) // _NUM_READ_SILOS) == 0:
            digest.update(silo.train.x[:1].numpy().tobytes())
        for tensor in (*silo.train, *silo.validation, *silo.test):
            digest.update(str(tuple(tensor.shape)).encode())
            digest.update(b"" if is_lazy(tensor) else tensor.contiguous().numpy().tobytes())
        if silo.train_groups is not None:
            digest.update(silo.train_groups.contiguous().numpy().tobytes())
        for tensor in silo.calibration or ():  # without a calibration part, the hash is that of earlier versions
            digest.update(b"" if is_lazy(tensor) else tensor.contiguous().numpy().tobytes())
        for labels in (silo.sources, silo.moved_labels):  # of centralized training with label priors alone
            digest.update(b"" if labels is None else labels.contiguous().numpy().tobytes())
    if (public := silos[0].public) is not None:  # the same for all silos
        digest.update(public.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
