"""Networks that several benchmarks measure, with real digits as their input."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.digits import take_cyclic
from uefl.core.federation import Examples
from uefl.models.build import build_encoder
from uefl.models.network import Net

NUM_CLASSES = 10


def make_authors_mnist_net(*, tiny: bool = False) -> Net:
    """Make the authors' MNIST network: three residual blocks of 128, 256 and 512 channels, 512 hidden units."""
    return _make_net("residual", 1, 28, width=8 if tiny else 128)


def make_vgg16(name: str = "vgg16") -> Net:
    """Make the paper's network for color images of 32x32 pixels: 512 channels, one token, 512 hidden units."""
    return _make_net(name, 3, 32)


def _make_net(name: str, in_channels: int, image_size: int, **settings: int) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        encoder = build_encoder(name, in_channels, image_size=image_size, **settings)
        return Net(encoder, NUM_CLASSES, (in_channels, image_size, image_size), hidden_size=512)


def move_to_device(net: Net, device: str) -> Net:
    """Move a network to a device, in the memory layout that engines use."""
    moved: Net = net.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return moved


def make_batch(examples: Examples, batch_size: int, shape: tuple[int, ...], device: str) -> tuple[Tensor, Tensor]:
    """Make a batch of digits in a network's input shape, channels last."""
    x, y = take_cyclic(examples, 0, batch_size)
    if x.shape[1:] != shape:
        x = F.interpolate(x, shape[1:], mode="bilinear").expand(-1, shape[0], -1, -1)
    x = x.to(device)
    return torch.empty_like(x, memory_format=torch.channels_last).copy_(x), y.to(device)
