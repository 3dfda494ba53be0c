"""VHL: all silos train on the same labelled noise too, and pull their classes towards its classes.

Tang et al., Virtual homogeneity learning: defending against data heterogeneity in federated learning (ICML 2022).
The virtual data are the release's smooth Gaussian noise, not images of an untrained StyleGAN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uefl.algorithms.checks import above_zero, at_least_one, not_negative, one_network
from uefl.algorithms.fedavg import FedAvg, cross_entropy
from uefl.algorithms.patterns import enlarged, patterns
from uefl.federation import Batch, Clients, Model, Server, State
from uefl.noise import Choice

VIRTUAL = "virtual"


@dataclass(frozen=True, kw_only=True)
class VHL(FedAvg):
    """FedAvg with virtual classes beside the real ones: V = C more outputs, and features aligned class by class.

    The server makes the virtual data from the seed and sends them with every round, at 8×8: silos enlarge them.
    """

    virtual: float = 1.0  # weight of the virtual images' cross-entropy
    align: float = 1.0  # weight of the alignment of real with virtual features
    contrast: float = 0.1  # weight of the alignment among virtual features
    each: int = 200  # virtual images a class
    temperature: float = 0.07  # τ
    align_epochs: int = 5  # local epochs with alignment, the first ones of a round

    no_codebook: ClassVar[str] = "virtual images would claim words, and aligning features undoes a silo's own words"

    def __post_init__(self) -> None:
        super().__post_init__()
        not_negative(self, "virtual", "align", "contrast", "align_epochs")
        above_zero(self, "temperature")
        at_least_one(self, "each")

    def build(self, net: nn.Module) -> nn.Module:
        one = one_network(net, "VHL")
        built = one.but(classes=2 * one.classes)
        built.choice = Choice()
        return super().build(built)

    def start(self, clients: Clients) -> Server:
        server, net = super().start(clients), one_network(clients.net, "VHL")
        images = patterns(clients.seed, VIRTUAL, net.classes // 2, self.each, net.shape[0])
        return server.but(memory={**server.memory, VIRTUAL: images})

    def sent(self, server: Server) -> State:
        return {VIRTUAL: server.memory[VIRTUAL]}

    def loss(self, model: Model, batch: Batch) -> Tensor:
        n, images = len(batch.y), model.sent[VIRTUAL]
        index = model.call("choice", (n,), len(images))
        v = index // self.each  # the virtual class, not shifted
        x = torch.cat([batch.x, enlarged(images[index], batch.x)])  # one pass: batch norm sees both
        z = model.call("represent", x).z  # [2B, l, d]
        logits, features = model.call("classifier", z.flatten(1)), z.mean(1)  # [2B, C + V], [2B, d]
        # L = CE(real) + CE(virtual, shifted labels) + L_align + 0.1 L_virt
        real = cross_entropy(logits[:n].unsqueeze(0), batch.y)
        total = real + self.virtual * F.cross_entropy(logits[n:], v + logits.shape[-1] // 2)
        if batch.epoch >= self.align_epochs:
            return total
        mine, theirs = F.normalize(features[:n], dim=-1), F.normalize(features[n:], dim=-1)
        # Virtual features are a target here: real class c comes to virtual class c, not the other way round.
        aligned = alike(torch.cat([mine, theirs.detach()]), torch.cat([batch.y, v]), self.temperature)
        return total + self.align * aligned + self.contrast * alike(theirs, v, self.temperature)


def alike(features: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Supervised contrastive loss of unit vectors [N, d] (Khosla et al., 2020); who has no partner counts as 0."""
    others = ~torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    partners = (labels[:, None] == labels) & others
    similarity = (features @ features.t()) / temperature
    log_p = similarity - similarity.masked_fill(~others, -torch.inf).logsumexp(1, keepdim=True)
    return -((log_p * partners).sum(1) / partners.sum(1).clamp_min(1)).mean()
