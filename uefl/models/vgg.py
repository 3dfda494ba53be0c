"""VGG without its classifier: 3x3 convolutions in five blocks, each of which halves the image.

Simonyan and Zisserman, "Very deep convolutional networks for large-scale image recognition", ICLR 2015. Parameters have
torchvision's names (`features.0.weight`), so official weights load. A 32x32 image becomes one token of 512 channels.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor, nn

from uefl.models.base import Encoder, init_kaiming_normal


def _conv_relu(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]


def _conv_batch_norm_relu(inputs: int, outputs: int) -> list[nn.Module]:
    # The convolution has a bias, although batch norm cancels it, because the official weights have one.
    return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]


class VGGPlan(NamedTuple):
    """A network of the VGG family: output channels of each convolution, by block."""

    torchvision_file: str
    blocks: tuple[tuple[int, ...], ...]
    make_unit: Callable[[int, int], list[nn.Module]] = _conv_relu


_VGG11_BLOCKS = ((64,), (128,), (256, 256), (512, 512), (512, 512))
_VGG16_BLOCKS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))

VGG11_PLAN = VGGPlan("vgg11-8a719046.pth", _VGG11_BLOCKS)
VGG16_PLAN = VGGPlan("vgg16-397923af.pth", _VGG16_BLOCKS)
VGG16_BN_PLAN = VGGPlan("vgg16_bn-6c64b313.pth", _VGG16_BLOCKS, _conv_batch_norm_relu)


class VGG(Encoder):
    """VGG without its classifier: [B, c, h, w] -> [B, 512, h/32, w/32], or [B, 512] with `average_pool`."""

    def __init__(
        self, plan: VGGPlan, *, in_channels: int = 3, image_size: int = 32, average_pool: bool = False
    ) -> None:
        super().__init__(in_channels=in_channels, image_size=image_size, min_image_size=2 ** len(plan.blocks))
        layers: list[nn.Module] = []
        for block in plan.blocks:
            for inputs, outputs in pairwise((in_channels, *block)):
                layers += plan.make_unit(inputs, outputs)
            layers.insert(-1, nn.MaxPool2d(2))  # before the block's last ReLU
            in_channels = block[-1]
        self.features = nn.Sequential(*layers)
        self.num_features, self.torchvision_file, self.average_pool = in_channels, plan.torchvision_file, average_pool
        init_kaiming_normal(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        return x.mean((2, 3)) if self.average_pool else x


def vgg11(*, in_channels: int = 3, image_size: int = 32, average_pool: bool = False) -> VGG:
    """Return eight convolutions; with `average_pool`, FedBR's network for CIFAR10."""
    return VGG(VGG11_PLAN, in_channels=in_channels, image_size=image_size, average_pool=average_pool)


def vgg16(*, in_channels: int = 3, image_size: int = 32, average_pool: bool = False) -> VGG:
    """Return thirteen convolutions."""
    return VGG(VGG16_PLAN, in_channels=in_channels, image_size=image_size, average_pool=average_pool)


def vgg16_bn(*, in_channels: int = 3, image_size: int = 32, average_pool: bool = False) -> VGG:
    """Return thirteen convolutions, with batch norm after each."""
    return VGG(VGG16_BN_PLAN, in_channels=in_channels, image_size=image_size, average_pool=average_pool)
