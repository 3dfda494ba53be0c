"""What the studies of calibration and drift share: trained methods, and held-out images that can be split anew."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from uefl import __version__
from uefl.core.errors import unknown_value_error
from uefl.data.shifts import apply_shift
from uefl.experiment.experiment import Experiment
from uefl.experiment.loading import open_models
from uefl.experiment.parallel_runs import run_in_parallel
from uefl.experiment.parsing import parse_experiments
from uefl.experiment.records import append_records, read_records
from uefl.experiment.run import run
from uefl.experiment.silo_models import SiloModels

METHODS = ("uefl", "fedavg", "fedbn", "local-only")
PATH_OPTIONS = ("--runs", "--out")  # of commands: where a machine had its files


class Setup(NamedTuple):
    """Data and schedule of a study."""

    title: str
    settings: tuple[str, ...]
    calibration_size: int  # of the random splits; the rest of the held-out images tests
    codebook: tuple[str, ...]  # settings of UEFL that the records have and the library's defaults had


FIRST_CODEBOOK = (
    *("num_codewords=256", "segments=4", "codeword_gradient=code", "gate=none", "gate_value=0.75"),
    *("fine_tuning_epochs=0", "group_rounds=0"),
)
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
        (*FIRST_CODEBOOK, "commitment_weight=0.01"),
    ),
    "mnist": Setup(
        "MNIST, nine silos with the rotations 0°, −50° and 120°",
        (
            *("mnist", "pool_splits=true", "train_per_silo=5000", "test_per_silo=1000", "calibration_fraction=0.2"),
            *SCHEDULE,
        ),
        500,
        (*FIRST_CODEBOOK, "commitment_weight=0.25", "min_standard_errors=2"),
    ),
}


def find_setup(data: str) -> Setup:
    """Return a setup by its name."""
    if data not in SETUPS:
        raise unknown_value_error("data", data, tuple(SETUPS))
    return SETUPS[data]


@dataclass(frozen=True)
class HeldOutPool:
    """Images of one silo that no training has read: its calibration and its test images."""

    silo_name: str
    pixels: Tensor  # uint8 [N, c, h, w], with the shift of the silo
    y: Tensor  # [N]
    indices: Tensor  # [N] in the source


def make_study_experiment(setup: Setup, method: str, seed: int) -> Experiment:
    """Return the experiment of a method and seed."""
    codebook = setup.codebook if method == "uefl" else ()
    (experiment,) = parse_experiments([method, *setup.settings, *codebook, f"seed={seed}"], (), "default").values()
    return experiment


def train_method(setup: Setup, method: str, seed: int, root: Path, device: str) -> tuple[SiloModels, list[HeldOutPool]]:
    """Train a method, or find it trained, and return its models and the held-out images of its silos."""
    experiment = make_study_experiment(setup, method, seed)
    folder = run(experiment, root, device=device, on_event=partial(_print_event, method))
    return open_models(folder), make_pools(experiment)


def train_in_parallel(setup: Setup, runs: Sequence[tuple[str, int]], root: Path, device: str, workers: int) -> None:
    """Train methods and seeds in parallel processes, on CUDA all seeds of a method in one stack."""
    experiments = {f"{method}, seed {seed}": make_study_experiment(setup, method, seed) for method, seed in runs}
    if workers > 1 and len(experiments) > 1:
        torch.set_num_threads(1)
        experiments[next(iter(experiments))].data.load(0)  # decode images once, not in every process
        run_in_parallel(experiments, root, workers=workers, device=device, on_event=_print_event)


def _print_event(label: str, event: dict[str, Any]) -> None:
    if event["kind"] == "round":
        print(f"  {label}, round {event['record']['round']}", file=sys.stderr, flush=True)


def list_missing(out: Path, data: str, methods: Sequence[str], seeds: Sequence[int]) -> list[tuple[str, int]]:
    """Return the methods and seeds that have no record of these data and settings yet."""
    settings = list(SETUPS[data].settings)
    done = {(r["method"], r["seed"]) for r in read_records(out) if (r["data"], r["settings"]) == (data, settings)}
    missing = [(method, seed) for seed in seeds for method in methods if (method, seed) not in done]
    print(f"{len(methods) * len(seeds)} records, {len(methods) * len(seeds) - len(missing)} of them done", flush=True)
    return missing


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


def render_commands(records: Sequence[dict[str, Any]]) -> str:
    """Render the commands of the records, each once and without paths of the machine that ran it."""
    commands = dict.fromkeys(f"`{_drop_paths(record['command'])}`" for record in records)
    return f"Commands: {', '.join(commands)} (uefl {records[-1]['uefl']}, torch {records[-1]['torch']})."


def _drop_paths(command: str) -> str:
    words = shlex.split(command)
    return shlex.join(w for before, w in zip(["", *words], words) if not {w, before} & set(PATH_OPTIONS))
