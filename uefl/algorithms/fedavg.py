"""The federated round that every method shares.

McMahan et al., Communication-efficient learning of deep networks from decentralized data (AISTATS 2017).
A method is its difference from this file; with a `codebook` the same round learns a vocabulary too.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uefl.aggregate import Mean, flaw
from uefl.algorithms.book import Book
from uefl.algorithms.checks import all_train
from uefl.algorithms.record import closed, counted, opened
from uefl.algorithms.targets import read_targets
from uefl.errors import InputError
from uefl.federation import Batch, Broadcast, Clients, Model, Part, Reply, Server, Silo, Split, State, Update, whole
from uefl.kmeans import kmeans
from uefl.local import Local
from uefl.metrics import measure
from uefl.noise import key, permutation

if TYPE_CHECKING:
    from uefl.codebook import Coded
    from uefl.models.net import Prediction


@dataclass(frozen=True, kw_only=True)
class FedAvg:
    """Train everywhere, average: θ ← Σ n_k/n θ_k."""

    rounds: int = 14  # of the first iteration
    extra_rounds: int = 8  # of every further iteration
    iterations: int = 3  # the budget is rounds + (iterations − 1) · extra_rounds for every method
    participation: int = 0  # silos a round, drawn anew each round; 0: all
    weights: Literal["size", "equal"] = "size"  # n_k/n (D11) or 1/K
    norms: Literal["average", "local", "skip"] = "average"  # batch-norm statistics: averaged, kept, or never moved
    passes: int = 20  # Monte Carlo dropout passes T
    watch_train: bool = False  # measure the training data too, as neural collapse needs; costs time
    watch_local: bool = True  # measure each silo's model before averaging too (Fig. 1); costs time
    local: Local = field(default_factory=Local)
    codebook: Book | None = None  # words around the method; `on`: as UEFL has them on these data

    no_codebook: ClassVar[str] = ""  # why a method takes none
    no_network: ClassVar[str] = ""  # why a method cannot run where data stay with their silos

    def __post_init__(self) -> None:
        for name in ("rounds", "iterations", "passes"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("extra_rounds", "participation"):
            if getattr(self, name) < 0:
                raise InputError(f"{name}={getattr(self, name)} must not be negative")
        if self.codebook and self.no_codebook:
            raise InputError(f"{type(self).__name__} takes no codebook: {self.no_codebook}")
        if self.codebook and self.codebook.first == "kmeans" and self.codebook.warm_up >= self.rounds:
            raise InputError(f"warm_up={self.codebook.warm_up} must be less than rounds={self.rounds}")

    # --- the server ---------------------------------------------------------------------------------------------

    @property
    def budget(self) -> int:
        """All rounds, warm-up included; equal for all methods in a comparison."""
        return self.rounds + (self.iterations - 1) * self.extra_rounds

    @property
    def splits(self) -> Sequence[Split]:
        return ("train", "validation", "test") if self.watch_train else ("validation", "test")

    @property
    def local_splits(self) -> Sequence[Split]:
        return ("test",) if self.watch_local else ()

    def build(self, net: nn.Module) -> nn.Module:
        """The model change this method asks for."""
        return self.codebook.build(net) if self.codebook else net

    def suited(self, local: Local) -> Local:
        """This method's form of a recipe's local training."""
        return local

    def prepare(self, silos: Sequence[Silo]) -> Sequence[Silo]:
        """The change of silos this method asks for: none, but for the bounds."""
        return all_train(silos, "norms=local", "batch norm") if self.norms == "local" else silos

    def start(self, clients: Clients) -> Server:
        silos, kept = tuple(clients.sizes), set(self.keeps(clients.net))
        state = {n: t for n, t in clients.begin().items() if n not in kept}
        server = Server(silos, state, torch.ones(len(silos), 0, dtype=torch.bool))
        return self.codebook.open(self, clients, server) if self.codebook else server

    def step(self, clients: Clients, server: Server) -> Server:
        """One round and what follows it."""
        server = self.round(clients, server.but(records=()))
        if self.codebook:
            server = self.codebook.after_round(self, clients, server)
        if server.pending and server.round == self.budget:  # nobody else would measure the last round's model
            server = self.close(*self.measured(clients, server))
        return server

    def round(self, clients: Clients, server: Server) -> Server:
        """Broadcast θ, train at all silos in parallel, average what comes back."""
        started = time.perf_counter()
        who = self.takes_part(clients, server)
        if server.pending and who != server.silos:  # who trains brings measurements along; here some would be missing
            server = self.close(*self.measured(clients, server))
        say = self.say(clients, server)._replace(round=server.round + 1, who=who)
        mean, replies = Mean(server.state), []
        for reply in clients.fit(self, say, measure=who == server.silos):
            row = say.access[say.silos.index(reply.who)]
            why = reply.refused or flaw(reply, say.state, row)
            if not why:
                weight = float(reply.size) if self.weights == "size" else 1.0
                mean.add(self.averaged(reply.tensors), weight, row)
            replies.append(reply._replace(tensors={}, refused=why))
        server = self.close(server, {r.who: r.answers for r in replies}, "received ")
        server = self.integrate(server.but(state=mean.result(), round=say.round), [r for r in replies if not r.refused])
        return server.but(pending=opened(server, replies, time.perf_counter() - started))

    def say(self, clients: Clients, server: Server) -> Broadcast:
        """What every silo is told of the model as it stands."""
        del clients
        rate = self.local.rate_at(server.round + 1, self.budget)
        return Broadcast(server.round, server.state, server.silos, server.access, self.sent(server), server.silos, rate)

    def takes_part(self, clients: Clients, server: Server) -> tuple[str, ...]:
        """The silos of the next round: all that have training data, or so many drawn by the seed."""
        able = [name for name, n in clients.sizes.items() if n]
        if not 0 < self.participation < len(able):
            return tuple(able)
        order = permutation(key(clients.seed, server.round + 1, "who"), len(able)).tolist()
        return tuple(sorted(able[i] for i in order[: self.participation]))

    def measured(self, clients: Clients, server: Server) -> tuple[Server, dict[str, Mapping[str, State]]]:
        """Ask all silos to measure the model as it stands; the record counts what that costs."""
        started, say = time.perf_counter(), self.say(clients, server)
        replies = list(clients.ask(self, "measure", say, self.splits))
        # Measurements ride along uncounted with every round's reply, so they are not counted here either.
        server = counted(server, [r._replace(sent_bytes=0) for r in replies], time.perf_counter() - started)
        found = {r.who: r.answers for r in replies if not r.refused}
        if self.codebook:
            found = read_targets(self, clients, server, found, self.codebook.target_access)
        return server, found

    def close(self, server: Server, answers: Mapping[str, Mapping[str, State]], prefix: str = "") -> Server:
        """Complete the record of the last round with what silos measured of its model."""
        return closed(server, answers, prefix, self.codebook.code_weight if self.codebook else 0.0)

    def sent(self, server: Server) -> State:
        """Extras beside the weights."""
        del server
        return {}

    def averaged(self, tensors: State) -> State:
        """Which of the tensors that come back are averaged."""
        if self.norms == "average":
            return tensors
        return {n: t for n, t in tensors.items() if not n.endswith(NORM_STATISTICS)}

    def integrate(self, server: Server, replies: Sequence[Reply]) -> Server:
        """What the server does with what came beside the weights."""
        del replies
        return server

    # --- the client ---------------------------------------------------------------------------------------------

    def updates(self, say: Broadcast) -> Sequence[Update]:
        del say
        return [Update(self.loss)]

    def loss(self, model: Model, batch: Batch) -> Tensor:
        seen = model(batch.x)
        return self.task(seen.logits, seen, batch)

    def task(self, logits: Tensor, seen: Prediction | Coded, batch: Batch) -> Tensor:
        """L_task + L_code (Eq. 7)."""
        code = self.codebook.loss(seen) if self.codebook else 0.0
        return cross_entropy(logits, batch.y) + code

    def adjust(self, model: Model, gradients: State) -> State:
        del model
        return gradients

    def finish(self, model: Model, part: Part, *, steps: int, rate: float) -> tuple[State, State]:
        del model, part, steps, rate
        return {}, {}

    def keeps(self, net: nn.Module) -> Collection[str]:
        """Names of tensors that stay with the silo."""
        if self.norms != "local":
            return ()
        return [n for n in net.state_dict() if n.endswith(NORM_STATISTICS)]

    def first(self, net: nn.Module, address: int) -> State:
        del net, address
        return {}

    def measure(self, model: Model, batch: Batch) -> State:
        return measure(model, batch, self.passes)

    @whole
    def centroids(self, model: Model, batch: Batch) -> State:
        """K-means on the silo's own features, by the broadcast model in evaluation mode (D20)."""
        assert self.codebook is not None
        size, spread = self.local.evaluation_batch, int(model.sent["words"])
        x = torch.cat([model.call("segments", block) for block in torch.split(batch.x, size)], 1)  # [M, N, D]
        found = [kmeans(points, spread, key=key("centroids", i)) for i, points in enumerate(x)]
        v = min(len(c.centroids) for c in found)
        return {
            "centroids": torch.stack([c.centroids[:v] for c in found]),
            "counts": torch.stack([c.counts[:v] for c in found]),
        }


NORM_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Of [M, B, C] against [B], summed over the members M so that each one sees its own gradient."""
    return F.cross_entropy(logits.flatten(0, 1), y.expand(len(logits), -1).flatten()) * len(logits)
