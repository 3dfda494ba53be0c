"""One federation run by several frameworks: 9 silos x 2000 digits, a small network, SGD, batch size 32; CPU seconds.

All start from the same weights and see the same batches. The final weights are compared with ours, after the timed runs
in float32 and after a further run in float64, which shows whether a difference is rounding.
"""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from safetensors.torch import load_file
from torch import Tensor

try:
    import psutil  # Ray's processes outlive their parents; psutil finds them all
except ImportError:
    psutil = None

from benchmarks.cpu_profile import profile_operations
from benchmarks.digits import load_digits, make_silos
from benchmarks.harness import OURS, ROOT, Measurement, Options, report_missing
from benchmarks.peers.run_uefl import start_federation
from benchmarks.peers.workload import load_workload, save_silos

LATER_ROUND = "one later round"
AGREEMENT = "difference of final weights from uefl, relative to the largest"


class Contender(NamedTuple):
    """A program that runs the workload."""

    package: str  # the package that it needs
    module: str  # in benchmarks/peers
    arguments: tuple[str, ...] = ()


CONTENDERS = {
    OURS: Contender("uefl", "run_uefl"),
    "PyTorch loop": Contender("torch", "run_pytorch"),
    "PyTorch loop, channels last": Contender("torch", "run_pytorch", ("channels_last",)),
    "pfl": Contender("pfl", "run_pfl"),
    "Flower": Contender("flwr", "run_flower"),
}


def run(options: Options) -> Iterator[Measurement]:
    """Measure every installed framework, each run in its own process, interleaved."""
    if psutil is None:
        report_missing("psutil")
        return
    rounds, train_per_silo, test_per_silo = (2, 64, 32) if options.tiny else (6, 2000, 500)
    contenders = {name: contender for name, contender in CONTENDERS.items() if find_spec(contender.package)}
    for name in CONTENDERS.keys() - contenders.keys():
        report_missing(name)
    whole_runs: dict[str, list[float]] = {name: [] for name in contenders}
    later_rounds: dict[str, list[float]] = {name: [] for name in contenders}
    accuracies = dict[str, str]()
    weights: dict[tuple[str, str], list[Tensor]] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "silos.safetensors"
        save_silos(make_silos(load_digits(options.data), 9, train_per_silo, test_per_silo), file)
        for _ in range(options.repeats):
            for name, contender in contenders.items():
                timed = run_contender(name, contender, file, rounds, "float32")
                whole_runs[name].append(timed.total)
                later_rounds[name].append(statistics.median(b - a for a, b in itertools.pairwise(timed.round_ends)))
                accuracies[name], weights[name, "float32"] = timed.accuracy, timed.weights
        exact = {name: run_contender(name, c, file, rounds, "float64") for name, c in contenders.items()}
        weights |= {(name, "float64"): own.weights for name, own in exact.items()}
        method, clients, server = start_federation(load_workload(str(file), rounds=1))
    for name in contenders:
        yield Measurement(name, LATER_ROUND, "CPU s", later_rounds[name], f"median of {rounds - 1} rounds per run")
    for name in contenders:
        yield Measurement(
            name, f"whole run of {rounds} rounds", "CPU s", whole_runs[name], f"accuracy {accuracies[name]}"
        )
    for precision in ("float32", "float64"):
        for name in contenders:
            accuracy = accuracies[name] if precision == "float32" else exact[name].accuracy
            difference = compare_weights(weights[name, precision], weights[OURS, precision])
            yield Measurement(name, f"{AGREEMENT}, {precision}", "", [difference], f"accuracy {accuracy}")
    server = method.run_round(clients, server)  # the first round does not evaluate; it is the warm-up
    yield from profile_operations(lambda: method.run_round(clients, server), LATER_ROUND)


class ContenderRun(NamedTuple):
    """What one run of a contender shows."""

    round_ends: list[float]  # CPU seconds
    total: float  # CPU seconds
    accuracy: str
    weights: list[Tensor]


def run_contender(name: str, contender: Contender, file: Path, rounds: int, precision: str) -> ContenderRun:
    """Run a contender once and measure it."""
    out = file.with_name("weights.safetensors")
    program = [sys.executable, "-m", f"benchmarks.peers.{contender.module}"]
    round_ends, total, accuracy = measure_process(
        [*program, str(file), str(rounds), precision, str(out), *contender.arguments]
    )
    if len(round_ends) < rounds or accuracy == "nan":
        raise RuntimeError(f"{name} ended after {len(round_ends)} of {rounds} rounds, accuracy {accuracy}")
    final = [tensor for _, tensor in sorted(load_file(out).items())]
    out.unlink()
    return ContenderRun(round_ends, total, accuracy, final)


def compare_weights(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """Return the largest difference of a weight, relative to the largest weight of the other."""
    difference = max(float((a.double() - b.double()).abs().max()) for a, b in zip(one, other, strict=True))
    return difference / max(float(b.abs().max()) for b in other)


def measure_process(command: list[str]) -> tuple[list[float], float, str]:
    """Measure CPU seconds of a process and its descendants, at the end of every round and in total."""
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    ) as process:
        clock, round_ends, accuracy = ProcessTreeClock(process.pid), [], "nan"
        assert process.stdout
        for line in process.stdout:
            if line.startswith("round"):
                round_ends.append(clock.read())
                accuracy = line.split()[1]
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and its CPU time is still readable
        clock.stop.set()
        clock.thread.join()
        total = clock.read()
    return round_ends, total, accuracy


class ProcessTreeClock:
    """CPU time of a process and its descendants, polled all the time because some of Ray's outlive their parents."""

    def __init__(self, pid: int) -> None:
        self.root = psutil.Process(pid)
        self.cpu_seconds: dict[psutil.Process, float] = {}
        self.lock, self.stop = threading.Lock(), threading.Event()
        self.thread = threading.Thread(target=self._poll, daemon=True)
        self.thread.start()

    def _poll(self) -> None:
        while not self.stop.wait(0.05):
            self.read()

    def read(self) -> float:
        """Read the CPU seconds of all processes that were ever part of the tree."""
        with self.lock:
            try:
                processes = [self.root, *self.root.children(recursive=True)]
            except psutil.NoSuchProcess:
                processes = []
            for process in {*processes, *self.cpu_seconds}:
                try:
                    times = process.cpu_times()
                    self.cpu_seconds[process] = times.user + times.system
                except psutil.NoSuchProcess:
                    continue
            return sum(self.cpu_seconds.values())
