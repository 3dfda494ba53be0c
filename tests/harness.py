"""Small federations for tests: data that can be learned in seconds, methods with short runs, engines, comparisons."""

from __future__ import annotations

import csv
import io
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from uefl.algorithms import METHODS
from uefl.algorithms.extensible_codebook import ExtensibleCodebook
from uefl.algorithms.fedavg import FedAvg
from uefl.core.federation import (
    CODEWORDS_SUFFIX,
    Batch,
    Broadcast,
    ClientModel,
    Examples,
    Reply,
    ServerState,
    Silo,
    Tensors,
)
from uefl.core.local import LocalTraining
from uefl.data.readers.heart import HEART_FILE
from uefl.engines.serial import SerialEngine
from uefl.experiment.experiment import Experiment
from uefl.experiment.rounds import iterate_rounds
from uefl.models.model_config import ModelConfig
from uefl.models.network import Ensemble, Net

NUM_CLASSES, IMAGE_SHAPE = 3, (1, 8, 8)
CODEWORDS = CODEWORDS_SUFFIX
NUMERIC_COLUMNS = "numeric=age,trestbps,chol,thalch,oldpeak,ca"
HEART_COLUMNS = ("label=num", "positive=above:0", "silo=dataset", "ignore=id", NUMERIC_COLUMNS)

# --- optional parts ---------------------------------------------------------------------------------------------------


def import_or_skip(name: str, reason: str = "") -> Any:
    """Import a module, or skip the tests that need it; under CI=true nothing is skipped, so that a failure is seen."""
    if os.environ.get("CI") == "true":
        return import_module(name)
    return pytest.importorskip(name, reason=reason or None)


# --- data -------------------------------------------------------------------------------------------------------------


def make_striped_examples(count: int, seed: int, *, rotated: bool = False, noise: float = 0.3) -> Examples:
    """Return rows, columns or checkers with a random phase; rotated and inverted, rows look like columns."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(NUM_CLASSES, (count,), generator=generator)
    phase = torch.randint(4, (count, 1, 1), generator=generator)
    i, j = torch.arange(8)[None, :, None], torch.arange(8)[None, None, :]
    rows, columns = ((i + phase) % 4 < 2).expand(count, 8, 8), ((j + phase) % 4 < 2).expand(count, 8, 8)
    x = torch.where(y[:, None, None] == 0, rows, torch.where(y[:, None, None] == 1, columns, rows ^ columns))
    x = x.float() * 2 - 1 + noise * torch.randn(count, 8, 8, generator=generator)
    return Examples((-x.transpose(1, 2) if rotated else x)[:, None].contiguous(), y)


def make_striped_silo(name: str, num_train: int, seed: int, *, rotated: bool = False, noise: float = 0.3) -> Silo:
    sizes = (num_train, 13, 14)
    splits = [make_striped_examples(n, seed + i, rotated=rotated, noise=noise) for i, n in enumerate(sizes)]
    return Silo(name, *splits, domain="rotated" if rotated else "upright", public=make_public_images())


def make_striped_silos() -> list[Silo]:
    """Return four silos of different sizes in two domains."""
    sizes = {"ada": 20, "bob": 25, "cyd": 18, "dan": 28}
    return [make_striped_silo(n, k, 10 * i, rotated=i > 1) for i, (n, k) in enumerate(sizes.items())]


def make_pattern_examples(
    count: int, seed: int, brightness: float = 0.0, shape: Sequence[int] = IMAGE_SHAPE
) -> Examples:
    """Return noisy images of three fixed patterns, one per class."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randn(NUM_CLASSES, *shape, generator=torch.Generator().manual_seed(7))
    y = torch.arange(count) % NUM_CLASSES
    return Examples(patterns[y] + 0.5 * torch.randn(count, *shape, generator=generator) + brightness, y)


def make_pattern_silos(sizes: Sequence[int] = (24, 33, 24), shape: Sequence[int] = IMAGE_SHAPE) -> list[Silo]:
    """Return silos that differ in brightness."""
    return [
        Silo(
            f"silo {i}",
            make_pattern_examples(n, 10 * i, i / 2, shape),
            make_pattern_examples(9, 10 * i + 1, i / 2, shape),
            make_pattern_examples(30, 10 * i + 2, i / 2, shape),
            domain=f"domain {i}",
            public=make_public_images(shape),
        )
        for i, n in enumerate(sizes)
    ]


def write_photos(folder: Path, names: Sequence[str], shape: tuple[int, ...] = (12, 12), seed: int = 0) -> Path:
    """Write a PNG of random pixels for every name, such as `north/cat/1.png`."""
    rng = np.random.default_rng(seed)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).save(folder / name)
    return folder


def write_hospitals(root: Path, newcomer: str) -> tuple[list[str], Path]:
    """Write `three.csv` and the table of a fourth hospital; return the data settings of the three, and the fourth."""
    with HEART_FILE.open() as file:
        rows = list(csv.DictReader(file))
    for name, is_chosen in (("three.csv", False), (newcomer, True)):
        with (root / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(row for row in rows if (row["dataset"] == "Hungary") == is_chosen)
    return ["table", f"path={root / 'three.csv'}", *HEART_COLUMNS], root / newcomer


def find_folder(stdout: str) -> Path:
    """Return the run folder that a command printed."""
    return Path(next(line for line in stdout.splitlines() if line.startswith("run folder: ")).partition(": ")[2])


def list_photo_names(silos: Sequence[str], labels: str = "xy", count: int = 6) -> list[str]:
    return [f"{silo}/{label}/{i}.png" for silo in silos for label in labels for i in range(count)]


def make_public_images(shape: Sequence[int] = IMAGE_SHAPE) -> Tensor:
    """Return images that no silo has, of the silos' patterns and other brightness."""
    return make_pattern_examples(21, 99, 0.2, shape).x


def make_batch(n: int = 12, dtype: torch.dtype = torch.float64) -> Batch:
    examples = make_pattern_examples(n, 5)
    return Batch(examples.x.to(dtype), examples.y)


# --- methods and settings ---------------------------------------------------------------------------------------------

LOCAL = LocalTraining(lr=3e-3, batch_size=8, epochs=1, eval_batch_size=16)
SHORT_RUN: dict[str, Any] = {"rounds": 3, "extra_rounds": 2, "iterations": 2, "mc_samples": 4, "local": LOCAL}
# γ = 0 without a test: every silo but the least uncertain one is reported as uncertain and extended.
ALWAYS_UNCERTAIN: dict[str, Any] = {"gamma": 0.0, "min_standard_errors": 0.0, "uncertainty_test": "none"}
SMALL_CODEBOOK = ExtensibleCodebook(num_codewords=6, segments=2, warmup_rounds=1, min_examples=1, **ALWAYS_UNCERTAIN)
SMALL_FIELDS = {"fedcr": {"code_size": 8, "train_draws": 3, "eval_draws": 4}, "vhl": {"images_per_class": 5}}

# Every method that is neither FedAvg nor built around a codebook nor a reference, and those that accept a codebook.
NOT_BASELINES = ("uefl", "fedavg", "vq-fedavg", "local-only", "centralized")
BASELINES = tuple(name for name in METHODS if name not in NOT_BASELINES)
CODEBOOK_METHODS = tuple(name for name in BASELINES if not METHODS[name].codebook_unsupported_reason)

CODEBOOK_SETTINGS = ["num_codewords=8", "gamma=0", "min_standard_errors=0"]
TINY_SETTINGS_NO_CODEBOOK = [
    "train_per_silo=40",
    "test_per_silo=20",
    "width=4",
    "hidden_size=16",
    "rounds=3",
    "extra_rounds=2",
    "iterations=2",
    "epochs=1",
    "batch_size=20",
    "mc_samples=3",
]
TINY_SETTINGS = [*TINY_SETTINGS_NO_CODEBOOK, *CODEBOOK_SETTINGS]  # for the command line, on the embedded digits


def make_short_method(method_class: type[FedAvg]) -> FedAvg:
    """Return a method with a short run and its own form of the local training."""
    return method_class(**{**SHORT_RUN, "local": method_class().adapt_local_training(LOCAL)})


def make_method(name: str, **fields: Any) -> FedAvg:
    """Return a registered method with a short run; `codebook=True` adds a small codebook."""
    if fields.pop("codebook", False):
        fields["codebook"] = SMALL_CODEBOOK
    short = {"rounds": 2, "extra_rounds": 1, "iterations": 2, "mc_samples": 3, **SMALL_FIELDS.get(name, {})}
    method = METHODS[name](**{**short, **fields})
    if "local" in fields:
        return method
    lr = 0.02 if method.local.optimizer == "sgd" else 5e-3
    return replace(method, local=replace(method.local, batch_size=12, epochs=1, lr=lr))


# --- networks ---------------------------------------------------------------------------------------------------------

MLP_MODEL = ModelConfig(encoder="mlp", width=16, hidden_size=16)  # no batch norm
BATCH_NORM_MODEL = ModelConfig(width=4, depth=2, hidden_size=16)


def make_encoder() -> nn.Module:
    """Return an encoder with batch norm: [B, 1, 8, 8] -> [B, 8, 2, 2]."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1),
    )


def make_network(
    method: FedAvg, *, seed: int = 0, ensemble_size: int = 1, encoder_factory: Any = make_encoder, **fields: Any
) -> nn.Module:
    """Return a method's network around a small encoder."""
    fields = {"hidden_size": 16, "dropout": 0.1, **fields}

    def build() -> Net:
        return Net(encoder_factory(), NUM_CLASSES, IMAGE_SHAPE, **fields)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return method.adapt_network(build() if ensemble_size == 1 else Ensemble(build, ensemble_size))


def build_model(
    method: FedAvg, model: ModelConfig = BATCH_NORM_MODEL, shape: tuple[int, ...] = IMAGE_SHAPE, seed: int = 0
) -> nn.Module:
    """Return a method's network as an experiment builds it."""
    return Experiment(method=method, model=model, seed=seed).build_network(shape, NUM_CLASSES)


def bind_model(net: nn.Module, extras: Tensors | None = None, client_state: Tensors | None = None) -> ClientModel:
    """Return a network as losses and client tasks use it."""
    received = {n: t.detach().clone() for n, t in net.state_dict().items()}
    params = dict(net.named_parameters())
    return ClientModel(net, params, extras=extras, received_state=received, client_state=client_state)


# --- engines and runs -------------------------------------------------------------------------------------------------


class RecordingEngine(SerialEngine):
    """The serial engine with a list of the names of all tensors that were sent or received."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.received_names: set[str] = set()
        self.sent_names: set[str] = set()
        self.replies: list[Reply] = []

    def fit(self, method: Any, broadcast: Broadcast, *, evaluate: bool = True) -> Any:
        self.received_names |= {*broadcast.model_state, *broadcast.extras}
        for reply in super().fit(method, broadcast, evaluate=evaluate):
            self.sent_names |= {*reply.tensors, *reply.extras}
            self.replies.append(reply)
            yield reply

    def query(self, method: Any, task: str, broadcast: Broadcast, splits: Any) -> Any:
        self.received_names |= {*broadcast.model_state, *broadcast.extras}
        for reply in super().query(method, task, broadcast, splits):
            self.sent_names |= {*reply.extras, *(name for answer in reply.answers.values() for name in answer)}
            yield reply


def make_clients(
    method: FedAvg,
    silos: Sequence[Silo] | None = None,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    engine: type[SerialEngine] = SerialEngine,
    **fields: Any,
) -> Any:
    """Return clients on striped silos; further fields are those of `make_network`."""
    prepared = method.prepare_silos(make_striped_silos() if silos is None else silos)
    return engine(prepared, make_network(method, seed=seed, **fields), seed=seed, dtype=dtype)


def run_rounds(method: FedAvg, clients: Any, rounds: int | None = None, server: ServerState | None = None) -> Any:
    """Run all rounds, or a number of further ones; return the last server state and the records."""
    server = server or method.initialize_server(clients)
    records: list[dict[str, Any]] = []
    for state in iterate_rounds(method, clients, server, num_rounds=rounds):
        server = state
        records += server.completed_records
    return server, records


class RunResult(NamedTuple):
    server: ServerState
    clients: Any
    records: list[dict[str, Any]]


def run_method(
    method: FedAvg,
    silos: Sequence[Silo] | None = None,
    *,
    net: nn.Module | None = None,
    model: ModelConfig = BATCH_NORM_MODEL,
    dtype: torch.dtype = torch.float32,
    rounds: int | None = None,
) -> RunResult:
    """Run a method on pattern silos to its end, or for some rounds, and record what was sent."""
    prepared = method.prepare_silos(make_pattern_silos() if silos is None else silos)
    shape = tuple(prepared[0].test.x.shape[1:])
    clients = RecordingEngine(prepared, build_model(method, model, shape) if net is None else net, dtype=dtype)
    server, records = run_rounds(method, clients, rounds)
    return RunResult(server, clients, records)


# --- command line -----------------------------------------------------------------------------------------------------


class Answer(NamedTuple):
    code: int
    stdout: str
    stderr: str


def call_cli(*arguments: str) -> Answer:
    """Run the command line in this process, which saves the seconds of importing torch."""
    from uefl.cli.main import main

    stdout, stderr = io.StringIO(), io.StringIO()
    code, argv = 0, sys.argv
    try:
        sys.argv = ["uefl", *arguments]
        with redirect_stdout(stdout), redirect_stderr(stderr):
            main()
    except SystemExit as e:
        code = int(e.code or 0)
    finally:
        sys.argv = argv
    return Answer(code, stdout.getvalue(), stderr.getvalue())


def call_with_mistake(*arguments: str) -> str:
    """Return the line that answers a user's mistake."""
    answer = call_cli(*arguments)
    assert answer.code == 2, answer
    assert answer.stderr.startswith("uefl: ")
    assert answer.stderr.count("\n") == 1, "a mistake is one line"
    return answer.stderr.removeprefix("uefl: ").rstrip("\n")


# --- comparisons ------------------------------------------------------------------------------------------------------


def have_equal_bits(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Return whether two dicts have the same names and bits."""
    return set(one) == set(other) and all(torch.equal(one[n], other[n]) for n in one)


def max_difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    assert set(one) == set(other)
    gaps = [(one[n].double() - other[n].double()).abs().flatten() for n in one if one[n].numel()]
    return float(torch.cat(gaps).max()) if gaps else 0.0


def compute_mean_accuracy(record: dict[str, Any]) -> float:
    accuracies = [s["accuracy"] for s in record["silos"].values() if "accuracy" in s]
    return float(sum(accuracies) / len(accuracies))


def drop_seconds(value: Any) -> Any:
    """Return records without times, the only entries in which two engines may differ."""
    if not isinstance(value, dict):
        return value
    return {name: drop_seconds(inner) for name, inner in value.items() if "seconds" not in name}


def read_change_times(folder: Path, pattern: str) -> dict[Path, int]:
    """Return when files last changed; one that another process is just replacing is left out."""
    times = {}
    for path in folder.glob(pattern):
        with suppress(FileNotFoundError):
            times[path] = path.stat().st_mtime_ns
    return times
