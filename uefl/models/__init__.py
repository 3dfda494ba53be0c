"""Networks: encoders, and the network around them. Importing this package imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from uefl.core.registry import Entry, Registry

if TYPE_CHECKING:
    from torch import nn

# Each entry builds an encoder from `in_channels`, `image_size` and its own settings.
ENCODERS: Registry[Callable[..., nn.Module]] = Registry(
    "encoder",
    {
        "residual": Entry(
            "uefl.models.residual_encoder:ResidualEncoder",
            "The paper's residual blocks for grayscale images; set `width` and `depth`",
        ),
        "vgg11": Entry(
            "uefl.models.vgg:vgg11", "8 convolutions; average-pooled, FedBR's CIFAR10 network; 512 channels"
        ),
        "vgg16": Entry("uefl.models.vgg:vgg16", "13 convolutions; ImageNet weights available; 512 channels"),
        "vgg16-bn": Entry(
            "uefl.models.vgg:vgg16_bn", "vgg16 with batch norm; ImageNet weights available; 512 channels"
        ),
        "resnet18": Entry(
            "uefl.models.resnet18:resnet18", "For large images (PACS); ImageNet weights available; 512 channels"
        ),
        "resnet18-cifar": Entry(
            "uefl.models.resnet18:resnet18_cifar", "ResNet18 with a stem for small images (VHL); 512 channels"
        ),
        "group-norm-conv": Entry(
            "uefl.models.baseline_encoders:GroupNormConv",
            "FedIIR's 4 convolutions with group norm for Rotated MNIST; 128 features",
        ),
        "lenet-fmnist": Entry(
            "uefl.models.baseline_encoders:lenet_fmnist",
            "FedCR's LeNet for Fashion-MNIST, 4 and 12 filters; 1024 features",
        ),
        "lenet-cifar": Entry(
            "uefl.models.baseline_encoders:lenet_cifar", "FedCR's LeNet for CIFAR, 64 and 64 filters; 1024 features"
        ),
        "mlp": Entry(
            "uefl.models.baseline_encoders:MLP",
            "Two hidden layers, the default for tables; FedCR's for EMNIST, 1024 features",
        ),
        "mlp-bn": Entry("uefl.models.baseline_encoders:BatchNormMLP", "Two hidden layers with batch norm, for tables"),
        "identity": Entry(
            "uefl.models.baseline_encoders:Identity",
            "The inputs themselves; with feature_norm=none and hidden_size=0 a logistic regression",
        ),
        "dirt": Entry(
            "uefl.models.baseline_encoders:DIRT", "DIRT's 2 convolutions for Ghifary's Rotated MNIST; 64 features"
        ),
    },
    group="uefl.encoders",
)

# Each entry builds an encoder from the text after the colon, as in `timm:resnet18`, and what the encoders above take.
ENCODER_FAMILIES: Registry[Callable[..., nn.Module]] = Registry(
    "encoder",
    {
        "timm": Entry(
            "uefl.models.timm_encoder:build_timm_encoder",
            "Any backbone of timm, such as timm:resnet10t; needs the extra `timm`",
        )
    },
)


def check_encoder(name: str) -> None:
    """Raise an `InputError` unless an encoder or a family of encoders has this name; import nothing."""
    family, _, member = name.partition(":")
    if not (member and family in ENCODER_FAMILIES):
        ENCODERS.check_name(name)


def get_encoder_builder(name: str) -> Callable[..., nn.Module]:
    """Return the function that builds an encoder by its name."""
    family, _, member = name.partition(":")
    return partial(ENCODER_FAMILIES[family], member) if member and family in ENCODER_FAMILIES else ENCODERS[name]
