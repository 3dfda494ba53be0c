"""ResNet18 without its classifier, with a stem for large images (ImageNet) or for small images (CIFAR).

He et al., "Deep residual learning for image recognition", CVPR 2016. Parameters have torchvision's names
(`layer2.0.downsample.0.weight`), so official weights load.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from uefl.models.base import Encoder, init_kaiming_normal


class Stem(NamedTuple):
    """The layers before the first block."""

    torchvision_file: str
    kernel_size: int
    stride: int
    build_pool: Callable[[], nn.Module]


IMAGENET_STEM = Stem("resnet18-f37072fd.pth", 7, 2, lambda: nn.MaxPool2d(3, stride=2, padding=1))
CIFAR_STEM = Stem("", 3, 1, nn.Identity)  # keeps the resolution of small images; no official weights fit


class BasicBlock(nn.Module):
    """Two 3x3 convolutions plus a shortcut, which is a 1x1 convolution if the shape changes."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.downsample = nn.Sequential()
        if stride > 1 or in_channels != out_channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False), nn.BatchNorm2d(out_channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        residual = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(residual + self.downsample(x))


def _make_layer(in_channels: int, out_channels: int, stride: int) -> nn.Sequential:
    return nn.Sequential(BasicBlock(in_channels, out_channels, stride), BasicBlock(out_channels, out_channels, 1))


class ResNet18(Encoder):
    """[B, c, h, w] -> [B, 512, h/32, w/32] (h/8 with the CIFAR stem, rounded up), or [B, 512] with `average_pool`."""

    def __init__(self, stem: Stem, *, in_channels: int = 3, image_size: int = 32, average_pool: bool = False) -> None:
        super().__init__(in_channels=in_channels, image_size=image_size)
        self.conv1 = nn.Conv2d(
            in_channels, 64, stem.kernel_size, stride=stem.stride, padding=stem.kernel_size // 2, bias=False
        )
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = stem.build_pool()
        self.layer1 = _make_layer(64, 64, 1)
        self.layer2 = _make_layer(64, 128, 2)
        self.layer3 = _make_layer(128, 256, 2)
        self.layer4 = _make_layer(256, 512, 2)
        self.num_features, self.torchvision_file, self.average_pool = 512, stem.torchvision_file, average_pool
        init_kaiming_normal(self)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.maxpool(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return x.mean((2, 3)) if self.average_pool else x


def resnet18(*, in_channels: int = 3, image_size: int = 224, average_pool: bool = False) -> ResNet18:
    """Return ResNet18 with the stem for large images: a 7x7 convolution of stride 2, and a max-pool."""
    return ResNet18(IMAGENET_STEM, in_channels=in_channels, image_size=image_size, average_pool=average_pool)


def resnet18_cifar(*, in_channels: int = 3, image_size: int = 32, average_pool: bool = False) -> ResNet18:
    """Return ResNet18 with the stem for small images: a 3x3 convolution of stride 1, no max-pool."""
    return ResNet18(CIFAR_STEM, in_channels=in_channels, image_size=image_size, average_pool=average_pool)
