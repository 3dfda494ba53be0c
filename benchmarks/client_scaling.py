"""10, 100 and 1000 clients with a small network: time per client and round, and memory beyond the data.

On a GPU all clients are in one stack; a last row has at most 100 clients per stack, which bounds the memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.digits import load_digits, make_silos
from benchmarks.harness import Measurement, Options, measure_seconds
from benchmarks.peers.workload import make_encoder
from uefl.algorithms.fedavg import FedAvg
from uefl.core.local import LocalTraining
from uefl.engines import ENGINES
from uefl.engines.choosing import choose_engine
from uefl.models.network import Net

CLIENT_COUNTS, CLIENTS_PER_STACK, ROUNDS, IMAGES_PER_CLIENT = (10, 100, 1000), 100, 3, (64, 16)
SECONDS, MEMORY = "per client and round", "peak memory beyond the data"


def run(options: Options) -> Iterator[Measurement]:
    """Measure federations of different sizes, each in its own process, since a process's peak memory never falls."""
    rows = {f"{count} clients": (count, 0) for count in ((3, 6) if options.tiny else CLIENT_COUNTS)}
    if options.on_cuda:
        rows[f"{CLIENT_COUNTS[-1]} clients, {CLIENTS_PER_STACK} per stack"] = (CLIENT_COUNTS[-1], CLIENTS_PER_STACK)
    results: dict[str, list[dict[str, float]]] = {row: [] for row in rows}
    for _ in range(options.repeats):
        for row, numbers in rows.items():
            arguments = [*map(str, numbers), options.device, options.data]
            process = subprocess.run(
                [sys.executable, "-m", "benchmarks.client_scaling", *arguments],
                capture_output=True,
                text=True,
                check=True,
                cwd=Path(__file__).parent.parent,
            )
            results[row].append(json.loads(process.stdout))
    for quantity, unit in ((SECONDS, options.time_unit), (MEMORY, "MB")):
        for row, measured in results.items():
            note = f"{sum(IMAGES_PER_CLIENT)} images per client"
            yield Measurement(row, quantity, unit, [values[quantity] for values in measured], note)


def measure_clients(num_clients: int, clients_per_stack: int, device: str, data: str) -> dict[str, float]:
    """Measure rounds of FedAvg with this many clients; the first round is not counted."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = Net(make_encoder(), 10, (1, 28, 28), hidden_size=64)
    method = FedAvg(rounds=ROUNDS + 2, iterations=1, local=LocalTraining(optimizer="sgd", batch_size=32, epochs=1))
    silos = make_silos(load_digits(data), num_clients, *IMAGES_PER_CLIENT)
    on_cuda = device.startswith("cuda")  # on a CPU, seconds and memory are those of this process alone
    engine = choose_engine("auto" if on_cuda else "serial", device, net, silos, method.local, method.rounds)
    settings: dict[str, Any] = {}
    if device.startswith("cuda"):
        settings = {"matmul_precision": "tf32", "max_stack_size": clients_per_stack}
    clients = ENGINES[engine](silos, net, device=device, **settings)
    server = method.initialize_server(clients)

    def run_round() -> None:
        nonlocal server
        server = method.step(clients, server)

    memory_before = _read_memory(device)
    seconds = 0.0
    for round_number in range(ROUNDS + 1):
        spent = measure_seconds(run_round, device)
        server = server.replace(completed_records=())
        seconds += spent if round_number else 0.0
    peak = (_read_memory(device, peak=True) - memory_before) / 2**20
    return {SECONDS: seconds / ROUNDS / num_clients, MEMORY: peak}


def _read_memory(device: str, *, peak: bool = False) -> float:
    """Read the bytes in use and reset the peak; or read the peak since then."""
    if device.startswith("cuda"):
        if peak:
            return torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    if not peak:
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak that loading left
    lines = Path("/proc/self/status").read_text().splitlines()
    kilobytes = next(line.split()[1] for line in lines if line.startswith("VmHWM" if peak else "VmRSS"))
    return float(kilobytes) * 1024


if __name__ == "__main__":
    print(json.dumps(measure_clients(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])))
