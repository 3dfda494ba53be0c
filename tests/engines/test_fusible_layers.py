"""Fusible layers compute what torch's layers compute, forward and backward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from uefl.engines.stacked.fusion.fusible_layers import (
    FusibleBatchNorm2d,
    FusibleConv2d,
    FusibleMaxPool2d,
    make_layers_fusible,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of the compiler about itself
SUPPORTED: dict[str, Any] = {
    "3x3, one channel": (lambda: nn.Conv2d(1, 5, 3, padding=1, bias=False), FusibleConv2d),
    "1x1, one channel": (lambda: nn.Conv2d(1, 5, 1), FusibleConv2d),
    "1x1, two channels": (lambda: nn.Conv2d(2, 5, 1), FusibleConv2d),
    "asymmetric, strided and dilated": (lambda: nn.Conv2d(2, 3, (2, 3), (2, 1), (0, 2), (1, 2)), FusibleConv2d),
    "2x2 max-pool": (lambda: nn.MaxPool2d(2), FusibleMaxPool2d),
    "3x3 max-pool": (lambda: nn.MaxPool2d(3), FusibleMaxPool2d),
    "batch norm": (lambda: nn.BatchNorm2d(3), FusibleBatchNorm2d),
}
UNSUPPORTED = [
    *(nn.Conv2d(3, 5, 3), nn.Conv2d(2, 4, 1, groups=2), nn.Conv2d(1, 2, 3, padding="same")),
    *(nn.Conv2d(1, 2, 3, padding=1, padding_mode="reflect"), nn.MaxPool2d(3, 2), nn.MaxPool2d(2, padding=1)),
    *(nn.MaxPool2d(2, ceil_mode=True), nn.MaxPool2d(2, return_indices=True), nn.MaxPool2d((2, 1))),
    *(nn.MaxPool2d(5), nn.BatchNorm2d(2, affine=False), nn.BatchNorm2d(2, momentum=None), nn.BatchNorm1d(2)),
    nn.BatchNorm2d(2, track_running_stats=False),
]


@pytest.mark.parametrize("name", SUPPORTED)
def test_values_and_gradients_equal_those_of_torch(name: str) -> None:
    make_layer, fusible_class = SUPPORTED[name]
    torch.manual_seed(0)
    layer = make_layer().double()
    fusible = nn.Sequential(copy.deepcopy(layer))
    make_layers_fusible(fusible)
    assert type(fusible[0]) is fusible_class
    # Few levels, so that windows have equal values: the gradient belongs to the first.
    x = torch.randint(-2, 3, (4, getattr(layer, "in_channels", 3), 9, 11)).double()
    compiled = torch.compile(fusible, backend="aot_eager")
    for tensor, expected in zip(compute_gradients(compiled, x), compute_gradients(layer, x), strict=True):
        torch.testing.assert_close(tensor, expected, rtol=1e-12, atol=1e-12)


def test_max_pool_propagates_nan() -> None:
    pool = nn.Sequential(nn.MaxPool2d(2))
    make_layers_fusible(pool)
    x = torch.zeros(1, 1, 2, 4)
    x[0, 0, 0, 1], x[0, 0, 1, 2] = torch.nan, 1.0
    y = torch.compile(pool, backend="aot_eager")(x)
    assert y[0, 0, 0, 0].isnan()
    assert y[0, 0, 0, 1] == 1


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-3)], ids=str)
def test_batch_norm_of_large_means_equals_that_of_torch(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 3, 5, 6, dtype=torch.float64) + torch.tensor([0.0, 1e3, -1e3]).view(3, 1, 1)
    norm = nn.BatchNorm2d(3).double()
    fusible = nn.Sequential(copy.deepcopy(norm).to(dtype))
    make_layers_fusible(fusible)
    compiled: Any = torch.compile(fusible, backend="aot_eager")
    close = {"rtol": tolerance, "atol": tolerance}
    for tensor, expected in zip(compute_input_gradient(compiled, x.to(dtype)), compute_input_gradient(norm, x)):
        torch.testing.assert_close(tensor.double(), expected, **close)
    for tensor, expected in zip(fusible.buffers(), norm.buffers(), strict=True):
        torch.testing.assert_close(tensor.double(), expected.double(), **close)
    torch.testing.assert_close(compiled.eval()(x.to(dtype)).double(), norm.eval()(x), **close)


def compute_input_gradient(layer: Any, x: Tensor) -> list[Tensor]:
    """Return the value and the gradient of the input."""
    x = x.clone().requires_grad_()
    y = layer(x)
    return [y.detach(), *torch.autograd.grad((y * torch.linspace(-1, 1, y.numel()).reshape(y.shape)).sum(), [x])]


def test_batch_norm_of_one_value_raises_torchs_error() -> None:
    norm = nn.Sequential(nn.BatchNorm2d(3))
    make_layers_fusible(norm)
    with pytest.raises((ValueError, RuntimeError), match="more than 1 value"):
        torch.compile(norm, backend="aot_eager")(torch.zeros(1, 3, 1, 1))


@pytest.mark.parametrize("layer", UNSUPPORTED, ids=str)
def test_unsupported_layers_stay_unchanged(layer: nn.Module) -> None:
    layer_class = type(layer)
    make_layers_fusible(layer)
    assert type(layer) is layer_class


def compute_gradients(layer: Any, x: Tensor) -> list[Tensor]:
    """Return the value and all gradients: of weights, or of the input of a layer without weights."""
    x = x.clone().requires_grad_(not list(layer.parameters()))
    y = layer(x)
    dy = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)
    return [y.detach(), *torch.autograd.grad((y * dy).sum(), list(layer.parameters()) or [x])]
