"""Tiny silos that can be learnt in seconds: stripes on 8x8 images, upright in one domain, turned and inverted in the
other, so that what is a row here is a column there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from uefl.algorithms import FedAvg
from uefl.engines import Serial
from uefl.federation import Part, Server, Silo
from uefl.local import Local
from uefl.models.net import Ensemble, Net

CLASSES = 3
WORDS = "codebook.words"
LOCAL = Local(rate=3e-3, batch=8, epochs=1, evaluation_batch=16)
ROUNDS: dict[str, Any] = {"rounds": 3, "extra_rounds": 2, "iterations": 2, "passes": 4, "local": LOCAL}


def short(kind: type[FedAvg]) -> FedAvg:
    """A short run of a method, in its own form of the local training."""
    return kind(**{**ROUNDS, "local": kind().suited(LOCAL)})


def images(n: int, seed: int, *, turned: bool = False, noise: float = 0.3) -> Part:
    """Rows, columns or chequers, with a random phase and noise."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (n,), generator=generator)
    phase = torch.randint(4, (n, 1, 1), generator=generator)
    i, j = torch.arange(8)[None, :, None], torch.arange(8)[None, None, :]
    rows, columns = ((i + phase) % 4 < 2).expand(n, 8, 8), ((j + phase) % 4 < 2).expand(n, 8, 8)
    x = torch.where(y[:, None, None] == 0, rows, torch.where(y[:, None, None] == 1, columns, rows ^ columns))
    x = x.float() * 2 - 1 + noise * torch.randn(n, 8, 8, generator=generator)
    return Part((-x.transpose(1, 2) if turned else x)[:, None].contiguous(), y)


def silo(name: str, train: int, seed: int, *, turned: bool = False, noise: float = 0.3) -> Silo:
    part = [images(n, seed + i, turned=turned, noise=noise) for i, n in enumerate((train, 13, 14))]
    return Silo(name, *part, domain="turned" if turned else "upright")


def four() -> list[Silo]:
    """Two domains, four sizes."""
    sizes = {"ada": 20, "bob": 25, "cyd": 18, "dan": 28}
    return [silo(n, k, 10 * i, turned=i > 1) for i, (n, k) in enumerate(sizes.items())]


def encoder() -> nn.Module:
    """[B, 1, 8, 8] -> [B, 8, 2, 2], batch norm included."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1),
    )


def network(method: FedAvg, *, seed: int = 0, members: int = 1, body: Any = encoder, **fields: Any) -> nn.Module:
    fields = {"hidden": 16, "dropout": 0.1, **fields}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if members == 1:
            return method.build(Net(body(), CLASSES, (1, 8, 8), **fields))
        return method.build(Ensemble(lambda: Net(body(), CLASSES, (1, 8, 8), **fields), members))


def clients(
    method: FedAvg,
    silos: Sequence[Silo] | None = None,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    engine: type[Serial] = Serial,
    **fields: Any,
) -> Any:
    chosen = method.prepare(four() if silos is None else silos)
    return engine(chosen, network(method, seed=seed, **fields), seed=seed, dtype=dtype)


def play(method: FedAvg, engine: Any, rounds: int | None = None, server: Server | None = None) -> Any:
    """All rounds, or so many more: the last server and the records."""
    server = server or method.start(engine)
    last = method.budget if rounds is None else server.round + rounds
    records: list[dict[str, Any]] = []
    while server.round < last:
        server = method.step(engine, server)
        records += server.records
    return server, records


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """The same names and bits."""
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)
