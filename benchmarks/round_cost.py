"""Seconds of a deployed round besides its work: two nodes over TLS, our node loop and Flower's own node program.

The work of the slowest silo is subtracted from every round. Both contenders use the same coordinator; Flower's nodes
connect to its SuperLink directly, because the guard serves only what our node loop requests.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from benchmarks.harness import OURS, Measurement, Options
from uefl.flower.demo import start_processes, write_digits, write_run_settings
from uefl.flower.deployment import write_deployment
from uefl.flower.deployment_templates import make_script
from uefl.flower.local_processes import find_free_port, open_local_federation

SILOS = ("north", "south")
ROUNDS, TINY_ROUNDS = 8, 2
SETTINGS = "extra_rounds=0 iterations=1 width=2 hidden_size=8 mc_samples=2 local.batch_size=20 local.epochs=1"
FLOWER_NODE = "flower-supernode"
FLOWER_COMMAND = """exec flower-supernode --superlink 127.0.0.1:{superlink_port} --root-certificates ca.crt \\
    --auth-supernode-private-key key --port {node_port} \\
    --node-config "silo=\\"{silo}\\" data_path=\\"$here/data\\" state_path=\\"$here/state\\""
"""


def run(options: Options) -> Iterator[Measurement]:
    """Measure the rounds after the first one, which imports torch and reads the images."""
    for contender in (OURS, FLOWER_NODE):
        with tempfile.TemporaryDirectory() as folder:
            seconds = measure_rounds(Path(folder) / "federation", contender, TINY_ROUNDS if options.tiny else ROUNDS)
        yield Measurement(contender, "a round without its work, 2 nodes", "s", seconds)


def measure_rounds(folder: Path, contender: str, num_rounds: int) -> list[float]:
    """Run a federation; return the seconds of every further round besides the work of its slowest silo."""
    port = find_free_port()
    write_deployment(folder, SILOS, address="127.0.0.1", port=port)
    for i, silo in enumerate(SILOS):
        silo_folder = folder / "silos" / silo
        write_digits(silo_folder / "data", "rotate:0", i, num_images=40)
        if contender == FLOWER_NODE:
            command = FLOWER_COMMAND.format(superlink_port=port + 1, node_port=find_free_port(), silo=silo)
            (silo_folder / "node.sh").write_text(make_script(command))
    write_run_settings(folder, f"{SETTINGS} rounds={num_rounds}", method="fedavg")
    with open_local_federation(folder, port) as processes:
        start_processes(processes, SILOS, Console(quiet=True))
        output = list(processes.stream_run_output())
    files = list(folder.glob("coordinator/runs/*/records.jsonl"))
    records = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    if len(records) < num_rounds:
        raise RuntimeError("the run failed:\n" + "\n".join(output[-20:]))
    return [r["seconds"] - max(silo["seconds"] for silo in r["silos"].values()) for r in records[1:]]
