"""Engines take the largest before ReLU: not a bit of a run changes, and no network that would be another by it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from stripes import LOCAL, ROUNDS, clients, play, same
from torch import Tensor, nn

from uefl.algorithms import FedAvg
from uefl.engines import Serial, Stacked

METHOD = FedAvg(**{**ROUNDS, "local": LOCAL})


def body() -> nn.Sequential:
    """[B, 1, 8, 8] -> [B, 8, 2, 2]; some channels are negative everywhere, and have no gradient either way."""
    first, second = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
    with torch.no_grad():
        first.bias[:2] = -9.0  # type: ignore[index]
    return nn.Sequential(first, nn.ReLU(), nn.MaxPool2d(2), second, nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1))


class Reading(nn.Module):
    """A network that also gives what lies between ReLU and max-pool."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = body()

    def forward(self, x: Tensor) -> Tensor:
        seen = self.layers[:2](x)
        return self.layers[2:](seen) + seen.mean((2, 3), keepdim=True)


@pytest.mark.parametrize("engine", [Serial, partial(Stacked, chunk=1)])
def test_a_run_has_the_same_bits_in_either_order(engine, monkeypatch):
    ours, _ = play(METHOD, clients(METHOD, body=body, engine=engine))
    monkeypatch.setattr("uefl.engines.serial.pooled_first", lambda *_: None)
    theirs, _ = play(METHOD, clients(METHOD, body=body, engine=engine))
    assert same(ours.state, theirs.state)


def test_the_engines_copy_changes_and_nobody_elses():
    mine = body()
    there = clients(METHOD, body=lambda: mine)
    assert [type(m).__name__ for m in there.net.encoder[1:3]] == ["MaxPool2d", "ReLU"]
    assert [type(m).__name__ for m in mine[1:3]] == ["ReLU", "MaxPool2d"]


def test_a_network_that_reads_its_layers_by_parts_stays():
    there = clients(METHOD, body=Reading)
    assert [type(m).__name__ for m in there.net.encoder.layers[1:3]] == ["ReLU", "MaxPool2d"]
