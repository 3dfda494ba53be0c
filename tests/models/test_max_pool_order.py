"""Our encoders apply max-pool before ReLU, which gives the same bits as ReLU before max-pool."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from uefl.models.build import build_encoder
from uefl.models.resnet18 import ResNet18

SETTINGS = {
    "residual": {"image_size": 16, "width": 4},
    "lenet-fmnist": {"image_size": 28, "width": 16},
    "lenet-cifar": {"image_size": 32, "width": 16},
    "dirt": {"image_size": 28},
    "vgg11": {"image_size": 32},
    "vgg16-bn": {"image_size": 32},
}


def list_pairs(net: nn.Module) -> list[tuple[str, str]]:
    """Return the classes of each max-pool and of the layer after it."""
    sequences = [list(m) for m in net.modules() if isinstance(m, nn.Sequential)]
    return [
        (type(layer).__name__, type(following).__name__)
        for layers in sequences
        for layer, following in pairwise(layers)
        if isinstance(layer, nn.MaxPool2d)
    ]


def put_relu_first(net: nn.Module) -> nn.Module:
    """Return a copy in which ReLU and max-pool have changed places."""
    net = copy.deepcopy(net)
    for sequence in [m for m in net.modules() if isinstance(m, nn.Sequential)]:
        for i in [i for i, layer in enumerate(sequence) if isinstance(layer, nn.MaxPool2d)]:
            sequence[i], sequence[i + 1] = sequence[i + 1], sequence[i]
    return net


class ReLUFirstResNet18(ResNet18):
    """ResNet18 with ReLU before max-pool, as published."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(torch.relu(self.bn1(self.conv1(x))))
        return self.layer4(self.layer3(self.layer2(self.layer1(x))))


def compute_gradients(net: nn.Module, x: Tensor) -> list[Tensor]:
    """Return features, and the gradients of all weights and of the input."""
    x = x.clone().requires_grad_()
    y = net(x)
    dy = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)
    return [y.detach(), *torch.autograd.grad((y * dy).sum(), [x, *net.parameters()])]


def make_images(image_size: int) -> Tensor:
    """Return noise and images of few levels, so that windows have equal values."""
    x = torch.randn(4, 1, image_size, image_size)
    return torch.cat([x, x.sign()])


def assert_equal_gradients(net: nn.Module, other: nn.Module, image_size: int) -> None:
    """Compare two networks in bits; some channels are negative everywhere and have no gradient."""
    with torch.no_grad():
        for net_or_other in (net, other):
            for m in net_or_other.modules():
                if isinstance(m, nn.Conv2d | nn.BatchNorm2d) and m.bias is not None:
                    m.bias[::3] = -9.0
    x = make_images(image_size)
    for tensor, expected in zip(compute_gradients(net, x), compute_gradients(other, x), strict=True):
        assert torch.equal(tensor, expected)


@pytest.mark.parametrize("name", SETTINGS)
def test_max_pool_before_relu_has_the_same_values_and_gradients(name: str) -> None:
    torch.manual_seed(0)
    net = build_encoder(name, 1, **SETTINGS[name])
    pairs = list_pairs(net)
    assert pairs
    assert set(pairs) == {("MaxPool2d", "ReLU")}
    assert_equal_gradients(net, put_relu_first(net), SETTINGS[name]["image_size"])


def test_resnet18_has_the_same_values_and_gradients_in_either_order() -> None:
    torch.manual_seed(0)
    net = build_encoder("resnet18", 1, image_size=64)
    other = copy.deepcopy(net)
    other.__class__ = ReLUFirstResNet18
    order = []
    net.maxpool.register_forward_hook(lambda _module, inputs, _output: order.append(bool((inputs[0] < 0).any())))
    assert_equal_gradients(net, other, 64)
    assert order == [True], "the pool receives values before ReLU"
