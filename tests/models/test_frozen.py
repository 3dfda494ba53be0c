"""Frozen statistics do not move, while the weights around them learn."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from uefl.models.encoders import encoder
from uefl.models.frozen import freeze_norm_statistics

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def trained(net: nn.Module) -> dict[str, bool]:
    """Which tensors two steps of training move."""
    before = deepcopy(net.state_dict())
    net.train()
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        optimiser.zero_grad()
        net(torch.randn(4, 1, 32, 32)).square().mean().backward()
        optimiser.step()
    return {name: not torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items()}


@pytest.mark.parametrize("name", ["dirt", "resnet18-cifar", "vgg16-bn"])
def test_frozen_statistics_stay_while_everything_else_learns(name: str) -> None:
    net = freeze_norm_statistics(encoder(name, 1, size=32))
    for tensor, moved in trained(net).items():
        assert moved != tensor.endswith(STATISTICS), tensor


def test_without_freezing_the_statistics_move() -> None:
    assert all(moved for name, moved in trained(encoder("dirt", 1, size=32)).items() if name.endswith(STATISTICS))


def test_a_frozen_network_answers_one_image_the_same_in_any_company() -> None:
    net = freeze_norm_statistics(encoder("dirt", 1)).train()
    x = torch.randn(5, 1, 28, 28)
    torch.testing.assert_close(net(x)[:1], net(x[:1]))


def test_freezing_survives_copies_and_keeps_names_and_values() -> None:
    net = encoder("dirt", 1)
    before = deepcopy(net.state_dict())
    net = deepcopy(freeze_norm_statistics(freeze_norm_statistics(net))).train()
    assert net.training
    assert not any(m.training for m in net.modules() if isinstance(m, nn.BatchNorm2d))
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())


def test_vectors_can_be_frozen_too() -> None:
    net = freeze_norm_statistics(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))).train()
    net(torch.randn(1, 2))
    assert net[1].num_batches_tracked == 0
