"""How many silos to stack, given the network's activations and the batch size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# Activations of one layer for one silo's batch; a layer with more fills a GPU, and stacking gains nothing.
DEVICE_FILLING_ACTIVATIONS = 2**23
# Activations of all layers for a whole stack; they bound the memory in use.
MAX_STACK_ACTIVATIONS = {"cuda": 2**30, "cpu": 2**25}
# Times as many fit without gradients: a layer's activations are then freed when the next layer has used them.
EVALUATION_FACTOR = {"cuda": 2, "cpu": 1}


class ActivationCount(NamedTuple):
    """Number of activations per example: of the whole network, and of its largest layer."""

    total: int
    largest_layer: int


def batch_length(batch_slices: Sequence[slice], position: int) -> int:
    """Return the length of the batch at a position; 0 if the silo has no such batch."""
    return batch_slices[position].stop - batch_slices[position].start if position < len(batch_slices) else 0


def can_fill_device(activations: ActivationCount, batch_size: int) -> bool:
    """Return whether one silo's batch fills the device, so that stacking gains nothing."""
    return activations.largest_layer * batch_size > DEVICE_FILLING_ACTIVATIONS


def compute_stack_size(
    activations: ActivationCount, batch_size: int, device: str, *, with_gradients: bool = True
) -> int:
    """Return how many silos to stack at most."""
    if can_fill_device(activations, batch_size):
        return 1
    limit = MAX_STACK_ACTIVATIONS[device] * (1 if with_gradients else EVALUATION_FACTOR[device])
    return max(1, limit // max(activations.total * batch_size, 1))


def count_activations(
    net: nn.Module, input_shape: Sequence[int], input_dtype: torch.dtype | None = None
) -> ActivationCount:
    """Count the activations of a network for examples of this shape; their type is that of the weights unless given."""
    counts: list[int] = [0]

    def count(_module: nn.Module, _inputs: Any, output: Any) -> None:
        counts.append(output.numel() if isinstance(output, Tensor) else 0)

    hooks = [m.register_forward_hook(count) for m in net.modules() if not list(m.children())]
    param = next(net.parameters())
    training = net.training
    with torch.no_grad():
        net.eval()(param.new_zeros(2, *input_shape, dtype=input_dtype))
    net.train(training)
    for hook in hooks:
        hook.remove()
    return ActivationCount(sum(counts) // 2, max(counts) // 2)
