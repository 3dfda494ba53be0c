"""The extensible codebook around a federated round: measure, decide, extend (the end of an iteration in Algorithm 1).

It is a part, not a method: UEFL is FedAvg's round with this part, and other rounds take it as `codebook=` too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from uefl.algorithms.record import counted, judged, noted
from uefl.algorithms.targets import Reading
from uefl.errors import InputError
from uefl.federation import Clients, Server, State, is_words
from uefl.kmeans import kmeans
from uefl.metrics import Metrics, metrics
from uefl.noise import key, normal

if TYPE_CHECKING:
    from uefl.algorithms.fedavg import FedAvg
    from uefl.codebook import Coded
    from uefl.models.net import Prediction


@dataclass(frozen=True, kw_only=True)
class Book:
    """Words that silos share, and words that only the silos found uncertain may use."""

    words: int = 256  # v, at first and per extension
    segments: int = 4  # s, pieces of a feature that share the book
    first: Literal["kmeans", "gaussian"] = "kmeans"  # the first book (D12)
    warm_up: int = 2  # rounds without discretization before a K-means first book
    commitment: float = 0.25  # weight of the encoder term of L_code (D5)
    codeword: float = 1.0  # weight of the codeword term, the paper's β (D5)
    reduction: Literal["mean", "sum"] = "mean"  # of ‖·‖² over a token's channels (D18)
    extend: bool = True  # False: a static book, VQ-FedAvg
    new: Literal["kmeans", "gaussian"] = "kmeans"  # how new words begin (T15)
    gamma: float = 0.1  # γ, threshold over the least uncertain silo
    reference: Literal["min", "mean"] = "min"  # of the threshold (D4)
    errors: float = 2.0  # standard errors a difference must exceed to be more than noise; 0: the bare rule (D22)
    scope: Literal["silo", "group"] = "silo"  # new words for each uncertain silo, or for all of them together (D7)
    growth: Literal["constant", "double"] = "constant"  # v new words, or as many as the largest v_k (D8)
    kept: Literal["all", "newest"] = "all"  # words a silo may use later: all it ever had, or first and newest (D10)
    target_access: Reading = "shared"  # the words of a silo nobody trained with: shared, all, least_uncertain (D15)
    books: Literal["shared", "domain"] = "shared"  # the first book: one for all, or one per true domain (an oracle)

    def __post_init__(self) -> None:
        for name in ("words", "segments"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("gamma", "errors", "warm_up", "commitment", "codeword"):
            if not getattr(self, name) >= 0:
                raise InputError(f"{name}={getattr(self, name)} must not be negative")

    def build(self, net: nn.Module) -> nn.Module:
        built: nn.Module = net.with_codebook(self.segments, self.words, self.reduction)  # type: ignore[operator]
        return built

    def loss(self, seen: Prediction | Coded) -> Tensor:
        """L_code = commitment·‖sg(c) − z‖² + codeword·‖c − sg(z)‖² (Eq. 7)."""
        return self.commitment * seen.commitment + self.codeword * seen.codeword

    @property
    def code_weight(self) -> float:
        """L_code over the mean squared distance: both of its terms have that value."""
        return self.commitment + self.codeword

    # --- the first book -----------------------------------------------------------------------------------------

    def open(self, method: FedAvg, clients: Clients, server: Server) -> Server:
        """Gaussian words, or none until the warm-up is over."""
        names = [n for n in server.state if is_words(n)]
        like = torch.stack([server.state[n] for n in names])  # [M, v, D]
        server = server.but(state={**server.state, **{n: server.state[n][:0] for n in names}})
        if self.first == "kmeans":
            return server if self.warm_up else self.first_book(method, clients, server).but(pending={})
        for i, who in enumerate(self.owners(clients, server.silos)):
            server = granted(server, who, normal(key(clients.seed, i, "first book"), like.shape).to(like))
        return remembered(server)

    def owners(self, clients: Clients, silos: Sequence[str]) -> list[tuple[str, ...]]:
        """Who shares a first book: everyone, or the silos of one true domain."""
        if self.books == "shared":
            return [tuple(silos)]
        domains = clients.domains
        return [tuple(s for s in silos if domains[s] == d) for d in sorted(set(domains.values()))]

    def first_book(self, method: FedAvg, clients: Clients, server: Server) -> Server:
        """Federated K-means: local centroids with counts, weighted K-means over them at the server (D12)."""
        started = time.perf_counter()
        server, found = self.centroids(method, clients, server, server.silos, self.words)
        for who in self.owners(clients, server.silos):
            theirs = [found[s] for s in who if s in found]
            if theirs:
                server = granted(server, who, merged(theirs, self.words, clients.seed))
        return noted(remembered(server), time.perf_counter() - started, first_book=server.access.shape[1])

    # --- the end of an iteration --------------------------------------------------------------------------------

    def after_round(self, method: FedAvg, clients: Clients, server: Server) -> Server:
        """What follows a round: the first book after the warm-up, the extension at the end of an iteration (D9)."""
        opens = server.round == self.warm_up and self.first == "kmeans"
        end = server.round == method.rounds + server.iteration * method.extra_rounds < method.budget
        if not opens and (not end or server.settled or not self.extend):
            return server
        # Evaluate uncertainty for each client with the integrated model                               (Algorithm 1)
        server, answers = method.measured(clients, server)
        if opens:
            return method.close(self.first_book(method, clients, server), answers)
        # e_k > (1+γ) min_j e_j
        uncertain = self.uncertain({w: metrics(a["validation"]) for w, a in answers.items() if "validation" in a})
        # K-means initialize another v codewords and add them to codebook; v_k ← v_k + v
        after = self.extended(method, clients, server, uncertain) if uncertain else server
        # Reduce the number of communication rounds; repeat until nobody is uncertain
        after = after.but(iteration=server.iteration + 1, settled=not uncertain)
        return method.close(judged(after, uncertain, before=server), answers)

    def uncertain(self, e: Mapping[str, Metrics]) -> tuple[str, ...]:
        """Silos whose entropy stands out from the reference by γ, and by more than noise (D4, D22)."""
        # A missing e_k is neither least nor uncertain.
        e = {who: m for who, m in e.items() if math.isfinite(m["entropy"])}
        if not e:
            return ()
        noise = {who: m["entropy_variance"] / max(m["count"], 1) for who, m in e.items()}
        least = min(e, key=lambda who: e[who]["entropy"])
        level, spread = e[least]["entropy"], noise[least]
        if self.reference == "mean":
            level = sum(m["entropy"] for m in e.values()) / len(e)
            spread = sum(noise.values()) / len(e) ** 2
        return tuple(
            sorted(
                who
                for who, m in e.items()
                if m["entropy"] > (1 + self.gamma) * level
                and m["entropy"] - level > self.errors * math.sqrt(noise[who] + spread)
            )
        )

    def extended(self, method: FedAvg, clients: Clients, server: Server, uncertain: tuple[str, ...]) -> Server:
        """New words for the uncertain silos; all old words stay as they are."""
        started = time.perf_counter()
        rows = server.access[[server.silos.index(who) for who in uncertain]]
        v = self.words if self.growth == "constant" else int(rows.sum(1).max())
        server, found = self.centroids(method, clients, server, uncertain, v)
        if self.new == "gaussian":
            seed, now = clients.seed, server.round
            found = {w: (normal(key(seed, w, now, "new"), c.shape).to(c), n) for w, (c, n) in found.items()}
        receivers = tuple(found)
        if self.kept == "newest":
            server = forgot(server, receivers)
        if self.scope == "group" and found:
            server = granted(server, receivers, merged(list(found.values()), v, clients.seed))
        else:
            for who, (centroids, _) in found.items():
                server = granted(server, (who,), centroids)
        return noted(server, time.perf_counter() - started)

    def centroids(
        self, method: FedAvg, clients: Clients, server: Server, who: tuple[str, ...], v: int
    ) -> tuple[Server, dict[str, tuple[Tensor, Tensor]]]:
        """K-means centroids [M, v, D] and counts [M, v] from some silos, each on its own training features."""
        say = method.say(clients, server)
        say = say._replace(who=tuple(w for w in who if clients.sizes[w]), sent={**say.sent, "words": torch.tensor(v)})
        like = torch.stack([t[:0] for n, t in server.state.items() if is_words(n)])  # [M, 0, D]
        replies = list(clients.ask(method, "centroids", say, ("train",)))
        answers = {r.who: r.answers.get("train", {}) for r in replies if not r.refused}
        found = {w: (a["centroids"], a["counts"]) for w, a in answers.items() if sound(a, like, v)}
        return counted(server, replies, 0.0), found  # the time is counted as K-means'


def sound(answer: State, like: Tensor, v: int) -> bool:
    """Whether centroids and counts are numbers, in the shape of the book's words: a broken silo spoils no group."""
    if set(answer) != {"centroids", "counts"}:
        return False
    centroids, counts = answer["centroids"], answer["counts"]
    fits = counts.dim() == 2 and 0 < counts.shape[1] <= v
    fits = fits and centroids.shape == (len(like), counts.shape[1], like.shape[2]) and len(counts) == len(like)
    return fits and bool(torch.isfinite(centroids).all() and torch.isfinite(counts).all() and (counts >= 0).all())


def merged(found: Sequence[tuple[Tensor, Tensor]], v: int, seed: int) -> Tensor:
    """Weighted K-means over several silos' centroids: [M, v, D]."""
    books = []
    for m in range(len(found[0][0])):
        points, counts = torch.cat([c[m] for c, _ in found]), torch.cat([n[m] for _, n in found])
        books.append(kmeans(points, v, key=key(seed, m, "merge"), weights=counts).centroids)
    return torch.stack([book[: min(map(len, books))] for book in books])


def granted(server: Server, who: Sequence[str], words: Tensor) -> Server:
    """Add words [M, v, D] that only these silos may use."""
    names = [n for n in server.state if is_words(n)]
    state = {n: torch.cat([server.state[n], words[m].to(server.state[n])]) for m, n in enumerate(names)}
    column = torch.tensor([[name in who] for name in server.silos])
    access = torch.cat([server.access, column.expand(-1, words.shape[1])], 1)
    return server.but(state={**server.state, **state}, access=access)


def remembered(server: Server) -> Server:
    """Note how many words the first book has: a silo never loses those."""
    return server.but(memory={**server.memory, "first_words": torch.tensor(server.access.shape[1])})


def forgot(server: Server, who: Sequence[str]) -> Server:
    """Take from these silos all words but those of the first book (D10)."""
    access, first = server.access.clone(), int(server.memory["first_words"])
    for name in who:
        access[server.silos.index(name), first:] = False
    return server.but(access=access)
