"""Layers in a form that a compiler can fuse are torch's in what they compute, forward and backward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from uefl.engines.fusible import Pool, Thin, fusible

pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler warns of itself
LAYERS: dict[str, Any] = {
    "3x3 of one channel": (lambda: nn.Conv2d(1, 5, 3, padding=1, bias=False), Thin),
    "1x1 of one": (lambda: nn.Conv2d(1, 5, 1), Thin),
    "1x1 of two": (lambda: nn.Conv2d(2, 5, 1), Thin),
    "uneven, strided and dilated": (lambda: nn.Conv2d(2, 3, (2, 3), (2, 1), (0, 2), (1, 2)), Thin),
    "pool of 2": (lambda: nn.MaxPool2d(2), Pool),
    "pool of 3": (lambda: nn.MaxPool2d(3), Pool),
}
OTHERS = [
    *(nn.Conv2d(3, 5, 3), nn.Conv2d(2, 4, 1, groups=2), nn.Conv2d(1, 2, 3, padding="same")),
    *(nn.Conv2d(1, 2, 3, padding=1, padding_mode="reflect"), nn.MaxPool2d(3, 2), nn.MaxPool2d(2, padding=1)),
    *(nn.MaxPool2d(2, ceil_mode=True), nn.MaxPool2d(2, return_indices=True), nn.MaxPool2d((2, 1))),
]


@pytest.mark.parametrize("name", LAYERS)
def test_values_and_gradients_are_torchs(name: str) -> None:
    make, kind = LAYERS[name]
    torch.manual_seed(0)
    theirs = make().double()
    ours = nn.Sequential(copy.deepcopy(theirs))
    fusible(ours)
    assert type(ours[0]) is kind
    # Few levels, so that windows have equal values: the gradient goes to the first.
    x = torch.randint(-2, 3, (4, getattr(theirs, "in_channels", 3), 9, 11)).double()
    for found, expected in zip(results(torch.compile(ours, backend="aot_eager"), x), results(theirs, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_what_is_not_a_number_is_seen_after_pooling() -> None:
    pool = nn.Sequential(nn.MaxPool2d(2))
    fusible(pool)
    x = torch.zeros(1, 1, 2, 4)
    x[0, 0, 0, 1], x[0, 0, 1, 2] = torch.nan, 1.0
    found = torch.compile(pool, backend="aot_eager")(x)
    assert found[0, 0, 0, 0].isnan()
    assert found[0, 0, 0, 1] == 1


@pytest.mark.parametrize("layer", OTHERS, ids=str)
def test_other_layers_stay(layer: nn.Module) -> None:
    was = type(layer)
    fusible(layer)
    assert type(layer) is was


def results(layer: Any, x: Tensor) -> list[Tensor]:
    """The value and all gradients: of weights, or of the input where there are none."""
    x = x.clone().requires_grad_(not list(layer.parameters()))
    y = layer(x)
    up = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)
    return [y.detach(), *torch.autograd.grad((y * up).sum(), list(layer.parameters()) or [x])]
