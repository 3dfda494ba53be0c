"""A method of your own is its difference from FedAvg, and runs wherever FedAvg runs.

This one: a server that keeps going where earlier rounds went (Hsu et al., Measuring the effects of non-identical data
distribution for federated visual classification, 2019), and silos that do not trust their labels entirely.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from uefl import FedAvg, Local, Silo, train


@dataclass(frozen=True, kw_only=True)
class Momentum(FedAvg):
    """FedAvg with momentum at the server and smooth labels at the silos."""

    beta: float = 0.5  # β, how much of the last direction stays
    smoothing: float = 0.02  # of labels

    no_codebook = "its momentum would not know words that come later"

    def loss(self, model, batch):  # at a silo: any function of tensors
        return F.cross_entropy(model(batch.x).logits[0], batch.y, label_smoothing=self.smoothing)

    def round(self, clients, server):  # at the server: a state is a value, so the old one is still there
        new = super().round(clients, server)
        state, memory = dict(new.state), dict(new.memory)
        for name, _ in clients.net.named_parameters():  # v ← β v + (θ_new − θ), θ ← θ + v
            before = memory.get(name, torch.zeros_like(state[name])).to(state[name])
            memory[name] = self.beta * before + state[name] - server.state[name]
            state[name] = server.state[name] + memory[name]
        return new.but(state=state, memory=memory)


x, y = (torch.tensor(a) for a in load_digits(return_X_y=True))  # 1797 digits of 8×8
x = (x.float().view(-1, 1, 8, 8) - 5) / 6
silos = [Silo.split(f"turned {i}", x[i::3].rot90(i, (2, 3)), y[i::3]) for i in range(3)]

for kind in (FedAvg, Momentum):
    torch.manual_seed(0)  # the same first weights for both
    encoder = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1))
    method = kind(rounds=8, iterations=1, passes=5, local=Local(rate=1e-3, batch=32, epochs=1))
    result = train(method, silos, encoder, classes=10, hidden=64)
    print(f"{kind.__name__}: mean accuracy {result.accuracy:.3f}, mean entropy {result.entropy:.3f}")
