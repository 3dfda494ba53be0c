"""The networks that several benchmarks measure, around real digits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.images import taken
from uefl.federation import Part
from uefl.models.encoders import encoder
from uefl.models.net import Net

CLASSES = 10


def release(*, tiny: bool = False) -> Net:
    """The release's MNIST network: three residual blocks of 128, 256 and 512 channels, 512 hidden units."""
    width = 8 if tiny else 128
    return _net("residual", 1, 28, width=width)


def vgg16(name: str = "vgg16") -> Net:
    """The paper's network for colour images of 32x32 pixels: 512 channels, one token, 512 hidden units."""
    return _net(name, 3, 32)


def _net(name: str, channels: int, size: int, **fields: int) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net(encoder(name, channels, size=size, **fields), CLASSES, (channels, size, size), hidden=512)


def placed(net: Net, device: str) -> Net:
    """On a device in the layout that engines use."""
    there: Net = net.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return there


def batch(part: Part, n: int, shape: tuple[int, ...], device: str) -> tuple[Tensor, Tensor]:
    """n digits in a network's shape, channels last."""
    x, y = taken(part, 0, n)
    if x.shape[1:] != shape:
        x = F.interpolate(x, shape[1:], mode="bilinear").expand(-1, shape[0], -1, -1)
    x = x.to(device)
    return torch.empty_like(x, memory_format=torch.channels_last).copy_(x), y.to(device)
