"""Events of operation with real processes: a killed server app, full disks, expired certificates, other versions.

Each test takes a minute or two, so all are marked `real`.
"""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cryptography import x509
from privileged import fill_disk, mount_small_disk
from rich.console import Console
from test_flower_outages import run_in_background, wait_until
from typer.testing import CliRunner

import uefl
from uefl import __version__
from uefl.cli.main import app
from uefl.experiment.run_folder import RunFolder
from uefl.flower import certificates
from uefl.flower.client_audit import AUDIT_FILE
from uefl.flower.demo import start_processes, write_digits, write_run_settings
from uefl.flower.deployment import find_flower_app, write_deployment
from uefl.flower.fleet_connection import unregister_key
from uefl.flower.local_processes import LocalFederation, find_free_port, open_local_federation
from uefl.flower.run_result import read_result

pytestmark = pytest.mark.real
SILOS = ["north", "south", "west"]
SMALL_SETTINGS = "extra_rounds=0 iterations=1 width=2 hidden_size=8 mc_samples=2 local.batch_size=20 local.epochs=1"


def write_federation(folder: Path, port: int, silos=SILOS, *, rounds: int, **fields: object) -> Path:
    write_deployment(folder, silos, address="127.0.0.1", port=port)
    for i, silo in enumerate(silos):
        write_digits(folder / "silos" / silo / "data", "rotate:0", i, num_images=40)
    fields = {"method": "fedavg", "connect_timeout": 60.0, **fields}
    write_run_settings(folder, f"{SMALL_SETTINGS} rounds={rounds}", **fields)
    return folder


def invoke(*arguments: object):
    return CliRunner().invoke(app, ["deploy", *map(str, arguments)])


def read_all_records(folder: Path) -> list[dict]:
    files = sorted(folder.glob(f"coordinator/runs/*/{RunFolder.RECORDS_FILE}"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines() if line.endswith("}")]


def run_to_end(processes: LocalFederation) -> tuple[int, str]:
    """Run the script of the coordinator; return its exit code and its output."""
    output = "\n".join(processes.stream_run_output())
    return processes.processes["run"].wait(), output


def find_server_app(processes: LocalFederation) -> int:
    for pid in processes.list_process_ids():
        if b"flwr-serverapp" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise AssertionError("no server app runs")


def test_a_run_whose_server_app_is_killed_ends_with_one_line_and_resumes(tmp_path):
    port = find_free_port()
    folder = write_federation(tmp_path / "f", port, rounds=6)
    with open_local_federation(folder, port) as processes:
        start_processes(processes, SILOS, Console(quiet=True))
        thread = run_in_background(processes)
        wait_until(lambda: len(read_all_records(folder)) >= 2)
        os.kill(find_server_app(processes), signal.SIGKILL)
        killed = time.monotonic()
        thread.join()
        seconds, output = time.monotonic() - killed, processes.read_log("run")
        assert processes.processes["run"].wait() == 3, output
        assert output.strip().splitlines()[-1] == (
            "run stopped: the server app was killed; run the same command again to resume after the last complete round"
        )
        assert seconds < 120, output  # two missed heartbeats
        exit_code, output = run_to_end(processes)
    assert exit_code == 0, output
    assert "resumed after round" in output
    assert [record["round"] for record in read_all_records(folder)] == [1, 2, 3, 4, 5, 6]


def test_a_full_disk_at_the_coordinator_stops_a_run_that_resumes_when_space_is_freed(tmp_path):
    port = find_free_port()
    folder = write_federation(tmp_path / "f", port, rounds=6)
    with mount_small_disk(folder / "coordinator", "64m"), open_local_federation(folder, port) as processes:
        start_processes(processes, SILOS, Console(quiet=True))
        thread = run_in_background(processes)
        wait_until(lambda: len(read_all_records(folder)) >= 2)
        ballast = fill_disk(folder / "coordinator")
        thread.join()
        output, complete = processes.read_log("run"), read_all_records(folder)
        assert processes.processes["run"].wait() == 3, output
        line = output.strip().splitlines()[-1]
        assert line.startswith("run stopped: "), output
        assert "no space left on device" in line or "the SuperLink failed" in line
        assert "run the same command again" in line
        assert "Traceback" not in line
        ballast.unlink()
        exit_code, output = run_to_end(processes)
        records = read_all_records(folder)
    assert exit_code == 0, output
    assert [record["round"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert records[: len(complete) - 1] == complete[:-1], "a complete round was lost"


def test_a_silo_with_a_full_disk_is_rejected_by_name_and_takes_part_after_space_is_freed(tmp_path):
    port = find_free_port()
    folder = write_federation(tmp_path / "f", port, rounds=8, method="local-only")  # it writes a file in every round
    with mount_small_disk(folder / "silos/west", "4m") as disk, open_local_federation(folder, port) as processes:
        start_processes(processes, SILOS, Console(quiet=True))
        thread = run_in_background(processes)
        wait_until(lambda: len(read_all_records(folder)) >= 1)
        ballast = fill_disk(disk)
        wait_until(lambda: "rejected" in read_all_records(folder)[-1]["silos"]["west"])
        ballast.unlink()
        thread.join()
        exit_code, audit = processes.processes["run"].wait(), (disk / "state" / AUDIT_FILE).read_text()
    records = read_all_records(folder)
    reasons = [record["silos"]["west"].get("rejected", "") for record in records]
    assert exit_code == 0
    assert "OSError: no space left on device; the silo's log has the details" in reasons
    assert reasons[-1] == "", "the silo did not take part again"
    assert not any("rejected" in record["silos"]["north"] for record in records)
    entries = [json.loads(line) for line in audit.splitlines()]  # every line is complete
    assert sum(entry["task"] == "training" and entry["accepted"] for entry in entries) == reasons.count("")


def test_expired_certificates_are_named_at_both_ends_and_renewed(tmp_path, monkeypatch):
    port = find_free_port()
    with monkeypatch.context() as context:
        context.setattr(certificates, "VALID_DAYS", -1 / 48)  # half an hour ago
        folder = write_federation(tmp_path / "f", port, ["north", "south"], rounds=1)
    with open_local_federation(folder, port) as processes:
        processes.start_coordinator()
        assert "server.crt expired on " in processes.read_log("coordinator")
        remedy = "the coordinator's operator runs `uefl deploy renew`"
        for script in ("register.sh", "run.sh"):
            output = processes.run_script(folder / "coordinator" / script)
            assert len(output.strip().splitlines()) == 1, output
            assert "ca.crt expired on " in output
            assert remedy in output
        processes.start_node("north")
        address = f"coordinator 127.0.0.1:{port}"
        wait_until(lambda: f"{address}: its certificate has expired; its operator" in processes.read_log("north"), 60)
        assert "node.crt expired on " in processes.read_log("north")
        for name in ("coordinator", "north"):
            processes.kill_process(name)
        assert invoke("renew", folder).exit_code == 0
        start_processes(processes, ["north", "south"], Console(quiet=True))
        exit_code, output = run_to_end(processes)
    assert exit_code == 0, output
    assert x509.load_pem_x509_certificate((folder / "coordinator/server.crt").read_bytes())
    assert [sorted(record["silos"]) for record in read_all_records(folder)] == [["north", "south"]]


def copy_installation(folder: Path, version: str) -> Path:
    """Copy the package as another version of it; the folder goes into the PYTHONPATH of a process."""
    shutil.copytree(Path(uefl.__file__).parent, folder / "uefl", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(find_flower_app(), folder / "flower_app", ignore=shutil.ignore_patterns("__pycache__"))
    file = folder / "uefl/__init__.py"
    assert f'"{__version__}"' in file.read_text()
    file.write_text(file.read_text().replace(f'"{__version__}"', f'"{version}"'))
    return folder


def write_flower_metadata(folder: Path, version: str) -> Path:
    """Write the metadata of another version of Flower, as its installation would."""
    (folder / f"flwr-{version}.dist-info").mkdir(parents=True)
    (folder / f"flwr-{version}.dist-info/METADATA").write_text(
        f"Metadata-Version: 2.1\nName: flwr\nVersion: {version}\n"
    )
    return folder


def test_silos_with_other_versions_are_rejected_by_name_in_one_line(tmp_path):
    port = find_free_port()
    folder = write_federation(tmp_path / "f", port, rounds=1, connect_timeout=20.0, quorum=1)
    other = copy_installation(tmp_path / "other", "9.9.9")
    flower = write_flower_metadata(tmp_path / "flower", "1.42.0")
    with open_local_federation(folder, port) as processes:
        start_processes(processes, ["north"], Console(quiet=True))
        processes.start_node("south", PYTHONPATH=str(other))
        processes.start_node("west", PYTHONPATH=str(flower))
        assert processes.processes["west"].wait(120) == 2
        line = "uefl: flwr 1.42.0 is installed, but uefl needs 1.41; install its extra `flower`"
        assert processes.read_log("west").strip() == line
        wait_until(lambda: "connected to" in processes.read_log("south"))
        exit_code, output = run_to_end(processes)
    assert exit_code == 0, output
    lines = [line for line in output.splitlines() if "silo south runs uefl 9.9.9" in line]
    assert len(lines) == 1, output
    assert f"but the coordinator runs uefl {__version__}" in lines[0]
    assert "install the same version of uefl at both" in lines[0]
    assert [sorted(record["silos"]) for record in read_all_records(folder)] == [["north"]]


PUBLIC_FILES = {"ca.crt", "server.crt", "node.crt", "federation.toml", "keys", "app", "data"}


def list_open_files(folder: Path) -> list[str]:
    """Return what another user could read inside the folder of a coordinator or a silo, besides public files."""
    found = []
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if Path(root) != folder or name not in PUBLIC_FILES]
        for name in (*folders, *files):
            path = Path(root, name)
            is_public = Path(root) == folder and (name in PUBLIC_FILES or path.suffix in (".sh", ".service"))
            if not is_public and stat.S_IMODE(path.stat().st_mode) & 0o077:
                found.append(f"{path.relative_to(folder)} {stat.S_IMODE(path.stat().st_mode):o}")
    return found


def test_silos_join_and_leave_between_runs_and_all_data_and_keys_stay_private(tmp_path):
    port, silos = find_free_port(), ["north", "south"]
    old_mask = os.umask(0o022)
    try:
        folder = write_federation(tmp_path / "f", port, silos, rounds=1, method="local-only")
        with open_local_federation(folder, port) as processes:
            start_processes(processes, silos, Console(quiet=True))
            assert run_to_end(processes)[0] == 0
            assert invoke("add-silo", folder, "east").exit_code == 0
            write_digits(folder / "silos/east/data", "rotate:0", 2, num_images=40)
            processes.register_keys()
            processes.start_node("east")
            south_key = certificates.load_public_key(folder / "coordinator/keys/south.pub")
            command = [Path(sys.executable).with_name("uefl"), "deploy", "remove-silo", folder, "south"]
            removed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            wait_until(lambda: "the key of the certificate is not registered" in processes.read_log("south"), 60)
            is_still_listed = unregister_key(port + 1, folder / "coordinator/ca.crt", south_key)
            write_run_settings(folder, f"{SMALL_SETTINGS} rounds=1", federation_name="second")
            exit_code, output = run_to_end(processes)
    finally:
        os.umask(old_mask)
    assert exit_code == 0, output
    assert "south: its key is deleted at the SuperLink too" in removed
    assert not is_still_listed
    participants = [sorted(record["silos"]) for record in read_all_records(folder)]
    assert sorted(participants) == [["east", "north"], ["north", "south"]]
    assert (folder / "coordinator/superlink.db").exists()
    assert list((folder / "silos/north/state").glob("*/*/round-*")), "no client state was written"
    for part in ("coordinator", "silos/north", "silos/east"):
        assert stat.S_IMODE((folder / part).stat().st_mode) == 0o700
        assert list_open_files(folder / part) == []
    assert read_result(folder / "coordinator/runs").status == "finished"
