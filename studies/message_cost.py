"""Measure what a message costs besides its training: three nodes on this machine, over TLS.

`python -m studies.message_cost` replaces the nodes' app by one that writes the times at which its process started, had
imported its modules, and began and ended its work. All clocks are this machine's, so the other parts follow from the
times at which messages were created and answered.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from uefl.flower.demo import SILO_SHIFTS, start_processes, write_digits, write_run_settings
from uefl.flower.deployment import write_deployment
from uefl.flower.local_processes import find_free_port, open_local_federation

ROUNDS = 8
SETTINGS = (
    f"rounds={ROUNDS} iterations=1 width=8 hidden_size=64 local.lr=2e-3 local.batch_size=32 local.epochs=2 "
    "mc_samples=10 feature_norm=none"
)
PARTS = {
    "wait": "the node polls (3 s), SuperExec polls (1 s), requests",
    "flower": "a process starts, imports flwr, fetches the message and the app",
    "torch": "it imports torch and uefl",
    "read": "the silo's images from the cache, the network",
    "work": "evaluation, training, evaluation",
    "back": "the node polls (0.5 s), the server polls (0.5 s), requests",
}
TIMED_APP = """
import json, os, time
from pathlib import Path
age = float(Path("/proc/uptime").read_text().split()[0])
age -= int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19]) / os.sysconf("SC_CLK_TCK")
imports = [time.time()]
process_start = imports[0] - age
from flwr.clientapp import ClientApp
from uefl.flower.client import make_client_app
from uefl.flower.wire import read_payload
imports.append(time.time())
client_app = make_client_app()

class TimedApp(ClientApp):
    def __call__(self, message, context):
        begin = time.time()
        reply = client_app(message, context)
        if message.metadata.message_type == "train":
            times = [message.metadata.created_at, process_start, *imports, begin, time.time()]
            record = {"round": read_payload(message)["round"], "silo": read_payload(message)["silo"], "times": times}
            with open(os.environ["UEFL_TIMES"], "a") as file:
                file.write(json.dumps(record | {"work": read_payload(reply)["seconds"]}) + "\\n")
        return reply

app = TimedApp()
"""


def measure_rounds(folder: Path) -> list[dict[str, float]]:
    """Measure the parts of the slowest silo's time in every round but the last, which has a second message."""
    port, times = find_free_port(), folder / "times.jsonl"
    os.environ["UEFL_TIMES"] = str(times)
    deployment = folder / "federation"
    write_deployment(deployment, list(SILO_SHIFTS), address="127.0.0.1", port=port)
    for i, (silo, shift) in enumerate(SILO_SHIFTS.items()):
        write_digits(deployment / "silos" / silo / "data", shift, i)
    write_run_settings(deployment, SETTINGS, method="fedavg")
    (deployment / "coordinator" / "app" / "uefl_app" / "client_app.py").write_text(TIMED_APP)
    with open_local_federation(deployment, port) as processes:
        start_processes(processes, list(SILO_SHIFTS), Console(quiet=True))
        output = "\n".join(processes.stream_run_output())
    records = list(deployment.glob("coordinator/runs/*/records.jsonl"))
    assert records, output
    seconds = {r["round"]: r["seconds"] for r in map(json.loads, records[0].read_text().splitlines())}
    messages = [json.loads(line) for line in times.read_text().splitlines()]
    return [
        split_seconds(max((m for m in messages if m["round"] == t), key=lambda m: m["times"][-1]), seconds[t])
        for t in range(1, ROUNDS)
    ]


def split_seconds(message: dict[str, Any], seconds: float) -> dict[str, float]:
    """Split the seconds of a round into the parts of its slowest message."""
    created, started, importing, imported, begin, end = message["times"]
    parts = {
        "wait": started - created,
        "flower": importing - started + begin - imported,
        "torch": imported - importing,
        "read": end - begin - message["work"],
        "work": message["work"],
        "back": seconds - (end - created),
    }
    return parts | {"round": seconds, "cost": seconds - message["work"]}


def main() -> None:
    """Measure and print the parts of a round."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        rounds = measure_rounds(Path(folder))
    print(f"three nodes, {os.cpu_count()} cores; load before {load:.1f}, after {os.getloadavg()[0]:.1f}")
    print(f"seconds of a round's slowest silo, median and range of {len(rounds)} rounds")
    for name, description in {**PARTS, "round": "all parts", "cost": "all parts but work"}.items():
        values = [r[name] for r in rounds]
        print(f"{name:>7} {median(values):5.1f}  {min(values):4.1f} to {max(values):4.1f}  {description}")


if __name__ == "__main__":
    main()
