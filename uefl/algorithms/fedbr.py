"""FedBR: pseudo-data that belong to no class keep local features and classifiers from leaning to local classes.

Guo, Tang, Lin, FedBR: improving federated learning on heterogeneous data via local learning bias reduction (ICML 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uefl.algorithms.checks import above_zero, at_least_one, not_negative, one_network
from uefl.algorithms.fedavg import FedAvg, cross_entropy
from uefl.algorithms.patterns import enlarged, patterns
from uefl.federation import Batch, Broadcast, Clients, Model, Server, State, Update, whole
from uefl.noise import Choice, evaluating, key, permutation

PSEUDO = "pseudo"
PROJECTION = "projection."


class Seen(NamedTuple):
    """What one step looks at."""

    logits: Tensor  # [B, C] of real images
    pseudo_logits: Tensor  # [B, C]
    real: Tensor  # [B, d] features, the mean over tokens
    pseudo: Tensor  # [B, d]
    received: Tensor  # [B, d] features that the received model gives the pseudo-images
    target: Tensor  # [B, C] what pseudo-images should be taken for


@dataclass(frozen=True, kw_only=True)
class FedBR(FedAvg):
    """FedAvg with pseudo-images that are to look like no class, and as they did to the received model.

    `mean`: means of 10 images of one silo, asked once at the start, every silo giving as many. Such means leave the
    silos. `mixture`: means of 10 proxy images, mixed in every step with a local image. There is no public data set
    here, so the proxy images are smooth noise and no image leaves a silo.
    """

    pseudo: Literal["mean", "mixture"] = "mean"  # the paper's RSM, or its Mixture
    mu: float = 0.5  # μ, weight of the contrast in the minimum step
    lam: float = 1.0  # λ, weight of the classifier's debiasing
    gamma_max: float = 1.0  # γ, weight of the contrast in the maximum step
    tau: float = 2.0  # τ, times the cosine
    mixed: int = 10  # images in a mean

    no_codebook: ClassVar[str] = "its pseudo-data must mean the same to every silo, and own words make them differ"

    def __post_init__(self) -> None:
        super().__post_init__()
        not_negative(self, "mu", "lam", "gamma_max")
        above_zero(self, "tau")
        at_least_one(self, "mixed")

    # --- the server ---------------------------------------------------------------------------------------------

    def build(self, net: nn.Module) -> nn.Module:
        built = one_network(net, "FedBR")
        d = built.width
        built.projection = nn.Sequential(
            *(nn.Linear(d, 2 * d), nn.ReLU()), *(nn.Linear(2 * d, 2 * d), nn.ReLU()), nn.Linear(2 * d, d)
        )
        built.choice = Choice()
        return super().build(built)

    def start(self, clients: Clients) -> Server:
        server = super().start(clients)
        images = self.asked(clients, server) if self.pseudo == "mean" else self.made(clients)
        return server.but(memory={**server.memory, PSEUDO: images})

    def made(self, clients: Clients) -> Tensor:
        """Means of noise images: one batch, of 8×8 pixels."""
        channels = one_network(clients.net, "FedBR").shape[0]
        proxy = patterns(clients.seed, PSEUDO, self.local.batch, self.mixed, channels, spread=1.0)
        return proxy.reshape(self.local.batch, self.mixed, *proxy.shape[1:]).mean(1)

    def asked(self, clients: Clients, server: Server) -> Tensor:
        """Means of silos' images: one batch, as many from each silo."""
        able = tuple(name for name, n in clients.sizes.items() if n)
        count = -(-self.local.batch // len(able))
        say = self.say(clients, server.but(memory={PSEUDO: torch.tensor(count)}))._replace(who=able)
        replies = sorted(clients.ask(self, "means", say, ("train",)), key=lambda r: r.who)
        images = torch.cat([r.answers["train"]["means"] for r in replies if not r.refused])
        return images[permutation(key(clients.seed, PSEUDO), len(images), images.device)[: self.local.batch]]

    def sent(self, server: Server) -> State:
        return {PSEUDO: server.memory[PSEUDO]}

    # --- the client ---------------------------------------------------------------------------------------------

    @whole
    def means(self, model: Model, batch: Batch) -> State:
        """So many means of some random images each."""
        index = model.call("choice", (int(model.sent[PSEUDO]), self.mixed), len(batch.y))
        return {"means": batch.x[index].mean(1)}

    def updates(self, say: Broadcast) -> Sequence[Update]:
        del say
        return [
            Update(self.gain, lambda n: n.startswith(PROJECTION)),
            Update(self.loss, lambda n: not n.startswith(PROJECTION)),
        ]

    def gain(self, model: Model, batch: Batch) -> Tensor:
        """The maximum step: the projection learns to tell pseudo-features apart, features stay as they are."""
        with torch.no_grad():
            seen = self.seen(model, batch)
        return -self.gamma_max * self.contrast(model, seen.pseudo, seen.received, seen.real)

    def loss(self, model: Model, batch: Batch) -> Tensor:
        """The minimum step: L = CE + μ T + λ CE(pseudo-images, no class)."""
        seen = self.seen(model, batch)
        task = cross_entropy(seen.logits.unsqueeze(0), batch.y)
        contrast = self.contrast(model, seen.pseudo, seen.received, seen.real)
        return task + self.mu * contrast + self.lam * F.cross_entropy(seen.pseudo_logits, seen.target)

    def contrast(self, model: Model, pseudo: Tensor, received: Tensor, real: Tensor) -> Tensor:
        """T = −log e^{τ s(e₁,e₂)} / (e^{τ s(e₁,e₂)} + e^{τ s(e₁,e₃)}), pairs by position."""
        e1, e2, e3 = (model.call("projection", f) for f in (pseudo, received, real))
        near, far = F.cosine_similarity(e1, e2), F.cosine_similarity(e1, e3)
        return F.softplus(self.tau * (far - near)).mean()

    def seen(self, model: Model, batch: Batch) -> Seen:
        n, images = len(batch.y), model.sent[PSEUDO]
        x = images[torch.arange(n, device=images.device) % len(images)].to(batch.x.dtype)
        x = enlarged(x, batch.x) if x.shape != batch.x.shape else x
        classes = one_network(model.net, "FedBR").classes
        target = batch.x.new_full((n, classes), 1 / classes)
        if self.pseudo == "mixture":
            index = model.call("choice", (n,), n)
            x = (x + batch.x[index]) / 2
            target = (target + F.one_hot(batch.y[index], classes)) / 2
        z = model.call("represent", torch.cat([batch.x, x])).z  # [2B, l, d], one pass: batch norm sees both
        logits, features = model.call("classifier", z.flatten(1)), z.mean(1)
        # The received model evaluates: its norms do not move, and nothing is dropped.
        with evaluating(model.net), torch.no_grad():
            received = model.at(model.received).call("represent", x).z.mean(1)
        return Seen(logits[:n], logits[n:], features[:n], features[n:], received, target)
