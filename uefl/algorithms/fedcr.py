"""FedCR: a shared body, a head of one's own, and class priors that all silos' codes multiply to.

Zhang et al., FedCR: personalized federated learning based on across-client common representation with conditional
mutual information regularization (ICML 2023).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uefl.aggregate import summed
from uefl.algorithms.checks import all_train, at_least_one, not_negative, one_network
from uefl.algorithms.fedavg import FedAvg
from uefl.errors import InputError
from uefl.federation import Batch, Broadcast, Clients, Model, Part, Reply, Server, Silo, State, Update
from uefl.gaussian import Gaussian, divergence
from uefl.local import clipped

HEAD = "classifier.head."
MEAN, DEVIATION = "prior.mean", "prior.deviation"


@dataclass(frozen=True, kw_only=True)
class FedCR(FedAvg):
    """FedAvg on a Gaussian code with personal heads, each code held close to a prior that silos make together.

    The last round of the budget is for heads alone: every silo takes part and the body does not move. Personalised, so
    its accuracy compares with that of one shared model only where this is said.
    """

    beta: float = 1e-3  # β, weight of the divergence, which is a sum over D
    dimensions: int = 256  # D of the code
    train_draws: int = 15  # J, codes an image in training
    draws: int = 30  # the same at test time
    blend: float = 1.0  # how much of a new prior replaces the old one, the release's β₂
    largest: float = 10.0  # norm of the gradient, whatever recipe the local training follows; 0: no limit

    no_codebook: ClassVar[str] = "its heads and priors already give every silo its own reading of shared features"

    def __post_init__(self) -> None:
        super().__post_init__()
        not_negative(self, "beta", "largest")
        at_least_one(self, "dimensions", "train_draws", "draws")
        if not 0 <= self.blend <= 1:
            raise InputError(f"blend={self.blend} must be between 0 and 1")

    # --- the server ---------------------------------------------------------------------------------------------

    def build(self, net: nn.Module) -> nn.Module:
        return super().build(one_network(net, "FedCR").with_gaussian(self.dimensions, self.draws))

    def prepare(self, silos: Sequence[Silo]) -> Sequence[Silo]:
        return all_train(silos, "FedCR", "head")

    def start(self, clients: Clients) -> Server:
        server, net = super().start(clients), one_network(clients.net, "FedCR")
        like = next(t for t in server.state.values() if t.is_floating_point()).new_zeros(net.classes, self.dimensions)
        return server.but(memory={**server.memory, MEAN: like, DEVIATION: torch.ones_like(like)})

    def sent(self, server: Server) -> State:
        return {n: server.memory[n] for n in (MEAN, DEVIATION)}

    def takes_part(self, clients: Clients, server: Server) -> tuple[str, ...]:
        last = server.round + 1 == self.budget
        return FedAvg.takes_part(replace(self, participation=0) if last else self, clients, server)

    def round(self, clients: Clients, server: Server) -> Server:
        after = super().round(clients, server)
        return after.but(state=server.state) if after.round == self.budget else after

    def integrate(self, server: Server, replies: Sequence[Reply]) -> Server:
        old = Gaussian(server.memory[MEAN], server.memory[DEVIATION])
        sums = summed((r.extra for r in replies), {"precision": old.mean, "shift": old.mean})
        if not sums:
            return server
        precision, shift = (sums[n].to(old.mean) for n in ("precision", "shift"))
        new = product(precision, shift)
        seen = (precision > 0).any(1, keepdim=True)  # a class nobody had this round keeps its prior
        mean, deviation = (torch.where(seen, torch.lerp(a, b, self.blend), a) for a, b in zip(old, new))
        return server.but(memory={**server.memory, MEAN: mean, DEVIATION: deviation})

    # --- the client ---------------------------------------------------------------------------------------------

    def keeps(self, net: nn.Module) -> Collection[str]:
        return [*super().keeps(net), *(n for n in net.state_dict() if n.startswith(HEAD))]

    def updates(self, say: Broadcast) -> Sequence[Update]:
        return [Update(self.loss, lambda n: n.startswith(HEAD) or say.round < self.budget)]

    def loss(self, model: Model, batch: Batch) -> Tensor:
        q = model.call("classifier.posterior", model.call("features", batch.x))
        shape = (self.train_draws, *q.mean.shape)  # only the code is drawn J times, the body runs once
        z = model.call("classifier.sample", q.mean.expand(shape), q.deviation.expand(shape))
        logits = model.call("classifier.head", z)  # [J, B, C]
        task = F.cross_entropy(logits.flatten(0, 1), batch.y.repeat(self.train_draws))
        # β KL(prior ‖ code): priors become so narrow that the other direction would explode
        prior = Gaussian(F.embedding(batch.y, model.sent[MEAN]), F.embedding(batch.y, model.sent[DEVIATION]))
        return task + self.beta * divergence(prior, q).mean()

    def adjust(self, model: Model, gradients: State) -> State:
        del model
        return dict(zip(gradients, clipped(list(gradients.values()), self.largest))) if self.largest else gradients

    def finish(self, model: Model, part: Part, *, steps: int, rate: float) -> tuple[State, State]:
        """Per class, the product of this silo's codes: Σ 1/σ² and Σ μ/σ², zero where it has no such image."""
        del steps, rate
        size = self.local.evaluation_batch
        pieces = zip(torch.split(part.x, size), torch.split(part.y, size))
        each = [self.statistics(model, Batch(x, y)) for x, y in pieces]
        return {n: torch.stack([mine[n] for mine in each]).sum(0) for n in each[0]}, {}

    def statistics(self, model: Model, batch: Batch) -> State:
        q = model.call("classifier.posterior", model.call("features", batch.x))
        precision = q.deviation.square().reciprocal()
        mine = F.one_hot(batch.y, len(model.sent[MEAN])).to(precision.dtype).t()  # [C, B]
        return {"precision": mine @ precision, "shift": mine @ (precision * q.mean)}


def product(precision: Tensor, shift: Tensor) -> Gaussian:
    """The product of normal distributions given by Σ 1/σ² and Σ μ/σ², and of one standard normal."""
    total = 1 + precision
    return Gaussian(shift / total, total.rsqrt())
