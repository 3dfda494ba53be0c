"""Batch norm whose statistics stay what they were, while its scale and shift still learn.

FedIIR trains an ImageNet ResNet18 so: a silo's batches are small and skewed, and statistics estimated from them drift
apart between silos; those of the pretrained network came from a million images. Averaging also stays exact, since
nothing but weights moves.
"""

from __future__ import annotations

from typing import Self, TypeVar

from torch import nn

N = TypeVar("N", bound=nn.Module)


class _Steady(nn.Module):
    """A layer that evaluates even in training mode."""

    def train(self, mode: bool = True) -> Self:  # noqa: ARG002 - whatever is asked, it evaluates
        return super().train(False)


class FrozenBatchNorm1d(_Steady, nn.BatchNorm1d):
    """Batch norm of vectors with frozen statistics."""


class FrozenBatchNorm2d(_Steady, nn.BatchNorm2d):
    """Batch norm of maps with frozen statistics."""


_FROZEN: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: FrozenBatchNorm1d,
    nn.BatchNorm2d: FrozenBatchNorm2d,
}


def freeze_norm_statistics(net: N) -> N:
    """Freeze the statistics of every batch norm in place, for good; no call of `train` wakes them, copies included."""
    for layer in net.modules():
        if type(layer) in _FROZEN:
            # The layer changes class and not place, so names, tensors and whoever holds it stay as they are.
            layer.__class__ = _FROZEN[type(layer)]
            layer.eval()
    return net
