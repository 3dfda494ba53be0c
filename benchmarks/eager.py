"""The peer of the GPU benchmarks: a straightforward loop over clients in eager PyTorch, with resident data.

The same network (torch's own dropout in it), the same optimiser, batches and epochs, TF32 products, an average, and of
the averaged model a plain evaluation and 20 dropout passes over the classifier alone, its features computed once.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uefl.engines.serial import choose_kernels
from uefl.federation import Silo, State
from uefl.local import Local
from uefl.models.net import Net
from uefl.noise import Dropout


class Eager:
    """One client after another, one kernel after another."""

    def __init__(self, net: Net, silos: Sequence[Silo], local: Local, passes: int, device: str) -> None:
        self.net = torchs_dropout(copy.deepcopy(net)).to(device)
        self.parts = [[t.to(device) for t in (*s.train, *s.test)] for s in silos]
        self.local, self.passes, self.device = local, passes, device
        self.state: State = {n: t.clone() for n, t in self.net.state_dict().items()}

    def round(self) -> list[tuple[float, float]]:
        choose_kernels(tf32=True, repeatable=False)  # a plain loop does not promise the same bits twice
        total: State = {}
        for x, y, _, _ in self.parts:
            mine = self.train(x, y)
            total = {n: total[n] + t for n, t in mine.items()} if total else mine
        self.state = {n: (t / len(self.parts)).to(self.state[n].dtype) for n, t in total.items()}
        return [self.measure(x, y) for _, _, x, y in self.parts]

    def train(self, x: Tensor, y: Tensor) -> State:
        self.net.load_state_dict(self.state)
        self.net.train()
        optimizer: torch.optim.Optimizer
        if self.local.optimizer == "sgd":
            optimizer = torch.optim.SGD(self.net.parameters(), self.local.rate, momentum=self.local.momentum)
        else:
            optimizer = torch.optim.Adam(self.net.parameters(), self.local.rate)
        for _ in range(self.local.epochs):
            order = torch.randperm(len(y), device=self.device)
            for index in order.split(self.local.batch):
                seen = self.net(x[index])
                loss = F.cross_entropy(seen.logits[0], y[index]) + 0.25 * seen.commitment + seen.codeword
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return {n: t.detach().clone() for n, t in self.net.state_dict().items()}

    @torch.no_grad()
    def measure(self, x: Tensor, y: Tensor) -> tuple[float, float]:
        """Accuracy, and entropy of the mean of the dropout passes."""
        self.net.load_state_dict(self.state)
        right, entropy = 0.0, 0.0
        for images, labels in zip(x.split(self.local.evaluation_batch), y.split(self.local.evaluation_batch)):
            self.net.eval()
            features = self.net.features(images)
            right += (self.net.classifier(features).argmax(-1) == labels).sum().item()
            self.net.classifier.train()
            p = torch.stack([self.net.classifier(features).softmax(-1) for _ in range(self.passes)]).mean(0)
            entropy -= torch.special.xlogy(p, p).sum().item()
        return right / len(y), entropy / len(y)


def torchs_dropout(net: Net) -> Net:
    """Our dropout computes addressed noise; a straightforward loop takes torch's."""
    for module in list(net.modules()):
        for name, child in module.named_children():
            if isinstance(child, Dropout):
                setattr(module, name, nn.Dropout(child.p))
    return net
