"""Requirements of several methods on silos and networks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from uefl.core.errors import InputError
from uefl.core.federation import Silo


def require_training_data(silos: Sequence[Silo], method_name: str, component: str) -> Sequence[Silo]:
    """Return the silos if all have training data; a silo without could never get its own `component`."""
    for silo in silos:
        if not len(silo.train.y):
            raise InputError(
                f"{method_name} gives every silo its own {component}, but {silo.name} has no training examples"
            )
    return silos


def require_enough_silos(silos: Sequence[Silo], clients_per_round: int) -> Sequence[Silo]:
    """Return the silos if a round can draw `clients_per_round` of those that have training data."""
    num_trainable = sum(len(silo.train.y) > 0 for silo in silos)
    if clients_per_round > num_trainable:
        raise InputError(
            f"clients_per_round={clients_per_round} must be at most {num_trainable}, the silos with training examples; "
            "0 takes all"
        )
    return silos


def list_classifiers(net: nn.Module) -> list[str]:
    """Return the name of the network's classifier, or of those of an ensemble's members."""
    members: Any = getattr(net, "members", None)
    return ["classifier"] if members is None else [f"members.{i}.classifier" for i in range(len(members))]


def require_single_network(net: nn.Module, method_name: str) -> Any:
    """Return the network if it is not an ensemble."""
    if hasattr(net, "members"):
        raise InputError(f"{method_name} uses layers of one network and cannot train an ensemble; set ensemble_size=1")
    return net
