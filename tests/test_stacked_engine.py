"""The stacked engine tells the same story as the serial one: double precision, dropout on, after an extension."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from stripes import LOCAL, ROUNDS, play, short, silo
from stripes import clients as federation
from torch import nn

from uefl import UEFL, Book
from uefl.algorithms import ALGORITHMS, FedAvg
from uefl.engines import Serial, Stacked
from uefl.errors import InputError
from uefl.local import Local
from uefl.noise import key, permutation, permutations


def body() -> nn.Module:
    """[B, 1, 8, 8] -> [B, 8, 2, 2]. No bias before batch norm: its gradient is rounding, which Adam makes steps of."""
    first = nn.Conv2d(1, 8, 3, stride=2, padding=1, bias=False)
    return nn.Sequential(first, nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2, padding=1))


clients = partial(federation, body=body)
EAGER = Book(words=6, segments=2, warm_up=1, gamma=0.0, errors=0)
OURS = UEFL(**ROUNDS, codebook=EAGER)
SETUPS: dict[str, tuple[FedAvg, dict[str, Any]]] = {
    "all at once": (OURS, {}),
    "one at a time": (OURS, {"chunk": 1}),
    "two at a time": (OURS, {"chunk": 2}),
    "some silos a round": (replace(OURS, participation=2), {}),
    "an optimiser that stays": (replace(OURS, local=replace(LOCAL, fresh=False)), {}),
    "sgd, clipped, decaying": (
        replace(OURS, local=Local(optimizer="sgd", rate=0.02, weight_decay=0.01, clip=0.5, batch=8, epochs=2)),
        {},
    ),
    "adamw, cosine": (
        replace(OURS, local=replace(LOCAL, optimizer="adamw", weight_decay=0.1, schedule="cosine")),
        {},
    ),
    "own norm statistics": (replace(OURS, norms="local"), {}),
    "an ensemble": (OURS, {"members": 2}),
    "augmented": (OURS, {"augment": "crop:2+flip"}),
    "a book around fedprox": (ALGORITHMS["fedprox"](**ROUNDS, codebook=EAGER), {}),
}
SETUPS |= {name: (short(kind), {}) for name, kind in ALGORITHMS.items() if name not in ("uefl", "vq-fedavg", "pooled")}
SETUPS["one vocabulary for all"] = (ALGORITHMS["vq-fedavg"](**ROUNDS, codebook=replace(EAGER, extend=False)), {})


@pytest.mark.parametrize("setup", SETUPS)
def test_agrees_with_the_serial_engine(setup):
    method, fields = SETUPS[setup]
    fields = dict(fields)
    stacked = partial(Stacked, chunk=fields.pop("chunk", 0))
    ours, records = play(method, clients(method, dtype=torch.float64, engine=stacked, **fields))
    theirs, expected = play(method, clients(method, dtype=torch.float64, **fields))
    assert ours.state.keys() == theirs.state.keys()
    assert torch.equal(ours.access, theirs.access)
    assert "book" not in setup or ours.access.shape[1] > 6, "the run must extend"
    for name, tensor in theirs.state.items():
        torch.testing.assert_close(ours.state[name], tensor, rtol=1e-9, atol=1e-9, check_device=False)
    assert [alike(a, b) for a, b in zip(records, expected, strict=True)] == [""] * len(expected)


def unable(*_: Any) -> Any:
    raise RuntimeError("this compiler cannot do anything")


@pytest.mark.parametrize(
    ("setup", "backend", "rounds"),
    [
        ("a book around fedprox", "aot_eager", 5),
        *((name, "aot_eager", 2) for name in ALGORITHMS if name not in ("uefl", "vq-fedavg", "pooled")),
        ("own norm statistics", unable, 2),
    ],
)
def test_compiled_code_agrees_where_a_compiler_can_and_where_it_cannot(setup, backend, rounds, monkeypatch):
    """Silos with more words take turns with others, FedIIR takes a gradient of a gradient, VHL reads the epoch."""
    monkeypatch.setattr("uefl.engines.compiling.BACKEND", backend)
    torch._dynamo.reset()
    method, _ = SETUPS[setup]
    engine = clients(method, dtype=torch.float64, engine=partial(Stacked, chunk=1, compiled=True))
    ours, _ = play(method, engine, rounds)
    theirs, _ = play(method, clients(method, dtype=torch.float64), rounds)
    for name, tensor in theirs.state.items():
        torch.testing.assert_close(ours.state[name], tensor, rtol=1e-9, atol=1e-9)
    arenas = engine._arenas.values()
    assert all(bool(arena.beyond) == (backend is unable) for arena in arenas)
    assert len(arenas) == (2 if "book" in setup else 1)


@pytest.mark.parametrize("engine", [Serial, Stacked, partial(Stacked, chunk=1, compiled=True)], ids=str)
def test_gradients_of_words_by_a_product_are_those_of_a_table(engine, monkeypatch):
    """What CUDA does, on any device."""
    expected, _ = play(OURS, clients(OURS, dtype=torch.float64))
    torch._dynamo.reset()
    monkeypatch.setattr("uefl.engines.compiling.BACKEND", "aot_eager")
    monkeypatch.setattr("uefl.codebook.by_product", lambda _: True)
    there = clients(OURS, dtype=torch.float64, engine=engine)
    found, _ = play(OURS, there)
    for name, tensor in expected.state.items():
        torch.testing.assert_close(found.state[name], tensor, rtol=1e-9, atol=1e-9)
    assert not any(arena.beyond for arena in getattr(there, "_arenas", {}).values())


@pytest.mark.parametrize("name", ["uefl", "scaffold", "fedcr", "fedsr"])
def test_silos_keep_the_same_on_both_engines(name):
    method = short(ALGORITHMS[name])
    ours, theirs = (clients(method, dtype=torch.float64, engine=e) for e in (Stacked, Serial))
    play(method, ours), play(method, theirs)
    assert ours.memory.keys() == theirs.memory.keys()
    for who, kept in theirs.memory.items():
        assert ours.memory[who].keys() == kept.keys()
        assert all(torch.allclose(ours.memory[who][n], t, rtol=1e-9, atol=1e-9) for n, t in kept.items())


def test_single_precision_agrees_after_one_round():
    method = replace(OURS, codebook=replace(EAGER, warm_up=0))
    ours, _ = play(method, clients(method, engine=Stacked), 1)
    theirs, _ = play(method, clients(method), 1)
    for name, tensor in theirs.state.items():
        torch.testing.assert_close(ours.state[name], tensor, rtol=1e-5, atol=1e-5)


def test_a_silo_of_one_batch_more_or_less_is_never_padded():
    sizes = {"a": 8, "b": 9, "c": 16, "d": 17, "e": 3, "f": 16}
    silos = [silo(n, k, 10 * i) for i, (n, k) in enumerate(sizes.items())]
    ours, _ = play(OURS, clients(OURS, silos, dtype=torch.float64, engine=Stacked))
    theirs, _ = play(OURS, clients(OURS, silos, dtype=torch.float64))
    for name, tensor in theirs.state.items():
        torch.testing.assert_close(ours.state[name], tensor, rtol=1e-9, atol=1e-9)


def test_orders_of_many_silos_are_those_of_each():
    sizes = [5, 9, 1, 140_000]  # the last one is drawn in blocks
    keys = [key("order", i) for i in range(4)]
    together = permutations(torch.tensor(keys), sizes)
    for k, n, row in zip(keys, sizes, together):
        assert torch.equal(row[:n], permutation(k, n))


def test_a_network_with_torchs_own_dropout_is_refused_in_one_line():
    foreign = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Dropout(0.1))
    with pytest.raises(InputError, match="engine=serial"):
        clients(FedAvg(**ROUNDS), engine=Stacked, body=lambda: foreign)


def alike(one: Any, other: Any, at: str = "") -> str:
    """Where two records differ, times apart, or nothing."""
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return f"{at} {sorted(one.keys() ^ other.keys())}"
        found = [alike(one[n], other[n], f"{at}/{n}") for n in one if "seconds" not in n]
        return next((f for f in found if f), "")
    if isinstance(one, float) and isinstance(other, float):
        return "" if math.isclose(one, other, rel_tol=1e-7, abs_tol=1e-9) else f"{at} {one} {other}"
    return "" if one == other else f"{at} {one} {other}"
