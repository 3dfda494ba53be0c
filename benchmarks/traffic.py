"""Bytes a silo receives and sends in a round, for every method: from the records of tiny runs of the demo's recipe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.frame import Figure, Options
from benchmarks.images import digits, silos
from uefl.algorithms import ALGORITHMS
from uefl.engines import Serial
from uefl.federation import Silo
from uefl.recipes import recipe
from uefl.records import Record

COUNT, TRAIN, TEST, VALIDATION = 3, 40, 8, 8
ROUNDS = {2: "round 2: first book", 3: "an ordinary round", 4: "round 4: extension", 5: "the round after it"}


def run(o: Options) -> Iterator[Figure]:
    parts = silos(digits(o.data), COUNT, TRAIN, TEST, VALIDATION)
    for name in list(ALGORITHMS)[:2] if o.tiny else ALGORITHMS:
        records, words = tiny_run(name, parts, o.device)
        for round_, what in ROUNDS.items():
            if words or round_ == 3:  # without a book all rounds are alike
                down, up = (records[round_ - 1][f"bytes_{way}"] / COUNT for way in ("down", "up"))
                note = f"{words[round_ - 1]} words at most" if words else ""
                yield Figure(name, f"{what}, down", "B", [down], note)
                yield Figure(name, f"{what}, up", "B", [up], note)


def tiny_run(name: str, parts: Sequence[Silo], device: str) -> tuple[list[Record], list[int]]:
    """Records of a few rounds, and with a book the most words a silo had in each."""
    experiment = recipe(name, "mnist5k")
    method = experiment.method
    # Whoever is not the least uncertain gets words after round 4.
    book = replace(method.codebook, gamma=0.0, errors=0.0) if method.codebook else None
    local = replace(method.local, epochs=1)
    method = replace(method, rounds=4, extra_rounds=2, iterations=2, passes=2, local=local, codebook=book)
    net = replace(experiment, method=method).network((1, 28, 28), 10)
    clients = Serial(list(method.prepare(parts)), net, device=device)
    server, records = method.start(clients), list[Record]()
    while server.round < method.budget:
        server = method.step(clients, server)
        records += server.records
    return records, [max(s["words"] for s in r["silos"].values()) for r in records] if book else []
