"""Frozen batch-norm statistics do not change while the weights learn."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from uefl.models.build import build_encoder
from uefl.models.frozen_batch_norm import freeze_batch_norm_statistics

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def find_changes(net: nn.Module) -> dict[str, bool]:
    """Return by name whether two training steps change a tensor."""
    before = deepcopy(net.state_dict())
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.randn(4, 1, 32, 32)).square().mean().backward()
        optimizer.step()
    return {name: not torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items()}


@pytest.mark.parametrize("name", ["dirt", "resnet18-cifar", "vgg16-bn"])
def test_frozen_statistics_stay_and_all_other_tensors_learn(name: str) -> None:
    net = freeze_batch_norm_statistics(build_encoder(name, 1, image_size=32))
    for name, has_changed in find_changes(net).items():
        assert has_changed != name.endswith(STATISTICS), name


def test_without_freezing_the_statistics_change() -> None:
    changes = find_changes(build_encoder("dirt", 1, image_size=32))
    assert all(has_changed for name, has_changed in changes.items() if name.endswith(STATISTICS))


def test_features_of_an_image_do_not_depend_on_its_batch() -> None:
    net = freeze_batch_norm_statistics(build_encoder("dirt", 1)).train()
    x = torch.randn(5, 1, 28, 28)
    torch.testing.assert_close(net(x)[:1], net(x[:1]))


def test_freezing_survives_copies_and_keeps_names_and_values() -> None:
    net = build_encoder("dirt", 1)
    before = deepcopy(net.state_dict())
    net = deepcopy(freeze_batch_norm_statistics(freeze_batch_norm_statistics(net))).train()
    assert net.training
    assert not any(m.training for m in net.modules() if isinstance(m, nn.BatchNorm2d))
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())


def test_batch_norm_of_vectors_can_be_frozen() -> None:
    net = freeze_batch_norm_statistics(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))).train()
    net(torch.randn(1, 2))
    assert net[1].num_batches_tracked == 0
