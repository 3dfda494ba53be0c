"""Encoders by name."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any, NamedTuple

from torch import nn

from uefl.errors import unknown
from uefl.models.residual import ResidualEncoder
from uefl.models.resnet18 import resnet18, resnet18_cifar
from uefl.models.small import MLP, Dirt, GroupNormConv, lenet_cifar, lenet_fmnist
from uefl.models.vgg import vgg11, vgg16, vgg16_bn
from uefl.plugins import has


class Entry(NamedTuple):
    """What builds an encoder, given `channels` and its other fields, and one line about it."""

    build: Callable[..., nn.Module]
    about: str


ENCODERS: dict[str, Entry] = {
    "residual": Entry(ResidualEncoder, "the paper's residual blocks for grey images; `width` and `depth` are yours"),
    "vgg11": Entry(vgg11, "8 convolutions; pooled, FedBR's network for CIFAR10; 512 channels"),
    "vgg16": Entry(vgg16, "13 convolutions, ImageNet weights to be had; 512 channels"),
    "vgg16-bn": Entry(vgg16_bn, "vgg16 with batch norm, ImageNet weights to be had; 512 channels"),
    "resnet18": Entry(resnet18, "for large images (PACS), ImageNet weights to be had; 512 channels"),
    "resnet18-cifar": Entry(resnet18_cifar, "ResNet18 whose stem keeps every pixel (VHL); 512 channels"),
    "gn-conv": Entry(GroupNormConv, "FedIIR's 4 convolutions with group norm for Rotated MNIST; 128-d"),
    "lenet-fmnist": Entry(lenet_fmnist, "FedCR's LeNet for Fashion-MNIST, 4 and 12 filters; 1024-d"),
    "lenet-cifar": Entry(lenet_cifar, "FedCR's LeNet for CIFAR, 64 and 64 filters; 1024-d"),
    "mlp": Entry(MLP, "FedCR's two hidden layers for EMNIST; 1024-d"),
    "dirt": Entry(Dirt, "DIRT's 2 convolutions for Ghifary's Rotated MNIST; 64-d"),
}


def encoder(name: str, channels: int, **fields: Any) -> nn.Module:
    """A fresh encoder; `size`, pixels a side, is a field of all, `pool` of those that end in a map."""
    if not has(ENCODERS, "uefl.encoders", name):
        raise unknown("encoder", name, ENCODERS)
    build = ENCODERS[name].build
    known = [field for field in signature(build).parameters if field != "channels"]
    for field in fields:
        if field not in known:
            raise unknown(f"field of encoder {name}", field, known)
    return build(channels=channels, **fields)
