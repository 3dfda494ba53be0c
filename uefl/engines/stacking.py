"""How many silos go together: what a network computes, and how long batches are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

LARGE = 2**26  # numbers that one silo's pass computes from which on it fills a GPU: nothing is gained by stacking
MOST = {"cuda": 2**31, "cpu": 2**25}  # the same for a stack: what bounds memory


def length(cuts: Sequence[slice], place: int) -> int:
    """How long the batch at this place is; 0: the silo has none."""
    return cuts[place].stop - cuts[place].start if place < len(cuts) else 0


def fills_a_device(numbers: int) -> bool:
    """Whether the pass of one silo is so large that nothing is gained by stacking."""
    return numbers > LARGE


def most_together(numbers: int, device: str) -> int:
    """How many silos go into a stack, when a batch of one makes so many numbers."""
    return 1 if fills_a_device(numbers) else max(1, MOST[device] // max(numbers, 1))


def numbers(net: nn.Module, shape: Sequence[int]) -> int:
    """How many numbers a network computes on its way from one example to its prediction."""
    total = 0

    def count(_module: nn.Module, _inputs: Any, output: Any) -> None:
        nonlocal total
        total += output.numel() if isinstance(output, Tensor) else 0

    hooks = [m.register_forward_hook(count) for m in net.modules() if not list(m.children())]
    like = next(net.parameters())
    was = net.training
    with torch.no_grad():
        net.eval()(like.new_zeros(2, *shape))
    net.train(was)
    for hook in hooks:
        hook.remove()
    return total // 2
