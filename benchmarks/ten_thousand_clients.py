"""100, 1000 and 10 000 clients of 50 to 200 digits, 100 per round: start, time per round and memory, beside peers."""

from __future__ import annotations

import itertools
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from benchmarks.frameworks import Contender, ProcessTreeClock, psutil
from benchmarks.harness import OURS, ROOT, Measurement, Options, report_missing
from benchmarks.peers.clients_file import CLIENTS_PER_ROUND, write_clients

CLIENT_COUNTS, ROUNDS = (100, 1000, 10_000), 10
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


def run(options: Options) -> Iterator[Measurement]:
    """Measure every installed contender with every number of clients, each run in its own process, interleaved."""
    if psutil is None:
        report_missing("psutil")
        return
    counts, rounds = ((100, 120), 3) if options.tiny else (CLIENT_COUNTS, ROUNDS)
    contenders = {name: contender for name, contender in CONTENDERS.items() if find_spec(contender.package)}
    for name in CONTENDERS.keys() - contenders.keys():
        report_missing(name)
    outcomes: dict[tuple[str, int], list[Outcome]] = {(name, k): [] for name in contenders for k in counts}
    with tempfile.TemporaryDirectory() as folder:
        files = {k: Path(folder) / f"{k}.safetensors" for k in counts}
        for k, file in files.items():
            write_clients(file, k, options.data)
        for _, k, name in itertools.product(range(options.repeats), counts, contenders):
            try:
                outcomes[name, k].append(measure_contender(name, contenders[name], files[k], rounds))
            except RuntimeError as e:  # a peer may not support so many clients; the others are still measured
                if name.startswith(OURS):
                    raise
                Console(stderr=True).print(f"{k} clients: {e}")
    for field, (quantity, unit) in QUANTITIES.items():
        for k, name in itertools.product(counts, contenders):
            own = outcomes[name, k]
            values = [value for outcome in own if not math.isnan(value := getattr(outcome, field))]
            if values:
                yield Measurement(name, f"{k} clients: {quantity}", unit, values, f"accuracy {own[-1].accuracy}")


def measure_contender(name: str, contender: Contender, file: Path, rounds: int) -> Outcome:
    """Run a contender once."""
    command = [sys.executable, "-m", f"benchmarks.peers.{contender.module}", str(file), str(rounds)]
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
    return Outcome(begin, cpu, meter.peak / 2**20, first_memory, last_memory, accuracy)


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
