"""Growth: 10, 100 and 1000 clients with a small net: time a client and round, and memory beyond the data.

On a GPU all of them go together here; a last row has no more than 100 in a stack, which bounds the memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.everyone.task import encoder
from benchmarks.frame import Figure, Options, seconds
from benchmarks.images import digits, silos
from uefl.algorithms import FedAvg
from uefl.engines import IN_PROCESS, chosen
from uefl.federation import Server
from uefl.local import Local
from uefl.models.net import Net

COUNTS, TOGETHER, ROUNDS, IMAGES = (10, 100, 1000), 100, 3, (64, 16)


def run(o: Options) -> Iterator[Figure]:
    rows = {f"{count} clients": (count, 0) for count in ((3, 6) if o.tiny else COUNTS)}
    if o.cuda:
        rows[f"{COUNTS[-1]} clients, {TOGETHER} together"] = (COUNTS[-1], TOGETHER)
    found: dict[str, list[dict[str, float]]] = {who: [] for who in rows}
    for _ in range(o.repeats):
        for who, numbers in rows.items():
            # A process each, since a process's peak of memory never falls.
            command = [sys.executable, "-m", "benchmarks.clients", *map(str, numbers), o.device, o.data]
            done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent.parent)
            found[who].append(json.loads(done.stdout))
    for name, unit in (("a client and round", "s" if o.cuda else "CPU s"), ("peak memory beyond the data", "MB")):
        for who, values in found.items():
            yield Figure(who, name, unit, [v[name] for v in values], f"{sum(IMAGES)} images each")


def one(count: int, chunk: int, device: str, data: str) -> dict[str, float]:
    """Rounds of FedAvg with so many clients; the first one is not counted."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = Net(encoder(), 10, (1, 28, 28), hidden=64)
    method = FedAvg(rounds=ROUNDS + 2, iterations=1, local=Local(optimizer="sgd", batch=32, epochs=1))
    everyone = silos(digits(data), count, *IMAGES)
    engine = chosen("auto", device, net, everyone, method.local, method.rounds)
    fields: dict[str, Any] = {"multiply": "tf32", "chunk": chunk} if device.startswith("cuda") else {}
    clients = IN_PROCESS[engine](everyone, net, device=device, **fields)
    server = method.start(clients)
    before = _memory(device)
    spent = 0.0
    for round_ in range(ROUNDS + 1):
        done: list[Server] = []
        took = seconds(lambda done=done: done.append(method.step(clients, server)), device)  # type: ignore[misc]  # noqa: B023
        server = done[0].but(records=())
        spent += took if round_ else 0.0
    peak = (_memory(device, peak=True) - before) / 2**20
    return {"a client and round": spent / ROUNDS / count, "peak memory beyond the data": peak}


def _memory(device: str, *, peak: bool = False) -> float:
    """Bytes in use, from where on the peak is watched; or that peak."""
    if device.startswith("cuda"):
        if peak:
            return torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    if not peak:
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak of loading
    lines = Path("/proc/self/status").read_text().splitlines()
    kilobytes = next(line.split()[1] for line in lines if line.startswith("VmHWM" if peak else "VmRSS"))
    return float(kilobytes) * 1024


if __name__ == "__main__":
    print(json.dumps(one(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])))
