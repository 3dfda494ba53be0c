"""What all benchmarks share: options, a clock, contenders that take turns, records and the table."""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from uefl.engines.serial import choose_kernels

RECORDS = Path(__file__).parent / "records"
US = "uefl"  # whose figure all others are set against


class Options(NamedTuple):
    """How to run a benchmark."""

    device: str = "cpu"
    repeats: int = 3
    tiny: bool = False  # a size that only shows that it runs
    data: str = "mnist5k"  # see images.py

    @property
    def cuda(self) -> bool:
        return self.device.startswith("cuda")


class Figure(NamedTuple):
    """One quantity of one contender, with every value that was measured."""

    who: str
    figure: str
    unit: str
    values: list[float]
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.values)


def settle(o: Options) -> None:
    """Our default precision on CUDA, and kernels that give the same bits twice."""
    if o.cuda:
        choose_kernels(tf32=True)


def seconds(work: Callable[[], object], device: str = "cpu") -> float:
    """CPU seconds of this process and its ended children; on a GPU, wall time until it is idle again."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        work()
        torch.cuda.synchronize(device)
        return time.perf_counter() - started
    started = cpu_seconds()
    work()
    return cpu_seconds() - started


def cpu_seconds() -> float:
    """Wall time says little on shared cores; this counts what was really computed."""
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(r.ru_utime + r.ru_stime for r in both)


def take_turns(
    contenders: Mapping[str, Callable[[], object]], o: Options, *, times: int = 1, warm: bool = True
) -> dict[str, list[float]]:
    """Seconds a call of each contender, interleaved, so that a slow minute of the machine hits all of them alike."""
    found: dict[str, list[float]] = {who: [] for who in contenders}
    for turn in range(-1 if warm else 0, o.repeats):
        for who, work in contenders.items():
            calls = times if turn >= 0 else 1
            spent = seconds(lambda work=work, calls=calls: [work() for _ in range(calls)], o.device) / calls  # type: ignore[misc]
            if turn >= 0:
                found[who].append(spent)
    return found


def missing(name: str) -> None:
    """A peer that is not here is named and left out."""
    Console(stderr=True).print(f"{name} is not installed: left out (benchmarks/README.md says how to get it)")


def processor() -> str:
    """The CPU's own name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def record(benchmark: str, figures: Iterable[Figure], o: Options, path: Path) -> None:
    """Append one JSON line a figure, with all that is needed to judge it."""
    about: dict[str, Any] = {
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(o.device) if o.cuda else processor(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load": [round(v, 2) for v in os.getloadavg()],
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": " ".join(["python -m benchmarks", *sys.argv[1:]]),
        "data": Path(o.data).name,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for f in figures:
            line = {"benchmark": benchmark, "who": f.who, "figure": f.figure, "value": f.median, "unit": f.unit}
            file.write(json.dumps({**line, "repeats": f.values, "note": f.note, **about}) + "\n")


def table(benchmark: str, figures: Iterable[Figure]) -> Table:
    """Median and range of every figure; the last column is a contender's figure over ours."""
    figures = list(figures)
    ours = {f.figure: f.median for f in figures if f.who == US}
    shown = Table(title=benchmark)
    for heading in ("figure", "who", "median", "range", "unit", f"over {US}", "note"):
        shown.add_column(heading, justify="right" if heading in ("median", "range", f"over {US}") else "left")
    for f in figures:
        base = ours.get(f.figure)
        ratio = f"{f.median / base:.3g}x" if base and f.who != US else ""
        span = f"{min(f.values):.4g} - {max(f.values):.4g}" if len(f.values) > 1 else ""
        shown.add_row(f.figure, f.who, f"{f.median:.4g}", span, f.unit, ratio, f.note)
    return shown
