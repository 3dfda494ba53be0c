"""Write your own method as its difference from FedAvg; it runs on every engine that runs FedAvg.

This example adds momentum at the server (Hsu et al., Measuring the effects of non-identical data distribution for
federated visual classification, 2019) and label smoothing at the silos.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from uefl import FedAvg, LocalTraining, Silo, train
from uefl.core.field_rules import setting


@dataclass(frozen=True, kw_only=True)
class Momentum(FedAvg):
    """FedAvg with momentum at the server and label smoothing at the silos."""

    beta: float = setting(0.5, "Momentum β of the server.", at_least=0, below=1)
    smoothing: float = setting(0.02, "Label smoothing.", at_least=0, below=1)

    codebook_unsupported_reason = "its momentum does not include codewords that are added later"

    def loss(self, model, batch):  # at a silo: any function of tensors
        return F.cross_entropy(model(batch.x).logits[0], batch.y, label_smoothing=self.smoothing)

    def run_round(self, clients, server):  # at the server: `server` is a value and still holds the old model
        new = super().run_round(clients, server)
        state, velocity = dict(new.model_state), dict(new.method_state)
        for name, _ in clients.net.named_parameters():  # v ← β v + (θ_new − θ), θ ← θ + v
            old = velocity.get(name, torch.zeros_like(state[name])).to(state[name])
            velocity[name] = self.beta * old + state[name] - server.model_state[name]
            state[name] = server.model_state[name] + velocity[name]
        return new.replace(model_state=state, method_state=velocity)


x, y = (torch.tensor(a) for a in load_digits(return_X_y=True))  # 1797 digits of 8×8 pixels
x = (x.float().view(-1, 1, 8, 8) - 5) / 6
silos = [Silo.from_tensors(f"turned {i}", x[i::3].rot90(i, (2, 3)), y[i::3]) for i in range(3)]

for method_class in (FedAvg, Momentum):
    torch.manual_seed(0)  # the same initial weights for both
    encoder = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1))
    local = LocalTraining(lr=1e-3, batch_size=32, epochs=1)
    method = method_class(rounds=8, iterations=1, mc_samples=5, local=local)
    result = train(method, silos, encoder, num_classes=10, hidden_size=64)
    print(f"{method_class.__name__}: mean accuracy {result.accuracy:.3f}, mean entropy {result.entropy:.3f}")
