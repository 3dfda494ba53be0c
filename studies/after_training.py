"""What the studies of calibration and drift share: trained methods, and held-out images that can be split anew."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from uefl import __version__
from uefl.data.shifts import apply_shift
from uefl.experiment.experiment import Experiment
from uefl.experiment.loading import open_models
from uefl.experiment.parsing import parse_experiments
from uefl.experiment.records import append_records
from uefl.experiment.run import run
from uefl.experiment.silo_models import SiloModels

METHODS = ("uefl", "fedavg", "fedbn", "local-only")


class Setup(NamedTuple):
    """Data and schedule of a study."""

    title: str
    settings: tuple[str, ...]
    calibration_size: int  # of the random splits; the rest of the held-out images tests


SCHEDULE = ("rounds=6", "extra_rounds=4", "iterations=2", "epochs=2")
SETUPS = {
    # 544 training, 116 validation and 1000 held-out images per silo
    "digits": Setup(
        "5000 embedded digits, three silos with the rotations 0°, −50° and 120°",
        (
            *("mnist5k", "num_silos=1,1,1", "train_per_silo=1160", "test_per_silo=500", "calibration_fraction=0.4311"),
            *SCHEDULE,
        ),
        200,
    ),
    "mnist": Setup(
        "MNIST, nine silos with the rotations 0°, −50° and 120°",
        (
            *("mnist", "pool_splits=true", "train_per_silo=5000", "test_per_silo=1000", "calibration_fraction=0.2"),
            *SCHEDULE,
        ),
        500,
    ),
}


@dataclass(frozen=True)
class HeldOutPool:
    """Images of one silo that no training has read: its calibration and its test images."""

    silo_name: str
    pixels: Tensor  # uint8 [N, c, h, w], with the shift of the silo
    y: Tensor  # [N]
    indices: Tensor  # [N] in the source


def train_method(
    setup: Setup, method: str, seed: int, root: Path, device: str, changes: tuple[str, ...] = ()
) -> tuple[SiloModels, list[HeldOutPool]]:
    """Train a method, or find it trained, and return its models and the held-out images of its silos."""
    arguments = [method, *setup.settings, *changes, f"seed={seed}"]
    (experiment,) = parse_experiments(arguments, (), "default").values()
    folder = run(experiment, root, device=device, on_event=_print_event)
    return open_models(folder), make_pools(experiment)


def _print_event(event: dict[str, Any]) -> None:
    if event["kind"] == "round":
        print(f"  round {event['record']['round']}", file=sys.stderr, flush=True)


def make_pools(experiment: Experiment) -> list[HeldOutPool]:
    """Return the held-out images of all silos."""
    images = experiment.data.read_images(show_progress=False)
    pools = []
    for partition in experiment.data.make_partitions(images, experiment.seed):
        indices = torch.cat([partition.calibration, partition.test])
        pixels = apply_shift(images.x[indices], partition.silo.shift, experiment.seed, indices)
        pools.append(HeldOutPool(partition.silo.name, pixels, images.y[indices], indices))
    return pools


def write_record(out: Path, module: str, record: dict[str, Any]) -> None:
    """Append a record with the command that made it."""
    command = shlex.join(["python", "-m", f"studies.{module}", *sys.argv[1:]])
    append_records(out, [{"command": command, "uefl": __version__, "torch": torch.__version__, **record}])
