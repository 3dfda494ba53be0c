"""Silos spread over all cores: wall time of a later round, nine silos and 100 clients, beside one process and peers."""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from benchmarks.digits import load_digits, make_silos
from benchmarks.harness import OURS, ROOT, Measurement, Options, report_missing
from benchmarks.peers.workload import save_silos
from uefl.core.federation import Silo
from uefl.engines.processes.worker_pool import choose_num_workers

SERIAL = f"{OURS}, one process"
NO_EXCHANGE = f"{OURS}, no exchange"  # as many processes, each with its silos alone: what the machine can do at best


class Federation(NamedTuple):
    """How many silos there are, and how many images each of them has."""

    num_silos: int
    train_per_silo: int
    test_per_silo: int


FEDERATIONS = {"nine silos": Federation(9, 2000, 500), "100 clients": Federation(100, 480, 96)}
TINY_FEDERATIONS = {"nine silos": Federation(3, 64, 32), "100 clients": Federation(6, 32, 16)}


class Rounds(NamedTuple):
    """When each round of a program ended, and the accuracies that it printed."""

    ends: list[float]
    accuracies: list[str]

    @property
    def later_round(self) -> float:
        """Median seconds of the rounds after the first."""
        return statistics.median(b - a for a, b in itertools.pairwise(self.ends))


def run(options: Options) -> Iterator[Measurement]:
    """Measure every contender with as many workers, each in processes of its own, in turns."""
    rounds = 3 if options.tiny else 6
    for name, federation in (TINY_FEDERATIONS if options.tiny else FEDERATIONS).items():
        num_workers = choose_num_workers(options.workers, federation.num_silos)
        contenders = make_contenders(num_workers)
        seconds: dict[str, list[float]] = {contender: [] for contender in contenders}
        accuracies: dict[str, list[str]] = {}
        alone = list[float]()
        with tempfile.TemporaryDirectory() as folder:
            file, weights = Path(folder) / "silos.safetensors", Path(folder) / "weights.safetensors"
            silos = make_silos(load_digits(options.data), *federation)
            save_silos(silos, file)
            for _ in range(options.repeats):
                for contender, (program, arguments) in contenders.items():
                    measured = time_rounds([*program, str(file), str(rounds), "float32", str(weights), *arguments])
                    if len(measured.ends) != rounds:
                        raise RuntimeError(f"{contender} ended after {len(measured.ends)} of {rounds} rounds")
                    seconds[contender].append(measured.later_round)
                    accuracies[contender] = measured.accuracies
                alone.append(time_without_exchange(silos, num_workers, rounds, Path(folder)))
        if accuracies[OURS] != accuracies[SERIAL]:
            raise RuntimeError(f"processes and serial differ: {accuracies[OURS]} and {accuracies[SERIAL]}")
        for contender in contenders:
            workers = 1 if contender == SERIAL else num_workers
            note = f"workers {workers}, median of {rounds - 1} rounds per run, accuracy {accuracies[contender][-1]}"
            yield Measurement(contender, f"{name}: one later round", "s", seconds[contender], note)
        note = f"workers {num_workers}, the slowest process, median of {rounds - 1} rounds"
        yield Measurement(NO_EXCHANGE, f"{name}: one later round", "s", alone, note)


def make_contenders(num_workers: int) -> dict[str, tuple[list[str], list[str]]]:
    """Return the command of every installed contender, before and after file, rounds, precision and final weights."""
    python, workers = [sys.executable, "-m"], str(num_workers)
    launcher = [*python, "torch.distributed.run", "--nproc_per_node", workers]
    contenders = {
        OURS: ([*python, "benchmarks.peers.run_uefl"], ["processes", workers]),
        SERIAL: ([*python, "benchmarks.peers.run_uefl"], []),
        "pfl": ([*launcher, "-m", "benchmarks.peers.run_pfl"], []),
        "Flower": ([*python, "benchmarks.peers.run_flower"], [workers]),
    }
    packages = {"pfl": "pfl", "Flower": "flwr"}
    for missing in [name for name, package in packages.items() if not find_spec(package)]:
        report_missing(missing)
        del contenders[missing]
    return contenders


def time_without_exchange(silos: Sequence[Silo], num_workers: int, rounds: int, folder: Path) -> float:
    """Divide the silos among processes that know nothing of each other; return the time of the slowest one."""
    commands = []
    for i in range(num_workers):
        file = folder / f"part-{i}.safetensors"
        save_silos(silos[i::num_workers], file)
        program = [sys.executable, "-m", "benchmarks.peers.run_uefl"]
        commands.append([*program, str(file), str(rounds), "float32", str(folder / f"weights-{i}.safetensors")])
    with ThreadPoolExecutor(num_workers) as pool:
        return max(measured.later_round for measured in pool.map(time_rounds, commands))


def time_rounds(command: list[str]) -> Rounds:
    """Run a program that prints a line per round, and measure wall time."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ends, accuracies = [], []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment) as process:
        assert process.stdout
        for line in process.stdout:
            if line.startswith("round"):
                ends.append(time.perf_counter())
                accuracies.append(line.split()[1])
    return Rounds(ends, accuracies)
