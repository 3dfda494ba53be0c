"""The peer of the GPU benchmarks: a loop over clients in eager PyTorch, with the data on the device.

It has the same network (with torch's dropout), optimizer, batches and epochs, and TF32 products. After averaging it
evaluates the model once, then with 20 dropout samples of the classifier alone; features are computed once.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uefl.core.federation import Silo, Tensors
from uefl.core.local import LocalTraining
from uefl.core.noise import Dropout
from uefl.engines.serial import choose_kernels
from uefl.models.network import Net


class EagerLoop:
    """One client after another, one kernel after another."""

    def __init__(self, net: Net, silos: Sequence[Silo], local: LocalTraining, mc_samples: int, device: str) -> None:
        self.net = use_torch_dropout(copy.deepcopy(net)).to(device)
        self.silo_tensors = [[t.to(device) for t in (*s.train, *s.test)] for s in silos]
        self.local, self.mc_samples, self.device = local, mc_samples, device
        self.model_state: Tensors = {n: t.clone() for n, t in self.net.state_dict().items()}

    def run_round(self) -> list[tuple[float, float]]:
        """Train all silos, average, and evaluate the average on every silo."""
        choose_kernels(tf32=True, deterministic=False)  # a simple loop does not promise reproducible results
        total: Tensors = {}
        for x, y, _, _ in self.silo_tensors:
            trained = self.train_silo(x, y)
            total = {n: total[n] + t for n, t in trained.items()} if total else trained
        num_silos = len(self.silo_tensors)
        self.model_state = {n: (t / num_silos).to(self.model_state[n].dtype) for n, t in total.items()}
        return [self.evaluate(x, y) for _, _, x, y in self.silo_tensors]

    def train_silo(self, x: Tensor, y: Tensor) -> Tensors:
        """Train the averaged model on one silo."""
        self.net.load_state_dict(self.model_state)
        self.net.train()
        optimizer: torch.optim.Optimizer
        if self.local.optimizer == "sgd":
            optimizer = torch.optim.SGD(self.net.parameters(), self.local.lr, momentum=self.local.momentum)
        else:
            optimizer = torch.optim.Adam(self.net.parameters(), self.local.lr)
        for _ in range(self.local.epochs):
            order = torch.randperm(len(y), device=self.device)
            for indices in order.split(self.local.batch_size):
                prediction = self.net(x[indices])
                loss = F.cross_entropy(prediction.logits[0], y[indices])
                loss = loss + 0.25 * prediction.commitment_loss + prediction.codebook_loss
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return {n: t.detach().clone() for n, t in self.net.state_dict().items()}

    @torch.no_grad()
    def evaluate(self, x: Tensor, y: Tensor) -> tuple[float, float]:
        """Return accuracy, and the entropy of the mean of the dropout samples."""
        self.net.load_state_dict(self.model_state)
        correct, entropy = 0.0, 0.0
        for images, labels in zip(x.split(self.local.eval_batch_size), y.split(self.local.eval_batch_size)):
            self.net.eval()
            features = self.net.extract_features(images)
            correct += (self.net.classifier(features).argmax(-1) == labels).sum().item()
            self.net.classifier.train()
            p = torch.stack([self.net.classifier(features).softmax(-1) for _ in range(self.mc_samples)]).mean(0)
            entropy -= torch.special.xlogy(p, p).sum().item()
        return correct / len(y), entropy / len(y)


def use_torch_dropout(net: Net) -> Net:
    """Replace uefl's dropout, which computes addressed noise, by torch's."""
    for module in list(net.modules()):
        for name, child in module.named_children():
            if isinstance(child, Dropout):
                setattr(module, name, nn.Dropout(child.p))
    return net
