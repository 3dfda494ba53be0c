"""Shared parts of all benchmarks: options, a clock, interleaved contenders, records and the table."""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from uefl import __version__
from uefl.core.processor import get_cpu_name

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "benchmarks" / "records"
PEERS = {"flwr": "flwr", "pfl": "pfl", "ray": "ray", "scikit-learn": "sklearn"}  # package: module
OURS = "uefl"  # the contender that all others are compared with


class Options(NamedTuple):
    """Options of a benchmark."""

    device: str = "cpu"
    repeats: int = 3
    tiny: bool = False  # a smoke test at a minimal size
    data: str = "mnist5k"  # see digits.py
    workers: int = 0  # processes of a contender that has several; 0: one per core
    kernels: Path | None = None  # file for the list of kernels that a profile on a GPU found

    @property
    def on_cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.startswith("cuda")

    @property
    def time_unit(self) -> str:
        """Unit of `measure_seconds` on this device."""
        return "s" if self.on_cuda else "CPU s"


class Measurement(NamedTuple):
    """One quantity of one contender, with every measured value."""

    contender: str
    quantity: str
    unit: str
    values: list[float]
    note: str = ""

    @property
    def median(self) -> float:
        """Median of the values."""
        return statistics.median(self.values)


def configure_kernels(options: Options) -> None:
    """Set the default precision of uefl on CUDA, and deterministic kernels."""
    if options.on_cuda:
        from uefl.engines.serial import choose_kernels

        choose_kernels(tf32=True)


def measure_seconds(work: Callable[[], object], device: str = "cpu") -> float:
    """Measure CPU seconds of this process and its ended children; on a GPU, wall time until the device is idle."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        work()
        torch.cuda.synchronize(device)
        return time.perf_counter() - start
    start = read_cpu_seconds()
    work()
    return read_cpu_seconds() - start


def read_cpu_seconds() -> float:
    """Read the CPU time of this process and its ended children, which other load on the machine changes little."""
    usages = [resource.getrusage(target) for target in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measure_interleaved(
    contenders: Mapping[str, Callable[[], object]], options: Options, *, calls_per_turn: int = 1, warm_up: bool = True
) -> dict[str, list[float]]:
    """Measure seconds per call of each contender, interleaved, so that other load on the machine affects all alike."""
    seconds: dict[str, list[float]] = {contender: [] for contender in contenders}
    for turn in range(-1 if warm_up else 0, options.repeats):
        for contender, work in contenders.items():
            calls = calls_per_turn if turn >= 0 else 1

            def call(work: Callable[[], object] = work, calls: int = calls) -> None:
                for _ in range(calls):
                    work()

            spent = measure_seconds(call, options.device) / calls
            if turn >= 0:
                seconds[contender].append(spent)
    return seconds


def report_missing(name: str) -> None:
    """Report a peer that is not installed and is skipped."""
    Console(stderr=True).print(f"{name} is not installed: skipped (benchmarks/README.md tells how to install it)")


def read_load() -> list[float]:
    """Read the load of the machine: averages over the last 1, 5 and 15 minutes."""
    return [round(value, 2) for value in os.getloadavg()]


def read_commit(root: Path = ROOT) -> str:
    """Return the commit of the source tree, with `-dirty` if its code differs; empty if it is no git repository."""
    if not (root / ".git").exists():
        return ""
    commands = ["git rev-parse --short=10 HEAD", "git status --porcelain -- uefl benchmarks/*.py"]
    try:
        commit, changes = (
            subprocess.run(command.split(), cwd=root, capture_output=True, text=True, check=True).stdout.strip()
            for command in commands
        )
    except (OSError, subprocess.CalledProcessError):  # no git here, or no commit yet
        return ""
    return f"{commit}-dirty" if changes else commit


def describe_environment(options: Options) -> dict[str, Any]:
    """Describe what a measurement depends on: device, versions, load, command."""
    return {
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(options.device) if options.on_cuda else get_cpu_name(),
        "cores": os.cpu_count(),
        "uefl": __version__,
        "commit": read_commit(),
        "torch": torch.__version__,
        "versions": {name: version(name) for name in PEERS if find_spec(PEERS[name])},
        "python": platform.python_version(),
        "load": read_load(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        # Without the file of records, a path of this machine that changes nothing.
        "command": re.sub(r" --out[ =][^ ]+", "", " ".join(["python -m benchmarks", *sys.argv[1:]])),
        "data": Path(options.data).name,
    }


def append_records(
    benchmark: str, measurements: Iterable[Measurement], options: Options, path: Path, **more: Any
) -> None:
    """Append one JSON line per measurement, with all its values and its environment after the run, and more fields."""
    environment = {**describe_environment(options), **more}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for m in measurements:
            record = {"benchmark": benchmark, "contender": m.contender, "quantity": m.quantity, "value": m.median}
            record |= {"unit": m.unit, "repeats": m.values, "note": m.note}
            file.write(json.dumps({**record, **environment}) + "\n")


def make_table(benchmark: str, measurements: Iterable[Measurement], reference: str = OURS) -> Table:
    """Make a table with median and range of every measurement, and the ratio of its median to the reference's."""
    measurements = list(measurements)
    reference_medians = {m.quantity: m.median for m in measurements if m.contender == reference}
    table = Table(title=benchmark)
    for heading in ("quantity", "contender", "median", "range", "unit", f"over {reference}", "note"):
        table.add_column(heading, justify="right" if heading in ("median", "range", f"over {reference}") else "left")
    for m in measurements:
        base = reference_medians.get(m.quantity)
        ratio = f"{m.median / base:.3g}x" if base and m.contender != reference else ""
        span = f"{min(m.values):.4g} - {max(m.values):.4g}" if len(m.values) > 1 else ""
        table.add_row(m.quantity, m.contender, f"{m.median:.4g}", span, m.unit, ratio, m.note)
    return table
