"""The work that all contenders share: the silos' data, the network, the settings.

Every round: each silo trains the received weights for one epoch of SGD, the server averages by size, and the average is
evaluated (accuracy, no dropout) on every silo's test images.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from uefl.federation import Silo

RATE, BATCH, EVALUATION_BATCH, CLASSES, HIDDEN = 0.05, 32, 256, 10, 64
SEED = 0


class Task(NamedTuple):
    """What a contender is given: [K, n, 1, 28, 28] and [K, n] of each part, and the number of rounds."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    rounds: int


def store(silos: Sequence[Silo], file: Path) -> None:
    """One file for all contenders, so that none pays for another's reader."""
    parts = {"x": [s.train.x for s in silos], "y": [s.train.y for s in silos]}
    parts |= {"test_x": [s.test.x for s in silos], "test_y": [s.test.y for s in silos]}
    save_file({name: torch.stack(each) for name, each in parts.items()}, file)


def load(file: str, rounds: int = 0) -> Task:
    torch.set_num_threads(1)
    return Task(**load_file(file), rounds=rounds)


def asked() -> Task:
    """The task that the command line names: a file and the number of rounds."""
    return load(sys.argv[1], int(sys.argv[2]))


def say(accuracy: float) -> None:
    """Tell the clock outside that a round is over."""
    print(f"round {accuracy:.4f}", flush=True)


def encoder() -> nn.Sequential:
    """conv3×3 1→16, pool, conv3×3 16→32, pool: [B, 32, 7, 7]."""
    first = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))


def network() -> nn.Sequential:
    """The whole: encoder, 1568-64-10."""
    torch.manual_seed(SEED)
    head = [nn.Flatten(), nn.Linear(1568, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, CLASSES)]
    return nn.Sequential(*encoder(), *head)
