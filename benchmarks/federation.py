"""One federation run by everyone: 9 silos x 2000 digits, a small conv net, SGD, batch 32, one epoch; CPU seconds."""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

try:
    import psutil  # Ray's processes outlive their parents; nothing else finds them all
except ImportError:
    psutil = None

from benchmarks.everyone.task import load, store
from benchmarks.everyone.with_uefl import begun
from benchmarks.frame import Figure, Options, missing
from benchmarks.images import digits, silos
from benchmarks.ops import shares

CONTENDERS = {  # who: package it needs, module, further arguments
    "uefl": ("uefl", "with_uefl", ()),
    "plain loop": ("torch", "plain", ()),
    "plain loop, channels last": ("torch", "plain", ("channels_last",)),
    "pfl": ("pfl", "with_pfl", ()),
    "Flower": ("flwr", "with_flower", ()),
}


def run(o: Options) -> Iterator[Figure]:
    if psutil is None:
        missing("psutil")
        return
    rounds, train, test = (2, 64, 32) if o.tiny else (6, 2000, 500)
    here = {who: c for who, c in CONTENDERS.items() if find_spec(c[0])}
    for who in CONTENDERS.keys() - here.keys():
        missing(who)
    whole: dict[str, list[float]] = {who: [] for who in here}
    further: dict[str, list[float]] = {who: [] for who in here}
    notes = dict[str, str]()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "silos.safetensors"
        store(silos(digits(o.data), 9, train, test), file)
        for _ in range(o.repeats):
            for who, (_, module, more) in here.items():
                command = [sys.executable, "-m", f"benchmarks.everyone.{module}", str(file), str(rounds), *more]
                marks, end, accuracy = watched(command)
                if len(marks) < rounds or accuracy == "nan":
                    raise RuntimeError(f"{who} ended after {len(marks)} of {rounds} rounds, accuracy {accuracy}")
                whole[who].append(end)
                further[who].append(statistics.median(b - a for a, b in itertools.pairwise(marks)))
                notes[who] = f"accuracy {accuracy}"
        method, clients, server = begun(load(str(file), rounds=1))
    for who in here:
        yield Figure(who, "a further round", "CPU s", further[who], f"median of {rounds - 1} rounds a run")
    for who in here:
        yield Figure(who, f"whole run of {rounds} rounds", "CPU s", whole[who], notes[who])
    server = method.round(clients, server)  # the first one measures nothing, and is the warm-up
    yield from shares(lambda: method.round(clients, server), "a further round")


def watched(command: list[str]) -> tuple[list[float], float, str]:
    """CPU seconds of a process and all that it starts: at the end of every round, and in all."""
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent)},
    ) as process:
        clock, marks, accuracy = Tree(process.pid), [], "nan"
        assert process.stdout
        for line in process.stdout:
            if line.startswith("round"):
                marks.append(clock.read())
                accuracy = line.split()[1]
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and its clock can still be read
        clock.stop.set()
        clock.thread.join()
        whole = clock.read()
    return marks, whole, accuracy


class Tree:
    """CPU time of a process and its descendants. Some of Ray's outlive their parents, so it is looked at all along."""

    def __init__(self, pid: int) -> None:
        self.root = psutil.Process(pid)
        self.seen: dict[psutil.Process, float] = {}
        self.lock, self.stop = threading.Lock(), threading.Event()
        self.thread = threading.Thread(target=self._look, daemon=True)
        self.thread.start()

    def _look(self) -> None:
        while not self.stop.wait(0.05):
            self.read()

    def read(self) -> float:
        with self.lock:
            try:
                family = [self.root, *self.root.children(recursive=True)]
            except psutil.NoSuchProcess:
                family = []
            for process in {*family, *self.seen}:
                try:
                    used = process.cpu_times()
                    self.seen[process] = used.user + used.system
                except psutil.NoSuchProcess:
                    continue
            return sum(self.seen.values())
