"""What several methods ask of their settings and of the silos."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from uefl.errors import InputError
from uefl.federation import Silo


def not_negative(method: object, *names: str) -> None:
    """Weights of losses and the like."""
    for name in names:
        if not getattr(method, name) >= 0:
            raise InputError(f"{name}={getattr(method, name)} must not be negative")


def above_zero(method: object, *names: str) -> None:
    """Temperatures and the like."""
    for name in names:
        if not getattr(method, name) > 0:
            raise InputError(f"{name}={getattr(method, name)} must be greater than 0")


def at_least_one(method: object, *names: str) -> None:
    """Counts."""
    for name in names:
        if getattr(method, name) < 1:
            raise InputError(f"{name}={getattr(method, name)} must be at least 1")


def all_train(silos: Sequence[Silo], method: str, own: str) -> Sequence[Silo]:
    """Refuse silos that will never have what every silo must learn for itself."""
    for silo in silos:
        if not len(silo.train.y):
            raise InputError(f"{method} gives every silo its own {own}, but {silo.name} has no training images")
    return silos


def one_network(net: nn.Module, method: str) -> Any:
    """The network whose parts a method changes or looks into."""
    if hasattr(net, "members"):
        raise InputError(f"{method} looks into one network and cannot train an ensemble; set members=1")
    return net
