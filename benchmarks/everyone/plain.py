"""A plain loop, written straightforwardly: data as tensors in memory, one model, no framework.

The third argument, `channels_last`, asks for the layout in which convolutions are faster on most CPUs.
"""

from __future__ import annotations

import sys
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.everyone.task import BATCH, EVALUATION_BATCH, RATE, asked, network, say


def train(net: nn.Module, x: Tensor, y: Tensor) -> None:
    """One epoch at one silo."""
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), RATE)
    for index in torch.split(torch.randperm(len(y)), BATCH):
        optimizer.zero_grad()
        cross_entropy(net(x[index]), y[index]).backward()
        optimizer.step()


@torch.no_grad()
def correct(net: nn.Module, x: Tensor, y: Tensor) -> int:
    net.eval()
    pairs = zip(torch.split(x, EVALUATION_BATCH), torch.split(y, EVALUATION_BATCH))
    return sum(int((net(a).argmax(1) == b).sum()) for a, b in pairs)


def main() -> None:
    task, net = asked(), network()
    xs, tests = list(task.x), list(task.test_x)
    if "channels_last" in sys.argv[3:]:
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        # One channel is both layouts at once to torch; a copy makes the strides say so.
        xs, tests = ([torch.empty_like(x, memory_format=torch.channels_last).copy_(x) for x in p] for p in (xs, tests))
    for _ in range(task.rounds):
        received = deepcopy(net.state_dict())
        mean = {name: torch.zeros_like(t) for name, t in received.items()}
        for x, y in zip(xs, task.y):
            net.load_state_dict(received)
            train(net, x, y)
            for name, t in net.state_dict().items():
                mean[name] += t / len(xs)
        net.load_state_dict(mean)
        say(sum(correct(net, x, y) for x, y in zip(tests, task.test_y)) / task.test_y.numel())


if __name__ == "__main__":
    main()
