"""The convolutions of VGG: 3x3 filters in five blocks, each halving the image.

Simonyan and Zisserman, "Very deep convolutional networks for large-scale image recognition", ICLR 2015. Parameters have
torchvision's names (`features.0.weight`), so official weights load. At 32x32 one token of 512 channels is left.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor, nn

from uefl.models.encoder import Encoder, kaiming


def _plain(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]


def _normed(inputs: int, outputs: int) -> list[nn.Module]:
    # The convolution keeps its bias, which batch norm makes idle: the official weights have one.
    return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]


class Plan(NamedTuple):
    """One of the family: output channels of each convolution, by block."""

    official: str
    blocks: tuple[tuple[int, ...], ...]
    unit: Callable[[int, int], list[nn.Module]] = _plain


_ELEVEN = ((64,), (128,), (256, 256), (512, 512), (512, 512))
_SIXTEEN = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))

VGG11 = Plan("vgg11-8a719046.pth", _ELEVEN)
VGG16 = Plan("vgg16-397923af.pth", _SIXTEEN)
VGG16_BN = Plan("vgg16_bn-6c64b313.pth", _SIXTEEN, _normed)


class VGG(Encoder):
    """VGG without its classifier: [B, c, h, w] -> [B, 512, h/32, w/32], or [B, 512] where `pool` averages the map."""

    def __init__(self, plan: Plan, *, channels: int = 3, size: int = 32, pool: bool = False) -> None:
        super().__init__(channels=channels, size=size, least=2 ** len(plan.blocks))
        layers: list[nn.Module] = []
        for block in plan.blocks:
            for inputs, outputs in pairwise((channels, *block)):
                layers += plan.unit(inputs, outputs)
            layers.append(nn.MaxPool2d(2))
            channels = block[-1]
        self.features = nn.Sequential(*layers)
        self.width, self.official, self.pool = channels, plan.official, pool
        kaiming(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        return x.mean((2, 3)) if self.pool else x


def vgg11(*, channels: int = 3, size: int = 32, pool: bool = False) -> VGG:
    """Eight convolutions; with `pool` FedBR's network for CIFAR10."""
    return VGG(VGG11, channels=channels, size=size, pool=pool)


def vgg16(*, channels: int = 3, size: int = 32, pool: bool = False) -> VGG:
    """Thirteen convolutions."""
    return VGG(VGG16, channels=channels, size=size, pool=pool)


def vgg16_bn(*, channels: int = 3, size: int = 32, pool: bool = False) -> VGG:
    """Thirteen convolutions, batch norm after each."""
    return VGG(VGG16_BN, channels=channels, size=size, pool=pool)
