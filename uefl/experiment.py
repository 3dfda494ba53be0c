"""An experiment is a value: method, data, model, seed. Its id is a hash of all that can change a number."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast, get_args

import torch
from torch import nn

from uefl.algorithms import ALGORITHMS, FedAvg, algorithm
from uefl.augment import Augment
from uefl.data import Data
from uefl.errors import InputError
from uefl.federation import Multiply, Silo
from uefl.models.encoders import encoder
from uefl.models.frozen import freeze_norm_statistics
from uefl.models.net import Ensemble, Net
from uefl.models.weights import load_weights
from uefl.noise import key
from uefl.settings import from_plain, plain

RESULTS = 2  # raised when a change of the code changes numbers
Precision = Literal["auto", "float32", "tf32", "bf16", "float64"]
# What tensors are stored in; tf32 and bf16 are ways to multiply them.
DTYPES = {p: torch.float64 if p == "float64" else torch.float32 for p in get_args(Precision)}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The network, codebook apart."""

    encoder: str = "residual"
    width: int = 0  # of the encoder: channels of the residual one's first block; 0: the encoder's own
    depth: int = 0  # blocks of the residual encoder; 0: its own
    pool: bool = False  # average an encoder's map to one token
    frozen_norms: bool = False  # batch norm keeps the statistics that pretrained weights came with
    hidden: int = 512  # of the classifier
    dropout: float = 0.1
    dropout_at: Literal["hidden", "logits"] = "hidden"  # D2
    normalise: Literal["layer", "none"] = "layer"  # features, before they are cut into segments
    augment: str = ""  # of training images: crop:<pixels>, flip, or both as crop:4+flip
    members: int = 1  # of a deep ensemble, which then takes the place of dropout
    pretrained: str = ""  # weights of the encoder: a file, or `imagenet`

    def __post_init__(self) -> None:
        if not 0 <= self.dropout < 1:
            raise InputError(f"dropout={self.dropout} must be at least 0 and less than 1")
        for name in ("hidden", "members"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} must be at least 1")
        if self.augment:
            Augment.spoken(self.augment)

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """A new network for images of this shape."""
        if self.members > 1:
            return Ensemble(lambda: self._member(shape, classes, 0.0), self.members)
        return self._member(shape, classes, self.dropout)

    def _member(self, shape: tuple[int, ...], classes: int, dropout: float) -> Net:
        return Net(
            self._encoder(shape),
            classes,
            shape,
            hidden=self.hidden,
            dropout=dropout,
            dropout_at=self.dropout_at,
            normalise=self.normalise,
            augment=self.augment,
        )

    def _encoder(self, shape: tuple[int, ...]) -> nn.Module:
        asked = {name: getattr(self, name) for name in ("width", "depth", "pool") if getattr(self, name)}
        built = encoder(self.encoder, shape[0], size=shape[-1], **asked)
        if self.pretrained:
            load_weights(built, self.pretrained)
        return freeze_norm_statistics(built) if self.frozen_norms and self.pretrained else built


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Everything that decides a result."""

    method: FedAvg = field(default_factory=FedAvg)
    data: Data = field(default_factory=Data)
    model: Architecture = field(default_factory=Architecture)
    seed: int = 0
    precision: Precision = "auto"  # float32 on CPU, tf32 on CUDA; float64 for tests

    def on(self, device: str) -> Experiment:
        """The experiment with the precision it has on this device."""
        if self.precision != "auto":
            return self
        return replace(self, precision="tf32" if device.startswith("cuda") else "float32")

    @property
    def multiply(self) -> Multiply:
        """How products are made."""
        return cast(Multiply, self.precision if self.precision in get_args(Multiply) else "exact")

    @property
    def name(self) -> str:
        """The method's name on the command line."""
        return next(name for name, kind in ALGORITHMS.items() if kind is type(self.method))

    def network(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """The method's network with its first weights, which depend on the seed alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(key(self.seed, "weights"))
            return self.method.build(self.model.build(shape, classes))

    def config(self) -> dict[str, Any]:
        """The experiment in plain values, as the run folder keeps it."""
        settings: dict[str, Any] = plain(self)
        return {"name": self.name, **settings}

    @classmethod
    def of(cls, config: dict[str, Any]) -> Experiment:
        """The experiment whose `config` this is, of names and fields that are known here; anything else is refused."""
        rest = {name: value for name, value in config.items() if name not in ("name", "method")}
        method = from_plain(algorithm(str(config.get("name"))), config.get("method"))
        return replace(from_plain(cls, rest), method=method)

    def id(self, fingerprint: str) -> str:
        """Hash of experiment, data and results version; engine and device are in the header instead."""
        settings = {"name": self.name, **plain(self, identity=True)}
        text = json.dumps([RESULTS, settings, fingerprint], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def fingerprint(silos: Sequence[Silo]) -> str:
    """Hash of every silo's name and data, whatever their order."""
    total = hashlib.sha256()
    for silo in sorted(silos, key=lambda s: s.name):
        total.update(f"{silo.name}\x1f{silo.domain}\x1f".encode())
        for tensor in (*silo.train, *silo.validation, *silo.test):
            total.update(str(tuple(tensor.shape)).encode())
            total.update(tensor.contiguous().numpy().tobytes())
    return total.hexdigest()[:16]
