"""Max-pool before ReLU: ReLU of the largest is the largest of ReLU, for a quarter of the work.

Values and gradients are the same: where all are negative no gradient passes either way, of equal ones the first wins.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from uefl.noise import key, normal


def pooled_first(net: nn.Module, shape: Sequence[int]) -> None:
    """Let max-pools of a network for examples of this shape change places with the ReLU before them.

    Neither has tensors, so all names stay. Who reads a sequence by parts would see the change: then nothing is moved.
    """
    pairs = [
        (m, i)
        for m in net.modules()
        if type(m) is nn.Sequential
        for i in range(len(m) - 1)
        if type(m[i]) is nn.ReLU and type(m[i + 1]) is nn.MaxPool2d
    ]
    if not pairs:
        return
    like = next(net.parameters())
    x = normal(key("probe"), (2, *shape)).to(like.device, like.dtype)
    before = predicted(net, x)
    swap(pairs)
    if not torch.equal(before, predicted(net, x)):
        swap(pairs)


def swap(pairs: Sequence[tuple[nn.Sequential, int]]) -> None:
    for m, i in pairs:
        m[i], m[i + 1] = m[i + 1], m[i]


@torch.no_grad()
def predicted(net: nn.Module, x: Tensor) -> Tensor:
    was = net.training
    logits: Tensor = net.eval()(x).logits
    net.train(was)
    return logits
