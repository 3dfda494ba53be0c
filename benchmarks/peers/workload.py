"""The workload that all contenders share: the silos' data, the network, the settings.

In every round each silo trains the received weights for one epoch of SGD, the server averages by number of examples,
and the average is evaluated (accuracy, no dropout) on every silo's test images.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from uefl.core.federation import Silo

LR, BATCH_SIZE, EVAL_BATCH_SIZE, NUM_CLASSES, HIDDEN = 0.05, 32, 256, 10, 64
SEED = 0


class Workload(NamedTuple):
    """The input of a contender: [K, n, 1, 28, 28] and [K, n] of train and test, and the number of rounds."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    rounds: int


def save_silos(silos: Sequence[Silo], file: Path) -> None:
    """Save the data in one file for all contenders, so that reading costs the same."""
    tensors = {"x": [s.train.x for s in silos], "y": [s.train.y for s in silos]}
    tensors |= {"test_x": [s.test.x for s in silos], "test_y": [s.test.y for s in silos]}
    save_file({name: torch.stack(per_silo) for name, per_silo in tensors.items()}, file)


def load_workload(file: str, rounds: int = 0) -> Workload:
    """Load the workload, and limit torch to one thread."""
    torch.set_num_threads(1)
    return Workload(**load_file(file), rounds=rounds)


def parse_arguments() -> Workload:
    """Load the workload that the command line names: a file and the number of rounds."""
    return load_workload(sys.argv[1], int(sys.argv[2]))


def report_round(accuracy: float) -> None:
    """Print the end of a round for the clock of the parent process."""
    print(f"round {accuracy:.4f}", flush=True)


def make_encoder() -> nn.Sequential:
    """Make conv3×3 1→16 and conv3×3 16→32, each with max-pool before ReLU, a quarter of the work: [B, 32, 7, 7]."""
    first = [nn.Conv2d(1, 16, 3, padding=1), nn.MaxPool2d(2), nn.ReLU()]
    return nn.Sequential(*first, nn.Conv2d(16, 32, 3, padding=1), nn.MaxPool2d(2), nn.ReLU())


def make_network() -> nn.Sequential:
    """Make the whole network: the encoder and 1568-64-10."""
    torch.manual_seed(SEED)
    head = [nn.Flatten(), nn.Linear(1568, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, NUM_CLASSES)]
    return nn.Sequential(*make_encoder(), *head)
