"""The workload that all contenders share: the silos' data, the network, the settings.

In every round each silo trains the received weights for one epoch of SGD, the server averages by number of examples,
and the average is evaluated (accuracy, no dropout) on every silo's test images. All contenders start from the same
weights and see the same batches: both follow from this module and not from a framework.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from uefl.core import noise_addresses as addresses
from uefl.core.federation import Silo
from uefl.core.noise import derive_key, permutation

LR, BATCH_SIZE, EVAL_BATCH_SIZE, NUM_CLASSES, HIDDEN = 0.05, 32, 256, 10, 64
SEED = 0
INITIAL = "initial."  # prefix of the initial weights in the file
DTYPES = {"float32": torch.float32, "float64": torch.float64}


class Workload(NamedTuple):
    """The input of a contender: [K, n, 1, 28, 28] and [K, n] of train and test, the initial weights, and the rounds."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    initial: dict[str, Tensor]
    rounds: int


def save_silos(silos: Sequence[Silo], file: Path) -> None:
    """Save data and initial weights in one file for all contenders, so that reading costs the same."""
    tensors = {"x": [s.train.x for s in silos], "y": [s.train.y for s in silos]}
    tensors |= {"test_x": [s.test.x for s in silos], "test_y": [s.test.y for s in silos]}
    initial = {f"{INITIAL}{name}": t for name, t in make_network().state_dict().items()}
    save_file({**{name: torch.stack(per_silo) for name, per_silo in tensors.items()}, **initial}, file)


def load_workload(file: str, rounds: int = 0, precision: str = "float32") -> Workload:
    """Load the workload in a precision, and limit torch to one thread."""
    torch.set_num_threads(1)
    tensors = {n: t.to(DTYPES[precision]) if t.is_floating_point() else t for n, t in load_file(file).items()}
    initial = {n: tensors[f"{INITIAL}{n}"] for n in make_network().state_dict()}  # a file has another order
    return Workload(*(tensors[name] for name in ("x", "y", "test_x", "test_y")), initial, rounds)


def parse_arguments() -> Workload:
    """Load the workload that the command line names: a file, the number of rounds and the precision."""
    return load_workload(sys.argv[1], int(sys.argv[2]), sys.argv[3])


def name_silo(silo: int) -> str:
    """Return the name of a silo, which addresses the order of its batches."""
    return f"s{silo}"


def draw_order(silo: int, round_number: int, num_examples: int) -> Tensor:
    """Draw the order of a silo's examples in a round, counted from 1; uefl draws the same one by itself."""
    return permutation(derive_key(SEED, name_silo(silo), round_number, 0, addresses.BATCH_ORDER), num_examples)


def save_weights(state: Mapping[str, Tensor]) -> None:
    """Save the final weights, in the order of the network's tensors, where the command line says."""
    save_file({f"{i:02}": t.detach().contiguous() for i, t in enumerate(state.values())}, sys.argv[4])


def start_network(workload: Workload) -> nn.Sequential:
    """Make the network with the initial weights."""
    net = make_network().to(workload.x.dtype)
    net.load_state_dict(workload.initial)
    return net


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
