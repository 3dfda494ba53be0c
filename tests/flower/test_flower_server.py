"""A run of the server app: it stops below the quorum, resumes with the same silos, and finds a finished run."""

import os
import subprocess
import tomllib
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict
from small_federation import SILOS, make_experiment, make_grid

from uefl.core.errors import InputError, ResumableError
from uefl.experiment.records import read_records
from uefl.experiment.run_folder import RunFolder
from uefl.flower import run_result
from uefl.flower.data_format import DECIDED_BY_SILOS
from uefl.flower.deployment import find_flower_app
from uefl.flower.run_result import KILLED_MESSAGE, RunResult, read_result, record_result, write_result
from uefl.flower.server import RegistrationStore, make_server_app, serve
from uefl.flower.wire import read_payload


def make_run_config(**changes):
    project = tomllib.loads((find_flower_app() / "pyproject.toml").read_text())
    return {**project["tool"]["flwr"]["app"]["config"], "num_silos": 3, "retries": 0, **changes}


def test_a_stopped_run_resumes_with_its_silos_and_is_found_when_finished(tmp_path):
    experiment, grid, events = make_experiment("fedavg", rounds=2, iterations=1), make_grid(tmp_path / "state"), []
    run_config = make_run_config(out=str(tmp_path / "runs"), connect_timeout=1.0, reply_timeout=0.2)
    grid.tamper = lambda message, reply: None if read_payload(message).get("round") == 2 else reply
    with pytest.raises(ResumableError, match="round 2: 0 of 3 silos sent a valid reply"):
        serve(grid, experiment, run_config, on_event=events.append)
    (silos_file,) = (tmp_path / "runs").glob("silos-*.json")
    known_silos, data_format = RegistrationStore(silos_file).read(DECIDED_BY_SILOS)
    assert (data_format.image_shape, data_format.classes) == ((1, 14, 14), tuple("0123456789"))
    assert [(info.name, info.image_shape) for info in known_silos] == [(name, (1, 14, 14)) for name in SILOS]

    grid.tamper = lambda _message, reply: reply
    folder = serve(grid, experiment, run_config, on_event=events.append)
    assert [event["round"] for event in events if event["kind"] == "start"] == [0, 1]
    assert [record["round"] for record in read_records(RunFolder(folder).records_path)] == [1, 2]
    assert RegistrationStore(silos_file).read(DECIDED_BY_SILOS) == (known_silos, data_format)

    assert serve(grid, experiment, run_config, on_event=events.append) == folder
    assert events[-1]["kind"] == "finished"


def run_server_app(grid, run_config):
    """Run the server app as Flower does."""
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=run_config)
    make_server_app()(grid, context)


SMALL_SETTINGS = (
    "data.num_silos=1,1,1 train_per_silo=24 test_per_silo=12 image_size=14 width=2 hidden_size=8 mc_samples=2 "
    "batch_size=12 epochs=1 rounds=1 iterations=1"
)


def test_the_result_of_a_run_has_its_exit_code(tmp_path):
    root, grid = tmp_path / "runs", make_grid(tmp_path / "state")
    fields = {"out": str(root), "method": "fedavg", "settings": SMALL_SETTINGS, "connect_timeout": 1.0}
    run_config = make_run_config(**fields, reply_timeout=0.2)
    assert read_result(root).exit_code == 1, "no server app was started"
    grid.tamper = lambda message, reply: None if read_payload(message).get("round") else reply
    with pytest.raises(ResumableError):
        run_server_app(grid, run_config)
    assert read_result(root)[:2] == ("stopped", 3)
    assert "0 of 3 silos sent a valid reply" in read_result(root).message
    with pytest.raises(InputError):
        run_server_app(grid, {**run_config, "method": "unknown"})
    assert read_result(root)[:2] == ("failed", 2)
    grid.tamper = lambda _message, reply: reply
    run_server_app(grid, run_config)
    assert read_result(root)[:2] == ("finished", 0)
    assert RunFolder(Path(read_result(root).folder)).is_finished


def test_a_server_app_that_is_killed_leaves_a_result_that_is_no_success(tmp_path):
    def exit_early():
        with record_result(tmp_path):
            assert read_result(tmp_path)[:2] == ("running", 3)
            raise SystemExit

    with pytest.raises(SystemExit):
        exit_early()
    assert read_result(tmp_path)[:2] == ("stopped", 3)


def test_a_full_disk_stops_a_run_with_one_line(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("uefl.experiment.run.save_checkpoint", fail)
    run_config = make_run_config(out=str(tmp_path / "runs"), connect_timeout=1.0)
    with pytest.raises(ResumableError, match=r"cannot write to .*runs: no space left on device; run the same command"):
        serve(
            make_grid(tmp_path / "state"),
            make_experiment("fedavg", rounds=1, iterations=1),
            run_config,
            on_event=lambda _: None,
        )


def test_a_result_is_written_although_the_disk_is_full(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    def run():
        with record_result(tmp_path):
            monkeypatch.setattr(run_result, "write_text", fail)
            fail()

    with pytest.raises(ResumableError, match="no space left on device"):
        run()
    assert read_result(tmp_path)[:2] == ("stopped", 3)
    assert "no space left on device; run the same command again" in read_result(tmp_path).message


def test_a_result_of_a_server_app_that_has_ended_without_one_is_no_longer_running(tmp_path):
    write_result(tmp_path, RunResult("running", 3, pid=os.getpid()))
    assert read_result(tmp_path).status == "running"
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, but its parent has not noticed
    for _ in range(2):
        write_result(tmp_path, RunResult("running", 3, pid=process.pid))
        assert read_result(tmp_path)[:3] == ("stopped", 3, KILLED_MESSAGE)
        process.wait()


def test_names_stay_bound_to_their_keys_when_the_coordinator_starts_again(tmp_path):
    experiment, grid, events = make_experiment("fedavg", rounds=2, iterations=1), make_grid(tmp_path / "state"), []
    grid.registrations = {90 - i: (name, f"key of {name}".encode()) for i, name in enumerate(SILOS)}
    run_config = make_run_config(out=str(tmp_path / "runs"), connect_timeout=1.0, reply_timeout=0.2)
    grid.tamper = lambda message, reply: None if read_payload(message).get("round") == 2 else reply
    with pytest.raises(ResumableError):
        serve(grid, experiment, run_config, on_event=events.append)
    grid.tamper = lambda _message, reply: reply
    grid.registrations[89] = ("D2-1", b"another key")  # the operator's list of keys was changed
    folder = serve(grid, experiment, run_config, on_event=events.append)
    assert any("this silo is bound to key" in event.get("activity", "") for event in events)
    assert "rejected" in read_records(RunFolder(folder).records_path)[-1]["silos"]["D2-1"]


def test_another_data_format_than_that_of_the_started_run_is_an_error(tmp_path):
    experiment, grid = make_experiment("fedavg", rounds=1, iterations=1), make_grid(tmp_path / "state")
    run_config = make_run_config(out=str(tmp_path / "runs"), connect_timeout=1.0)
    serve(grid, experiment, run_config, on_event=lambda _: None)
    with pytest.raises(InputError, match="this run was started with another value of classes"):
        serve(grid, experiment, {**run_config, "classes": "cat,dog"}, on_event=lambda _: None)
