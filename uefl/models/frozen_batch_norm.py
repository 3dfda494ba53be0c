"""Batch norm with frozen statistics, whose scale and shift still learn.

FedIIR trains an ImageNet ResNet18 this way: a silo's batches are small and skewed, and statistics estimated from them
diverge between silos; those of the pretrained network come from a million images. Averaging also stays exact, since
only weights change.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self, TypeVar

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

N = TypeVar("N", bound=nn.Module)


class _AlwaysInEvalMode(nn.Module):
    """A layer that stays in evaluation mode."""

    def train(self, mode: bool = True) -> Self:  # noqa: ARG002 - the mode never changes
        return super().train(False)


class FrozenBatchNorm1d(_AlwaysInEvalMode, nn.BatchNorm1d):
    """Batch norm of vectors with frozen statistics."""


class FrozenBatchNorm2d(_AlwaysInEvalMode, nn.BatchNorm2d):
    """Batch norm of maps with frozen statistics."""


_FROZEN_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: FrozenBatchNorm1d,
    nn.BatchNorm2d: FrozenBatchNorm2d,
}


def freeze_batch_norm_statistics(net: N) -> N:
    """Freeze the statistics of every batch norm in place, also in later copies; `train()` does not unfreeze them."""
    for layer in net.modules():
        if type(layer) in _FROZEN_CLASSES:
            # Changing the class of the same object keeps its names, tensors and all references to it.
            layer.__class__ = _FROZEN_CLASSES[type(layer)]
            layer.eval()
    return net


@contextmanager
def paused_statistics(net: nn.Module) -> Iterator[None]:
    """Within this context, batch norm in training mode leaves its running statistics as they are."""
    layers = [m for m in net.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    for layer in layers:
        layer.track_running_stats = False
    try:
        yield
    finally:
        for layer in layers:
            layer.track_running_stats = True
