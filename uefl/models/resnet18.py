"""ResNet18 without its classifier, for large images (ImageNet's stem) and for small ones (CIFAR's).

He et al., "Deep residual learning for image recognition", CVPR 2016. Parameters have torchvision's names
(`layer2.0.downsample.0.weight`), so official weights load.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from uefl.models.encoder import Encoder, kaiming


class Stem(NamedTuple):
    """How the image enters."""

    official: str
    kernel: int
    stride: int
    shrink: Callable[[], nn.Module]


IMAGENET = Stem("resnet18-f37072fd.pth", 7, 2, lambda: nn.MaxPool2d(3, stride=2, padding=1))
CIFAR = Stem("", 3, 1, nn.Identity)  # small images keep every pixel; no official weights fit


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = nn.Sequential()
        if stride > 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        inner = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(inner + self.downsample(x))


def _layer(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    return nn.Sequential(Block(inputs, outputs, stride), Block(outputs, outputs, 1))


class ResNet18(Encoder):
    """[B, c, h, w] -> [B, 512, h/32, w/32] (h/8 after CIFAR's stem, both rounded up), or [B, 512] with `pool`."""

    def __init__(self, stem: Stem, *, channels: int = 3, size: int = 32, pool: bool = False) -> None:
        super().__init__(channels=channels, size=size)
        self.conv1 = nn.Conv2d(channels, 64, stem.kernel, stride=stem.stride, padding=stem.kernel // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = stem.shrink()
        self.layer1 = _layer(64, 64, 1)
        self.layer2 = _layer(64, 128, 2)
        self.layer3 = _layer(128, 256, 2)
        self.layer4 = _layer(256, 512, 2)
        self.width, self.official, self.pool = 512, stem.official, pool
        kaiming(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(torch.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return x.mean((2, 3)) if self.pool else x


def resnet18(*, channels: int = 3, size: int = 224, pool: bool = False) -> ResNet18:
    """With the stem for large images: a 7x7 convolution of stride 2, and a max-pool."""
    return ResNet18(IMAGENET, channels=channels, size=size, pool=pool)


def resnet18_cifar(*, channels: int = 3, size: int = 32, pool: bool = False) -> ResNet18:
    """With the stem for small images: a 3x3 convolution of stride 1, no max-pool."""
    return ResNet18(CIFAR, channels=channels, size=size, pool=pool)
