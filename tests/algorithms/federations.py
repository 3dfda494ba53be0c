"""Tiny silos and runs on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from uefl.algorithms import ALGORITHMS, Book, FedAvg
from uefl.engines.serial import Serial
from uefl.experiment import Architecture, Experiment
from uefl.federation import Batch, Broadcast, Model, Part, Reply, Server, Silo, State

CLASSES, SHAPE = 3, (1, 8, 8)
BOOK = Book(words=6, segments=2, warm_up=1, errors=0.0, gamma=0.0)
OTHERS = ("fedprox", "scaffold", "fedbn", "fedsr", "fediir", "fedcr", "vhl", "fedbr", "distrans")
WITH_CODEBOOK = ("fedprox", "scaffold", "fedbn", "fedsr")


def images(n: int, seed: int, brightness: float = 0.0, shape: Sequence[int] = SHAPE) -> Part:
    """Three classes of noisy patterns."""
    g = torch.Generator().manual_seed(seed)
    means = torch.randn(CLASSES, *shape, generator=torch.Generator().manual_seed(7))
    y = torch.arange(n) % CLASSES
    return Part(means[y] + 0.5 * torch.randn(n, *shape, generator=g) + brightness, y)


def silos(sizes: Sequence[int] = (24, 33, 24), shape: Sequence[int] = SHAPE) -> list[Silo]:
    return [
        Silo(
            f"silo {i}",
            images(n, 10 * i, i / 2, shape),
            images(9, 10 * i + 1, i / 2, shape),
            images(30, 10 * i + 2, i / 2, shape),
            domain=f"domain {i}",
        )
        for i, n in enumerate(sizes)
    ]


def method(name: str, **fields: Any) -> FedAvg:
    """A method with a short run; `codebook=True` gives it a small book."""
    if fields.pop("codebook", False):
        fields["codebook"] = BOOK
    short: dict[str, Any] = {"rounds": 2, "extra_rounds": 1, "iterations": 2, "passes": 3}
    if name in ("fedcr", "vhl"):
        short |= {"fedcr": {"dimensions": 8, "train_draws": 3, "draws": 4}, "vhl": {"each": 5}}[name]
    made = ALGORITHMS[name](**{**short, **fields})
    if "local" in fields:
        return made
    rate = 0.02 if made.local.optimizer == "sgd" else 5e-3
    return replace(made, local=replace(made.local, batch=12, epochs=1, rate=rate))


PLAIN = Architecture(encoder="mlp", width=16, hidden=16)  # no batch norm
NORMED = Architecture(width=4, depth=2, hidden=16)


def network(of: FedAvg, model: Architecture = NORMED, shape: tuple[int, ...] = SHAPE, seed: int = 0) -> nn.Module:
    return Experiment(method=of, model=model, seed=seed).network(shape, CLASSES)


class Run(NamedTuple):
    server: Server
    clients: Serial
    records: list[dict[str, Any]]


def run(
    of: FedAvg,
    where: Sequence[Silo] | None = None,
    *,
    net: nn.Module | None = None,
    model: Architecture = NORMED,
    dtype: torch.dtype = torch.float32,
    rounds: int = 0,
) -> Run:
    """Run a method to its end, or for some rounds."""
    given = of.prepare(silos() if where is None else where)
    shape = tuple(given[0].test.x.shape[1:])
    clients = Listening(given, network(of, model, shape) if net is None else net, dtype=dtype)
    server, records = of.start(clients), []
    while server.round < (rounds or of.budget):
        server = of.step(clients, server.but(records=()))
        records += server.records
    return Run(server, clients, records)


class Listening(Serial):
    """The serial engine, with an ear on the wire: names of all tensors that ever crossed it."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.down: set[str] = set()
        self.up: set[str] = set()
        self.replies: list[Reply] = []

    def fit(self, method: Any, say: Broadcast, *, measure: bool = True) -> Any:
        self.down |= {*say.state, *say.sent}
        for reply in super().fit(method, say, measure=measure):
            self.up |= {*reply.tensors, *reply.extra}
            self.replies.append(reply)
            yield reply

    def ask(self, method: Any, task: str, say: Broadcast, on: Any) -> Any:
        self.down |= {*say.state, *say.sent}
        for reply in super().ask(method, task, say, on):
            self.up |= {*reply.extra, *(name for answer in reply.answers.values() for name in answer)}
            yield reply


def model_of(net: nn.Module, sent: State | None = None, kept: State | None = None) -> Model:
    """A network as a client task sees it."""
    received = {n: t.detach().clone() for n, t in net.state_dict().items()}
    return Model(net, dict(net.named_parameters()), sent=sent, received=received, kept=kept)


def batch(n: int = 12, dtype: torch.dtype = torch.float64) -> Batch:
    part = images(n, 5)
    return Batch(part.x.to(dtype), part.y)


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Bit for bit."""
    return set(a) == set(b) and all(torch.equal(a[n], b[n]) for n in a)


def distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    assert set(a) == set(b)
    return max(float((a[n].double() - b[n].double()).abs().max()) for n in a)


def accuracy(record: dict[str, Any]) -> float:
    found = [s["accuracy"] for s in record["silos"].values() if "accuracy" in s]
    return float(sum(found) / len(found))
