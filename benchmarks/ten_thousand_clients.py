"""100, 1000 and 10 000 clients of 50 to 200 digits, 100 per round: start, time per round and memory, beside peers.

All start from the same weights, train the same clients and see the same batches. The final weights are compared with
ours, after the timed runs in float32 and with 1000 clients after a further run in float64.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.frameworks import AGREEMENT, Contender, ProcessTreeClock, compare_weights, psutil
from benchmarks.harness import OURS, ROOT, Measurement, Options, report_missing
from benchmarks.peers.clients_file import CLIENTS_PER_ROUND, write_clients

CLIENT_COUNTS, ROUNDS = (100, 1000, 10_000), 10
EXACT = 1000  # clients of the further run in float64
CONTENDERS = {
    OURS: Contender("uefl", "clients_uefl", ("0",)),
    f"{OURS}, {CLIENTS_PER_ROUND} clients measure every round": Contender(
        "uefl", "clients_uefl", (str(CLIENTS_PER_ROUND),)
    ),
    "pfl": Contender("pfl", "clients_pfl"),
    "Flower": Contender("flwr", "clients_flower"),
}


QUANTITIES = {  # field of an outcome: the quantity and its unit
    "begin": ("begin of the first round", "s"),
    "cpu": ("one later round", "CPU s"),
    "memory": ("peak memory", "MB"),
    "first_memory": ("resident memory amid the first round", "MB"),
    "last_memory": ("resident memory amid the last round", "MB"),
}


class Outcome(NamedTuple):
    """What one run of a contender shows."""

    begin: float  # seconds from the start of the program to the begin of the first round
    cpu: float  # CPU seconds of a later round, the median
    memory: float  # peak of the processes together, in MB
    first_memory: float  # resident amid the first round, in MB; nan if the contender does not report when that is
    last_memory: float  # amid the last round
    accuracy: str
    weights: list[Tensor]  # of the final model


def run(options: Options) -> Iterator[Measurement]:
    """Measure every installed contender with every number of clients, each run in its own process, interleaved."""
    if psutil is None:
        report_missing("psutil")
        return
    counts, exact_count, rounds = ((100, 120), 120, 3) if options.tiny else (CLIENT_COUNTS, EXACT, ROUNDS)
    contenders = {name: contender for name, contender in CONTENDERS.items() if find_spec(contender.package)}
    for name in CONTENDERS.keys() - contenders.keys():
        report_missing(name)
    outcomes: dict[tuple[int, str], list[Outcome]] = {address: [] for address in itertools.product(counts, contenders)}
    with tempfile.TemporaryDirectory() as folder:
        files = {k: Path(folder) / f"{k}.safetensors" for k in counts}
        for k, file in files.items():
            write_clients(file, k, options.data, rounds)
        for _, (k, name) in itertools.product(range(options.repeats), outcomes):
            outcomes[k, name] += try_contender(name, contenders[name], files[k], rounds, "float32")
        exact = {n: try_contender(n, c, files[exact_count], rounds, "float64") for n, c in contenders.items()}
    yield from list_quantities(outcomes)
    for k in counts:
        yield from compare_models(k, "float32", {name: outcomes[k, name] for name in contenders})
    yield from compare_models(exact_count, "float64", exact)


def list_quantities(outcomes: Mapping[tuple[int, str], Sequence[Outcome]]) -> Iterator[Measurement]:
    """Return times and memory by number of clients and contender."""
    for field, (quantity, unit) in QUANTITIES.items():
        for (k, name), own in outcomes.items():
            values = [value for outcome in own if not math.isnan(value := getattr(outcome, field))]
            if values:
                yield Measurement(name, f"{k} clients: {quantity}", unit, values, f"accuracy {own[-1].accuracy}")


def compare_models(k: int, precision: str, outcomes: Mapping[str, Sequence[Outcome]]) -> Iterator[Measurement]:
    """Compare the final weights of the last run of every contender with ours."""
    for name, own in outcomes.items():
        for outcome in own[-1:]:
            difference = compare_weights(outcome.weights, outcomes[OURS][-1].weights)
            quantity, note = f"{k} clients: {AGREEMENT}, {precision}", f"accuracy {outcome.accuracy}"
            yield Measurement(name, quantity, "", [difference], note)


def try_contender(name: str, contender: Contender, file: Path, rounds: int, precision: str) -> list[Outcome]:
    """Run a contender once; return nothing if a peer fails, which may not support so many clients."""
    try:
        return [measure_contender(name, contender, file, rounds, precision)]
    except RuntimeError as e:
        if name.startswith(OURS):
            raise
        Console(stderr=True).print(f"{file.stem} clients: {e}")
        return []


def measure_contender(name: str, contender: Contender, file: Path, rounds: int, precision: str) -> Outcome:
    """Run a contender once."""
    out, program = file.with_name("weights.safetensors"), f"benchmarks.peers.{contender.module}"
    command = [sys.executable, "-m", program, str(file), str(rounds), precision, str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    started, begin, accuracy = time.monotonic(), float("nan"), "nan"
    ends, memories = list[float](), list[float]()
    with subprocess.Popen(
        [*command, *contender.arguments], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    ) as process:
        meter = ProcessTreeMeter(process.pid)
        assert process.stdout
        for line in process.stdout:
            if line.startswith("begin"):
                begin = time.monotonic() - started
            elif line.startswith("middle"):
                # Resident: other programs, which share torch's pages now and then, do not change it.
                memories.append(meter.root.memory_info().rss / 2**20)
            elif line.startswith("round"):
                ends.append(meter.read())
            elif line.startswith("accuracy"):
                accuracy = line.split()[1]
        meter.stop.set()
        meter.thread.join()
    if len(ends) != rounds or accuracy == "nan":
        raise RuntimeError(f"{name} ended after {len(ends)} of {rounds} rounds, accuracy {accuracy}")
    cpu = statistics.median(b - a for a, b in itertools.pairwise(ends))
    first_memory, last_memory = (memories[0], memories[-1]) if memories else (float("nan"), float("nan"))
    weights = [tensor for _, tensor in sorted(load_file(out).items())]
    return Outcome(begin, cpu, meter.peak / 2**20, first_memory, last_memory, accuracy, weights)


class ProcessTreeMeter(ProcessTreeClock):
    """CPU time and peak memory of a process and its descendants; pages that several of them share count once."""

    peak = 0.0  # bytes

    def _poll(self) -> None:
        while not self.stop.wait(0.2):
            self.read()
            self.peak = max(self.peak, sum(map(_read_memory, [*self.cpu_seconds])))


def _read_memory(process: psutil.Process) -> float:
    try:
        return float(process.memory_full_info().pss)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0.0
