"""How many silos go together: what a network computes, and how long batches are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

LARGE = 2**23  # numbers that a layer makes of one silo's batch from which on it fills a GPU: stacking gains nothing
MOST = {"cuda": 2**30, "cpu": 2**25}  # numbers that all layers make for a whole stack: what bounds memory


class Size(NamedTuple):
    """How many numbers a network computes from one example to its prediction: in all, and in its widest layer."""

    total: int
    widest: int


def length(cuts: Sequence[slice], place: int) -> int:
    """How long the batch at this place is; 0: the silo has none."""
    return cuts[place].stop - cuts[place].start if place < len(cuts) else 0


def fills_a_device(size: Size, batch: int) -> bool:
    """Whether the layers of one silo are so large that nothing is gained by stacking."""
    return size.widest * batch > LARGE


def most_together(size: Size, batch: int, device: str) -> int:
    """How many silos go into a stack."""
    return 1 if fills_a_device(size, batch) else max(1, MOST[device] // max(size.total * batch, 1))


def size_of(net: nn.Module, shape: Sequence[int]) -> Size:
    """Of a network for examples of this shape."""
    counts: list[int] = [0]

    def count(_module: nn.Module, _inputs: Any, output: Any) -> None:
        counts.append(output.numel() if isinstance(output, Tensor) else 0)

    hooks = [m.register_forward_hook(count) for m in net.modules() if not list(m.children())]
    like = next(net.parameters())
    was = net.training
    with torch.no_grad():
        net.eval()(like.new_zeros(2, *shape))
    net.train(was)
    for hook in hooks:
        hook.remove()
    return Size(sum(counts) // 2, max(counts) // 2)
