"""Faults with real processes: minutes each, so marked `real`."""

import json
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from small_federation import run_rounds

from uefl.engines.serial import SerialEngine
from uefl.experiment.run_folder import RunFolder
from uefl.experiment.silo_models import SiloModels
from uefl.flower.demo import start_processes, write_digits, write_run_settings
from uefl.flower.deployment import write_deployment
from uefl.flower.local_processes import LocalFederation, find_free_port, open_local_federation
from uefl.flower.node_data import load_own_folder
from uefl.flower.server import parse_run_config

pytestmark = pytest.mark.real
SILOS = ["north", "south", "west"]
SMALL_SETTINGS = (
    "width=4 hidden_size=16 mc_samples=2 local.batch_size=20 local.epochs=1 num_codewords=8 warmup_rounds=1 gamma=0 "
    "min_standard_errors=0 extra_rounds=1"
)


def write_federation(folder: Path, settings: str, port: int, **fields: object) -> Path:
    write_deployment(folder, SILOS, address="127.0.0.1", port=port)
    for i, silo in enumerate(SILOS):
        write_digits(folder / "silos" / silo / "data", f"rotate:{60 * i}", i, num_images=60)
    write_run_settings(folder, f"{SMALL_SETTINGS} {settings}", **fields)
    return folder


def read_records(folder: Path) -> list[dict]:
    (path,) = folder.glob(f"coordinator/runs/*/{RunFolder.RECORDS_FILE}")
    return [json.loads(line) for line in path.read_text().splitlines()]


def run_in_background(processes: LocalFederation) -> threading.Thread:
    thread = threading.Thread(target=lambda: list(processes.stream_run_output()))
    thread.start()
    return thread


def wait_until(condition, seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition was not met in time"
        time.sleep(0.2)


def test_a_killed_coordinator_resumes_to_the_same_result(tmp_path):
    port = find_free_port()
    folder = write_federation(tmp_path / "f", "rounds=2 iterations=2 precision=float64", port)
    with open_local_federation(folder, port) as processes:
        start_processes(processes, SILOS, Console(quiet=True))
        thread = run_in_background(processes)
        wait_until(lambda: list(folder.glob(f"coordinator/runs/*/{RunFolder.CHECKPOINT_FILE}")))
        processes.kill_process("coordinator")
        processes.kill_process("run")
        thread.join()
        processes.start_coordinator()
        output = "\n".join(processes.stream_run_output())
    assert "resumed after round" in output
    assert [record["round"] for record in read_records(folder)] == [1, 2, 3]
    (model,) = folder.glob(f"coordinator/runs/*/{RunFolder.MODEL_FILE}")
    models = SiloModels.read(model)
    settings = f"{SMALL_SETTINGS} rounds=2 iterations=2 precision=float64"
    run_config = {"method": "uefl", "data": "folder", "seed": 0, "preset": "default", "settings": settings}
    experiment = parse_run_config(run_config)["uefl"]
    silos = [load_own_folder(experiment, str(folder / "silos" / name / "data"), name).silo for name in SILOS]
    net = experiment.build_network(models.description.input_format.shape, len(models.description.class_names))
    server, _ = run_rounds(SerialEngine(silos, net, seed=0, dtype=torch.float64), experiment)
    for name, tensor in server.model_state.items():
        assert torch.allclose(models.model_state[name], tensor, rtol=0, atol=1e-9), name


def test_a_killed_node_is_missing_and_rejoins(tmp_path):
    port = find_free_port()
    folder = write_federation(tmp_path / "f", "rounds=90 iterations=1", port, method="vq-fedavg")
    with open_local_federation(folder, port) as processes:
        start_processes(processes, SILOS, Console(quiet=True))
        thread = run_in_background(processes)
        wait_until(lambda: list(folder.glob(f"coordinator/runs/*/{RunFolder.CHECKPOINT_FILE}")))
        processes.kill_process("west")
        processes.start_node("west")  # as systemd; the coordinator admits a killed node again after a minute
        thread.join()
    reasons = [record["silos"]["west"].get("rejected", "") for record in read_records(folder)]
    assert any("missing" in reason for reason in reasons)
    assert reasons[-1] == "", "the silo did not rejoin"
    assert all("rejected" not in record["silos"]["north"] for record in read_records(folder))


def test_a_silo_with_an_empty_folder_reports_why_and_the_others_continue(tmp_path):
    port = find_free_port()
    folder = write_federation(tmp_path / "f", "rounds=2 iterations=1", port, method="vq-fedavg", connect_timeout=60.0)
    shutil.rmtree(folder / "silos/west/data")
    (folder / "silos/west/data").mkdir()
    with open_local_federation(folder, port) as processes:
        start_processes(processes, SILOS, Console(quiet=True))
        output = "\n".join(processes.stream_run_output())
    assert "silo west cannot take part" in output
    assert [sorted(record["silos"]) for record in read_records(folder)] == [["north", "south"]] * 2
