"""A run of the server app: it stops below the quorum, resumes with the same silos, and finds a finished run."""

import tomllib

import pytest
from small_federation import SILOS, make_experiment, make_grid

from uefl.core.errors import ResumableError
from uefl.experiment.records import read_records
from uefl.experiment.run_folder import RunFolder
from uefl.flower.deployment import find_flower_app
from uefl.flower.server import load_known_silos, serve
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
    known_silos = load_known_silos(silos_file)
    assert [(info.name, info.image_shape) for info in known_silos] == [(name, (1, 14, 14)) for name in SILOS]

    grid.tamper = lambda _message, reply: reply
    folder = serve(grid, experiment, run_config, on_event=events.append)
    assert [event["round"] for event in events if event["kind"] == "start"] == [0, 1]
    assert [record["round"] for record in read_records(RunFolder(folder).records_path)] == [1, 2]
    assert load_known_silos(silos_file) == known_silos

    assert serve(grid, experiment, run_config, on_event=events.append) == folder
    assert events[-1]["kind"] == "finished"
