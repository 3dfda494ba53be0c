"""What federation is measured against: every silo alone, and all data in one place."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import nn

from uefl.algorithms.checks import all_train
from uefl.algorithms.fedavg import FedAvg
from uefl.federation import Part, Silo, concatenated

POOL = "pooled"


@dataclass(frozen=True, kw_only=True)
class Alone(FedAvg):
    """Every silo trains alone and sends nothing: what a federation must beat to be worth joining."""

    no_codebook: ClassVar[str] = "words are found and granted by a server, and a silo alone has none"

    def prepare(self, silos: Sequence[Silo]) -> Sequence[Silo]:
        return all_train(silos, "Training alone", "network")

    def keeps(self, net: nn.Module) -> Collection[str]:
        return list(net.state_dict())


@dataclass(frozen=True, kw_only=True)
class Pooled(FedAvg):
    """All training data in one place, which no federation may do: an upper bound."""

    no_network: ClassVar[str] = "it needs all data in one place"

    def prepare(self, silos: Sequence[Silo]) -> Sequence[Silo]:
        none = [replace(s, train=Part(s.train.x[:0], s.train.y[:0])) for s in silos]
        ordered = sorted(silos, key=lambda s: s.name)  # the order given changes nothing
        pool = Silo(POOL, concatenated([s.train for s in ordered]), none[0].train, none[0].train, domain=POOL)
        return [*none, pool]
