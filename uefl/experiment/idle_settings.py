"""Settings of a method that change nothing on these silos, or in this network: one sentence each, before the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from uefl.algorithms.extensible_codebook import ExtensibleCodebook
from uefl.algorithms.fedavg import FedAvg
from uefl.algorithms.uefl import UEFL
from uefl.algorithms.uncertainty_report import list_decision_rounds
from uefl.core.federation import Silo
from uefl.models.frozen_batch_norm import FrozenBatchNorm1d, FrozenBatchNorm2d


def describe_idle_settings(method: FedAvg, net: nn.Module, silos: Sequence[Silo]) -> list[str]:
    """Describe what was set and has no effect."""
    sentences = [*_describe_batch_norm(method, net)]
    if isinstance(method, UEFL):
        sentences += _describe_group_rounds(method)
    if method.codebook:
        sentences += _describe_extension(method, method.codebook, silos)
        sentences += _describe_codebook(method.codebook, silos)
    return sentences


def _describe_batch_norm(method: FedAvg, net: nn.Module) -> Iterator[str]:
    layers = [m for m in net.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if method.batch_norm == "average":
        return
    if not layers:
        yield f"batch_norm={method.batch_norm} has no effect: the network has no batch norm"
    elif method.batch_norm != "personal" and all(isinstance(m, (FrozenBatchNorm1d, FrozenBatchNorm2d)) for m in layers):
        yield f"batch_norm={method.batch_norm} has no effect: the statistics of batch norm are frozen"


def _describe_group_rounds(method: UEFL) -> Iterator[str]:
    num_in_groups, restart_rounds = method.total_rounds - method.shared_rounds, method.local.restart_rounds
    if method.group_rounds and not num_in_groups:
        rounds = f"iterations={method.iterations}, extra_rounds={method.extra_rounds}"
        yield f"group_rounds={method.group_rounds} has no effect: all rounds are of the first iteration ({rounds})"
    if num_in_groups and restart_rounds not in (0, num_in_groups):
        yield (
            f"restart_rounds={restart_rounds} has no effect: the learning rate starts again with the {num_in_groups} "
            f"rounds in groups; set restart_rounds={num_in_groups} for other methods, or group_rounds=0"
        )


def _describe_extension(method: FedAvg, codebook: ExtensibleCodebook, silos: Sequence[Silo]) -> Iterator[str]:
    if codebook.extend == "none" or method.iterations == 1:
        return
    if not list_decision_rounds(method):
        names = ("iterations", "extra_rounds", "group_rounds")
        rounds = ", ".join(f"{name}={getattr(method, name)}" for name in names if hasattr(method, name))
        yield f"extend={codebook.extend} has no effect: no iteration ends before the last shared round ({rounds})"
    elif codebook.extend != "all" and not any(len(silo.validation.y) for silo in silos):
        yield (
            f"extend={codebook.extend} has no effect: it compares silos by validation examples, and none has any; set "
            "validation_fraction above 0"
        )


def _describe_codebook(codebook: ExtensibleCodebook, silos: Sequence[Silo]) -> Iterator[str]:
    if codebook.uncertainty_test == "standard_errors" and not codebook.min_standard_errors:
        yield "uncertainty_test=standard_errors with min_standard_errors=0 is the same as uncertainty_test=none"
    largest = max((_count_train_groups(silo) for silo in silos), default=0)
    if codebook.codebook_init == "kmeans" and codebook.min_examples > largest:
        yield (
            f"min_examples={codebook.min_examples} is more than the largest silo has for training ({largest}), so no "
            "codeword leaves a silo, and the features stay as they are"
        )


def _count_train_groups(silo: Silo) -> int:
    """Return the number of training examples, or of groups such as patients."""
    return len(silo.train.y) if silo.train_groups is None else len(set(silo.train_groups.tolist()))
