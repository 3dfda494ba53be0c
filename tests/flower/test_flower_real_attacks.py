"""Attacks of registered silos on a deployment with real processes over TLS: a false name and a silent silo."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from uefl.flower.demo import start_processes, write_digits, write_run_settings
from uefl.flower.deployment import write_deployment
from uefl.flower.local_processes import find_free_port, open_local_federation

pytestmark = pytest.mark.real  # two minutes
SILOS = ["north", "south", "west"]
SMALL_SETTINGS = (
    "rounds=3 extra_rounds=0 iterations=1 width=2 hidden_size=8 mc_samples=2 local.batch_size=20 local.epochs=1 "
    "data.image_size=14"
)


def stop_when_registered(processes, silo: str) -> None:
    """Freeze a silo's processes as soon as it has answered its registration: it stays connected and never replies."""
    end = time.monotonic() + 120
    while "query: answered" not in processes.read_log(silo) and time.monotonic() < end:
        time.sleep(0.02)
    root = processes.processes[silo].pid
    for pid in [root, *processes._list_descendants(root)]:
        os.kill(pid, signal.SIGSTOP)


def test_a_false_name_is_rejected_and_a_silent_silo_costs_only_the_grace(tmp_path: Path) -> None:
    """A9 and A11: west presents itself as north, and south is silent after its registration."""
    port = find_free_port()
    folder = write_deployment(tmp_path / "f", SILOS, address="127.0.0.1", port=port)
    for i, silo in enumerate(SILOS):
        write_digits(folder / "silos" / silo / "data", "rotate:0", i, num_images=40)
    script = folder / "silos" / "west" / "node.sh"
    assert "--silo west" in script.read_text()
    script.write_text(script.read_text().replace("--silo west", "--silo north"))
    write_run_settings(folder, SMALL_SETTINGS, method="fedavg", quorum=1, grace=2.0, connect_timeout=60.0)
    with open_local_federation(folder, port) as processes:
        start_processes(processes, SILOS, Console(quiet=True))
        thread = threading.Thread(target=stop_when_registered, args=(processes, "south"))
        thread.start()
        output = "\n".join(processes.stream_run_output())
        thread.join()
    assert "the node that is registered as silo west presents itself as silo north" in output
    (path,) = folder.glob("coordinator/runs/*/records.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["round"] for record in records] == [1, 2, 3], output
    assert [record["silos"]["south"].get("rejected", "") for record in records][1:] == [
        "missing: no reply within 2 s after the quorum was met"
    ] * 2
    assert all("rejected" not in record["silos"]["north"] for record in records)
    assert json.loads((folder / "coordinator" / "runs" / "result.json").read_text())["exit_code"] == 0
