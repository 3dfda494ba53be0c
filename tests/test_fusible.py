"""Layers in a form that a compiler can fuse are torch's in what they compute, forward and backward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from uefl.engines.fusible import Norm, Pool, Thin, fusible

pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler warns of itself
LAYERS: dict[str, Any] = {
    "3x3 of one channel": (lambda: nn.Conv2d(1, 5, 3, padding=1, bias=False), Thin),
    "1x1 of one": (lambda: nn.Conv2d(1, 5, 1), Thin),
    "1x1 of two": (lambda: nn.Conv2d(2, 5, 1), Thin),
    "uneven, strided and dilated": (lambda: nn.Conv2d(2, 3, (2, 3), (2, 1), (0, 2), (1, 2)), Thin),
    "pool of 2": (lambda: nn.MaxPool2d(2), Pool),
    "pool of 3": (lambda: nn.MaxPool2d(3), Pool),
    "norm": (lambda: nn.BatchNorm2d(3), Norm),
}
OTHERS = [
    *(nn.Conv2d(3, 5, 3), nn.Conv2d(2, 4, 1, groups=2), nn.Conv2d(1, 2, 3, padding="same")),
    *(nn.Conv2d(1, 2, 3, padding=1, padding_mode="reflect"), nn.MaxPool2d(3, 2), nn.MaxPool2d(2, padding=1)),
    *(nn.MaxPool2d(2, ceil_mode=True), nn.MaxPool2d(2, return_indices=True), nn.MaxPool2d((2, 1))),
    *(nn.MaxPool2d(5), nn.BatchNorm2d(2, affine=False), nn.BatchNorm2d(2, momentum=None), nn.BatchNorm1d(2)),
    nn.BatchNorm2d(2, track_running_stats=False),
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


@pytest.mark.parametrize(("dtype", "near"), [(torch.float64, 1e-9), (torch.float32, 1e-3)], ids=str)
def test_norms_far_from_zero_are_torchs(dtype: torch.dtype, near: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 3, 5, 6, dtype=torch.float64) + torch.tensor([0.0, 1e3, -1e3]).view(3, 1, 1)
    theirs = nn.BatchNorm2d(3).double()
    ours = nn.Sequential(copy.deepcopy(theirs).to(dtype))
    fusible(ours)
    compiled: Any = torch.compile(ours, backend="aot_eager")
    for found, expected in zip(passed(compiled, x.to(dtype)), passed(theirs, x), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=near, atol=near)
    for found, expected in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(found.double(), expected.double(), rtol=near, atol=near)
    torch.testing.assert_close(compiled.eval()(x.to(dtype)).double(), theirs.eval()(x), rtol=near, atol=near)


def passed(layer: Any, x: Tensor) -> list[Tensor]:
    """The value and the gradient of the input."""
    x = x.clone().requires_grad_()
    y = layer(x)
    return [y.detach(), *torch.autograd.grad((y * torch.linspace(-1, 1, y.numel()).reshape(y.shape)).sum(), [x])]


def test_a_norm_of_one_value_is_refused_as_torch_refuses_it() -> None:
    norm = nn.Sequential(nn.BatchNorm2d(3))
    fusible(norm)
    with pytest.raises((ValueError, RuntimeError), match="more than 1 value"):
        torch.compile(norm, backend="aot_eager")(torch.zeros(1, 3, 1, 1))


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
