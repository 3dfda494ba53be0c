"""A simple PyTorch loop: data as tensors in memory, one model, no framework.

A last argument, `channels_last`, selects the memory layout in which convolutions are faster on most CPUs.
"""

from __future__ import annotations

import sys
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.peers.workload import (
    BATCH_SIZE,
    EVAL_BATCH_SIZE,
    LR,
    draw_order,
    parse_arguments,
    report_round,
    save_weights,
    start_network,
)


def train_epoch(net: nn.Module, x: Tensor, y: Tensor, order: Tensor) -> None:
    """Train one epoch at one silo, on the examples in this order."""
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), LR)
    for indices in torch.split(order, BATCH_SIZE):
        optimizer.zero_grad()
        cross_entropy(net(x[indices]), y[indices]).backward()
        optimizer.step()


@torch.no_grad()
def count_correct(net: nn.Module, x: Tensor, y: Tensor) -> int:
    """Count correct predictions."""
    net.eval()
    batches = zip(torch.split(x, EVAL_BATCH_SIZE), torch.split(y, EVAL_BATCH_SIZE))
    return sum(int((net(images).argmax(1) == labels).sum()) for images, labels in batches)


def main() -> None:
    """Run the federation."""
    workload = parse_arguments()
    net = start_network(workload)
    train, test = list(workload.x), list(workload.test_x)
    if "channels_last" in sys.argv[5:]:
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        # For torch, one channel has both layouts at once; a copy sets the strides.
        train, test = (
            [torch.empty_like(x, memory_format=torch.channels_last).copy_(x) for x in split] for split in (train, test)
        )
    for round_number in range(1, workload.rounds + 1):
        received = deepcopy(net.state_dict())
        mean = {name: torch.zeros_like(t) for name, t in received.items()}
        for i, (x, y) in enumerate(zip(train, workload.y)):
            net.load_state_dict(received)
            train_epoch(net, x, y, draw_order(i, round_number, len(y)))
            for name, t in net.state_dict().items():
                mean[name] += t / len(train)
        net.load_state_dict(mean)
        report_round(sum(count_correct(net, x, y) for x, y in zip(test, workload.test_y)) / workload.test_y.numel())
    save_weights(net.state_dict())


if __name__ == "__main__":
    main()
