"""Chance level: the accuracy of a model that has learned nothing but the most common class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from uefl.core.federation import Silo
from uefl.core.metrics import mean_metric

_MARGIN = 0.05  # a model that exceeds chance by less has hardly learned


def compute_chance_accuracy(silos: Sequence[Silo]) -> float:
    """Return the mean accuracy over silos of always predicting the most common class of the training images."""
    labels = torch.cat([silo.train.y for silo in silos])
    most_common = int(labels.bincount().argmax()) if len(labels) else 0
    shares = [float((silo.test.y == most_common).double().mean()) for silo in silos if len(silo.test.y)]
    return sum(shares) / len(shares) if shares else 0.0


def is_at_chance(accuracy: float, header: Mapping[str, Any]) -> bool:
    """Return whether a mean accuracy is hardly above chance level."""
    return accuracy <= get_chance_accuracy(header) + _MARGIN


def get_chance_accuracy(header: Mapping[str, Any]) -> float:
    """Return the chance level of a run, at least that of uniform classes."""
    return max(float(header.get("chance_accuracy", 0.0)), 1 / max(len(header["class_names"]), 1))


def describe_chance(accuracy: float, header: Mapping[str, Any]) -> str:
    """Return a line about a result at chance level, or an empty text."""
    if not is_at_chance(accuracy, header):
        return ""
    chance = get_chance_accuracy(header)
    return (
        f"mean accuracy {accuracy:.3f} is {'hardly' if accuracy > chance else 'not'} above chance level "
        f"({chance:.3f}): the model has not learned; try more rounds, or a larger or smaller local.lr"
    )


def mean_accuracy(record: Mapping[str, Any]) -> float:
    """Return the mean test accuracy over silos of a round."""
    return mean_metric(record["silos"].values(), "accuracy")
