"""Compare the speed of two source trees: `python -m benchmarks.compare_trees OLD_TREE NAME`.

The contender of uefl in a benchmark runs in the old tree and in this one, in turns (old, new, old, new, ...), each turn
in a new process with one torch thread. A turn times whole rounds of the same workload; imports, data, network and
warm-up rounds are not timed. The old tree may be of version 0.1 (`git archive` in a folder), whose names differ.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from safetensors.torch import save_file

from benchmarks.digits import load_digits, make_silos
from benchmarks.harness import RECORDS, Measurement, Options, append_records, make_table
from uefl.core.federation import Silo

NEW_TREE = Path(__file__).parents[1]
OLD, NEW = "old tree", "new tree"
QUANTITY = "one round"


class Size(NamedTuple):
    """Size of a workload; a turn takes about 10 to 20 s."""

    silos: int
    train: int  # examples per silo
    test: int
    validation: int = 0
    batch_size: int = 0
    epochs: int = 1
    width: int = 0
    rounds: int = 1  # timed rounds per turn
    warmup_rounds: int = 1


class Benchmark(NamedTuple):
    """A workload, and its engine and sizes by kind of device."""

    engines: dict[str, str]
    sizes: dict[str, Size]
    tiny: Size


BENCHMARKS = {  # workloads of benchmarks/frameworks.py, authors_code.py, many_clients.py and large_network.py
    "frameworks": Benchmark(
        {"cpu": "serial", "cuda": "serial"},
        {"cpu": Size(9, 2000, 500, rounds=5), "cuda": Size(9, 2000, 500, rounds=10, warmup_rounds=2)},
        Size(2, 64, 32),
    ),
    "authors-code": Benchmark(
        {"cpu": "serial", "cuda": "stacked"},
        {"cpu": Size(9, 396, 110, 44, epochs=3), "cuda": Size(9, 396, 110, 44, epochs=3, rounds=10, warmup_rounds=3)},
        Size(2, 36, 8, 4),
    ),
    "many-clients": Benchmark(
        {"cpu": "serial", "cuda": "stacked"},
        {"cpu": Size(20, 480, 96), "cuda": Size(100, 480, 96, rounds=20, warmup_rounds=3)},
        Size(2, 96, 32),
    ),
    "large-network": Benchmark(
        {"cpu": "serial", "cuda": "compiled"},
        {
            "cpu": Size(3, 1000, 250, batch_size=256, epochs=2, width=32),
            "cuda": Size(9, 2000, 500, batch_size=1024, epochs=20, width=128, rounds=4, warmup_rounds=3),
        },
        Size(2, 64, 32, batch_size=32, epochs=2, width=8),
    ),
}

# --- the program of a turn: an adapter for the names of a tree, then the workloads ---------------------------------

ADAPTERS = {
    "present": """
from uefl.algorithms.extensible_codebook import ExtensibleCodebook
from uefl.algorithms.fedavg import FedAvg
from uefl.algorithms.uefl import UEFL
from uefl.core.federation import Examples, Silo
from uefl.core.local import LocalTraining
from uefl.engines.serial import SerialEngine, choose_kernels
from uefl.engines.stacked.stacked_engine import StackedEngine
from uefl.experiment.recipes import make_experiment
from uefl.models.network import Net
from uefl.models.residual_encoder import ResidualEncoder

OLD_NAMES, OLD_VALUES = {}, {}

def pool_and_relu():
    return nn.MaxPool2d(2), nn.ReLU()
""",
    "0.1": """
from uefl.algorithms import UEFL, Book as ExtensibleCodebook, FedAvg
from uefl.engines import Serial as SerialEngine, Stacked as StackedEngine
from uefl.engines.serial import choose_kernels
from uefl.federation import Part as Examples, Silo
from uefl.local import Local as LocalTraining
from uefl.models.net import Net
from uefl.models.residual import ResidualEncoder
from uefl.recipes import recipe as make_experiment

OLD_NAMES = {
    "lr": "rate", "batch_size": "batch", "eval_batch_size": "evaluation_batch", "mc_samples": "passes",
    "evaluate_local": "watch_local", "num_codewords": "words", "codebook_init": "first", "warmup_rounds": "warm_up",
    "commitment_weight": "commitment", "codebook_loss_weight": "codeword", "hidden_size": "hidden",
    "feature_norm": "normalise", "matmul_precision": "multiply", "use_compiler": "compiled",
    "deterministic": "repeatable", "initialize_server": "start", "adapt_network": "build", "build_network": "network",
    "completed_records": "records",
}
OLD_VALUES = {"full": "exact"}

def pool_and_relu():  # the engine of version 0.1 exchanged the two
    return nn.ReLU(), nn.MaxPool2d(2)
""",
}
WORKER = """
import json, resource, sys, time
from dataclasses import replace

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
{adapter}
import uefl

SIZE, DEVICE, ENGINE = (json.loads(sys.argv[1])[key] for key in ("size", "device", "engine"))
TOTAL_ROUNDS = SIZE["warmup_rounds"] + SIZE["rounds"] + 1  # the last round of a run evaluates once more

def call(function, *arguments, **settings):
    settings = {{OLD_NAMES.get(n, n): OLD_VALUES.get(v, v) if isinstance(v, str) else v for n, v in settings.items()}}
    return function(*arguments, **settings)

def get(value, name):
    return getattr(value, OLD_NAMES.get(name, name))

def load_silos(file):
    tensors = load_file(file)
    splits = [[Examples(x, y) for x, y in zip(tensors["x_" + s], tensors["y_" + s])] for s in ("train", "val", "test")]
    return [Silo(f"s{{i:03}}", *parts) for i, parts in enumerate(zip(*splits))]

def frameworks(silos):
    local = call(LocalTraining, optimizer="sgd", momentum=0.0, lr=0.05, batch_size=32, epochs=1, eval_batch_size=256)
    method = call(FedAvg, rounds=TOTAL_ROUNDS, iterations=1, mc_samples=1, evaluate_local=False, local=local)
    torch.manual_seed(0)
    convolutions = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
    encoder = nn.Sequential(convolutions[0], *pool_and_relu(), convolutions[1], *pool_and_relu())
    net = call(Net, encoder, 10, (1, 28, 28), hidden_size=64, dropout=0.0, feature_norm="none")
    return method, net, silos, "full"

def authors_code(silos):
    experiment = make_experiment("uefl", "mnist5k")
    method = experiment.method
    codebook = call(ExtensibleCodebook, warmup_rounds=0, commitment_weight=0.01)
    local = replace(method.local, epochs=SIZE["epochs"])
    method = replace(method, rounds=TOTAL_ROUNDS, iterations=1, codebook=codebook, local=local)
    net = get(replace(experiment, method=method), "build_network")((1, 28, 28), 10)
    return method, net, silos, "tf32"

def many_clients(silos):
    def pad(examples):
        return Examples(F.pad(examples.x, (2, 2, 2, 2)).repeat(1, 3, 1, 1), examples.y)

    local = call(LocalTraining, optimizer="sgd", momentum=0.0, lr=0.01, batch_size=48, epochs=1)
    method = call(FedAvg, rounds=TOTAL_ROUNDS, iterations=1, local=local, evaluate_local=False)
    torch.manual_seed(0)
    encoder = nn.Sequential(
        nn.Conv2d(3, 64, 5), *pool_and_relu(), nn.Conv2d(64, 64, 5), *pool_and_relu(),
        nn.Flatten(), nn.Linear(1600, 1024), nn.ReLU(),
    )
    net = call(Net, encoder, 10, (3, 32, 32), hidden_size=1024, feature_norm="none")
    silos = [Silo(s.name, pad(s.train), pad(s.validation), pad(s.test)) for s in silos]
    return method, net, silos, "bf16"

def large_network(silos):
    local = call(
        LocalTraining, optimizer="adam", lr=1e-3, batch_size=SIZE["batch_size"], epochs=SIZE["epochs"],
        eval_batch_size=512,
    )
    codebook = call(
        ExtensibleCodebook, num_codewords=64, segments=1, codebook_init="gaussian", warmup_rounds=0,
        commitment_weight=0.25, codebook_loss_weight=1.0,
    )
    method = call(
        UEFL, rounds=TOTAL_ROUNDS, iterations=1, local=local, codebook=codebook, evaluate_local=False
    )
    torch.manual_seed(0)
    net = call(Net, ResidualEncoder(width=SIZE["width"], depth=3), 10, (1, 28, 28), hidden_size=512)
    return method, get(method, "adapt_network")(net), silos, "bf16"

def read_clock():
    if DEVICE.startswith("cuda"):
        torch.cuda.synchronize()
        return time.perf_counter()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime

torch.set_num_threads(1)
workload = {{"frameworks": frameworks, "authors-code": authors_code, "many-clients": many_clients,
             "large-network": large_network}}[sys.argv[2]]
method, net, silos, precision = workload(load_silos(sys.argv[3]))
on_cuda = DEVICE.startswith("cuda")
settings = {{"device": DEVICE, "matmul_precision": precision if on_cuda else "full"}}
if ENGINE == "serial":
    clients = call(SerialEngine, silos, net, **settings)
else:
    clients = call(StackedEngine, silos, net, use_compiler=ENGINE == "compiled", **settings)
if on_cuda:
    call(choose_kernels, tf32=True, deterministic=True)
server = get(method, "initialize_server")(clients)
for _ in range(SIZE["warmup_rounds"]):
    server = method.step(clients, server)
start = read_clock()
for _ in range(SIZE["rounds"]):
    server = method.step(clients, server)
seconds = (read_clock() - start) / SIZE["rounds"]
accuracies = [silo["accuracy"] for silo in get(server, "completed_records")[-1]["silos"].values() if "accuracy" in silo]
print(json.dumps({{
    "seconds": seconds, "accuracy": sum(accuracies) / len(accuracies), "version": uefl.__version__,
    "file": uefl.__file__,
}}))
"""


def detect_version(tree: Path) -> str:
    """Return which adapter the names of a tree need."""
    if (tree / "uefl" / "core" / "federation.py").exists():
        return "present"
    if (tree / "uefl" / "federation.py").exists():
        return "0.1"
    raise typer.BadParameter(f"{tree} has no uefl/core/federation.py (this version) and no uefl/federation.py (0.1)")


def run_turn(tree: Path, name: str, options: Options, size: Size, engine: str, file: Path) -> dict[str, Any]:
    """Run one turn in a new process with the modules of a tree; return seconds per round, accuracy and version."""
    source = WORKER.format(adapter=ADAPTERS[detect_version(tree)])
    config = json.dumps({"size": size._asdict(), "device": options.device, "engine": engine})
    process = subprocess.run(
        [sys.executable, "-c", source, config, name, str(file)],
        capture_output=True,
        text=True,
        cwd=tree,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)},
    )
    if process.returncode:
        raise RuntimeError(f"a turn of {name} in {tree} failed:\n{process.stderr}")
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    if not Path(result["file"]).resolve().is_relative_to(tree.resolve()):
        raise RuntimeError(f"a turn in {tree} imported uefl from {result['file']}")
    return result


def save_data(name: str, options: Options, size: Size, file: Path) -> None:
    """Save the silos of a workload for all turns of both trees."""
    if name == "authors-code" and options.data == "mnist5k" and size == BENCHMARKS[name].sizes["cpu"]:
        from benchmarks.authors_code import make_demo

        silos, _ = make_demo()  # the demo's rotated digits
    else:
        silos = make_silos(load_digits(options.data), size.silos, size.train, size.test, size.validation)
    save_file(stack_splits(silos), file)


def stack_splits(silos: Sequence[Silo]) -> dict[str, torch.Tensor]:
    """Stack the splits of silos of equal size."""
    splits = {"train": [s.train for s in silos], "val": [s.validation for s in silos], "test": [s.test for s in silos]}
    tensors = {f"x_{split}": torch.stack([e.x for e in examples]) for split, examples in splits.items()}
    return tensors | {f"y_{split}": torch.stack([e.y for e in examples]) for split, examples in splits.items()}


def compare(old_tree: Path, name: str, options: Options, size: Size, engine: str) -> list[Measurement]:
    """Run interleaved turns in both trees; return the seconds per round of each."""
    results: dict[str, list[dict[str, Any]]] = {OLD: [], NEW: []}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "silos.safetensors"
        save_data(name, options, size, file)
        for _ in range(options.repeats):
            for contender, tree in ((OLD, old_tree), (NEW, NEW_TREE)):
                results[contender].append(run_turn(tree, name, options, size, engine, file))
    ratios = [new["seconds"] / old["seconds"] for old, new in zip(results[OLD], results[NEW])]
    spread = f"new over old, by turn: {statistics.median(ratios):.3f} ({min(ratios):.3f} - {max(ratios):.3f})"
    return [
        Measurement(
            contender,
            QUANTITY,
            options.time_unit,
            [turn["seconds"] for turn in turns],
            f"uefl {turns[-1]['version']}, accuracy {turns[-1]['accuracy']:.4f}; {spread}",
        )
        for contender, turns in results.items()
    ]


def main(
    old_tree: Annotated[Path, typer.Argument(help="Folder with the other source tree.", exists=True, file_okay=False)],
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(BENCHMARKS)}.")],
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    turns: Annotated[int, typer.Option(min=1, help="Turns of each tree.")] = 5,
    data: Annotated[
        str, typer.Option(envvar="UEFL_BENCH_DATA", help="mnist5k, mnist, or a safetensors file with x and y.")
    ] = "mnist5k",
    engine: Annotated[str, typer.Option(help="serial, stacked or compiled; default: the benchmark's.")] = "",
    rounds: Annotated[int, typer.Option(help="Timed rounds per turn; 0: the benchmark's default.")] = 0,
    warmup_rounds: Annotated[int, typer.Option(help="Rounds before the clock starts; 0: the default.")] = 0,
    silos: Annotated[int, typer.Option(help="Silos; 0: the default.")] = 0,
    train: Annotated[int, typer.Option(help="Training examples per silo; 0: the default.")] = 0,
    test: Annotated[int, typer.Option(help="Test examples per silo; 0: the default.")] = 0,
    epochs: Annotated[int, typer.Option(help="Local epochs of authors-code and large-network; 0: the default.")] = 0,
    batch_size: Annotated[int, typer.Option(help="Batch size of large-network; 0: the default.")] = 0,
    width: Annotated[int, typer.Option(help="Width of large-network; 0: the default.")] = 0,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="Smoke test at a minimal size; the measurements are not meaningful.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="File of records; default: benchmarks/records/trees.jsonl.")] = None,
) -> None:
    """Time whole rounds in two source trees, interleaved; print medians, ratio and range, and append records."""
    if name not in BENCHMARKS:
        raise typer.BadParameter(f"unknown benchmark '{name}'; known: {', '.join(BENCHMARKS)}")
    torch.set_num_threads(1)
    options, benchmark = Options(device, turns, tiny, data), BENCHMARKS[name]
    kind = "cuda" if options.on_cuda else "cpu"
    given = {"rounds": rounds, "warmup_rounds": warmup_rounds, "silos": silos, "train": train, "test": test}
    given |= {"epochs": epochs, "batch_size": batch_size, "width": width}
    size = (benchmark.tiny if tiny else benchmark.sizes[kind])._replace(**{n: v for n, v in given.items() if v})
    engine = engine or benchmark.engines[kind]
    measurements = compare(old_tree.resolve(), name, options, size, engine)
    Console(width=160).print(make_table(f"{name}, {engine} engine", measurements, reference=OLD))
    if out or not tiny:
        command = f"python -m benchmarks.compare_trees OLD_TREE {name} --device {device} --turns {turns}"
        path = out or RECORDS / "trees.jsonl"
        append_records(name, measurements, options, path, command=command, engine=engine, size=size._asdict())


if __name__ == "__main__":
    typer.run(main)
