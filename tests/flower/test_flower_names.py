"""A silo runs only what is installed there: names are looked up, and unknown ones are refused at the silo."""

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest
from federating import experiment, in_process
from flwr.app import Message, MessageType

from uefl import plugins
from uefl.algorithms import ALGORITHMS, FedAvg
from uefl.experiment import Experiment
from uefl.flower.wire import body, packed


def told(grid, config, kind=MessageType.QUERY, **order):
    message = Message(packed({"experiment": config, **order}), 90, kind, ttl=60)
    (reply,) = grid.send_and_receive([message])
    return body(reply)


def changed(**changes):
    """An experiment's plain form with something strange in it: `data__name` reaches inside."""
    config = experiment("fedavg").config()
    for path, value in changes.items():
        *way, last = path.split("__")
        at = config
        for step in way:
            at = at[step]
        at[last] = value
    return config


STRANGE = {
    "method": ({"name": "os.system"}, "unknown method 'os.system'"),
    "encoder": ({"model__encoder": "torch.hub.load"}, "unknown encoder 'torch.hub.load'"),
    "reader": ({"data__name": "../../etc"}, "unknown data set '../../etc'"),
    "field": ({"method__evil": 1}, "unknown field of FedAvg 'evil'"),
    "type": ({"method__rounds": "many"}, "rounds='many' is not of its type"),
    "table": ({"method": 3}, "must be a table"),
    "precision": ({"precision": "float8"}, "precision='float8'"),
}


@pytest.mark.parametrize("what", STRANGE)
def test_an_unknown_name_is_refused_at_the_silo(what, tmp_path):
    changes, why = STRANGE[what]
    order = {"silo": "D1-1", "round": 1, "rate": 0.1, "accepted": 0, "run": "ab", "half": False, "measure": False}
    order |= {"shape": [1, 14, 14], "classes": list("0123456789")}
    reply = told(in_process(tmp_path), changed(**changes), MessageType.TRAIN, **order)
    assert why in reply["refused"]


@pytest.mark.parametrize("task", ["nothing", "__init__", "local", "_find"])
def test_an_unknown_task_is_refused_at_the_silo(task, tmp_path):
    reply = told(in_process(tmp_path), changed(), MessageType.EVALUATE, task=task, on=["test"])
    assert f"no task '{task}'" in reply["refused"]


@pytest.mark.parametrize("run", ["../../somewhere", "", "AB/"])
def test_a_run_id_cannot_leave_the_state_folder(run, tmp_path):
    order = {"silo": "D1-1", "round": 1, "rate": 0.1, "accepted": 0, "half": False, "measure": False}
    order |= {"shape": [1, 14, 14], "classes": list("0123456789"), "run": run}
    reply = told(in_process(tmp_path), changed(), MessageType.TRAIN, **order)
    assert "run id" in reply["refused"]


def test_a_message_without_a_body_is_refused(tmp_path):
    grid = in_process(tmp_path)
    content = packed({})
    content["uefl"]["json"] = "[1, 2"
    (reply,) = grid.send_and_receive([Message(content, 90, MessageType.QUERY, ttl=60)])
    assert "readable body" in body(reply)["refused"]


def test_an_experiment_survives_the_wire():
    for name in ("uefl", "fedavg", "alone"):
        what = experiment(name)
        assert Experiment.of(what.config()) == what


def test_a_method_of_an_installed_package_is_found_by_its_entry_point(monkeypatch):
    mine = EntryPoint("mine", "uefl.algorithms.bounds:Alone", "uefl.methods")
    monkeypatch.setattr(
        plugins, "entry_points", lambda group, name: [mine] if (mine.group, mine.name) == (group, name) else []
    )
    known = dict(ALGORITHMS)
    assert plugins.has(known, "uefl.methods", "mine")
    assert issubclass(known["mine"], FedAvg)
    assert not plugins.has(known, "uefl.methods", "other")


def test_uefl_itself_never_imports_flower():
    code = "import sys, uefl, uefl.cli, uefl.run; sys.exit(len({'flwr', 'ray'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("module", ["uefl.engines.flower", "uefl.flower.simulation", "uefl.flower.client"])
def test_nothing_calls_home(module):
    code = f"import sys, {module}; from flwr.supercore import telemetry; sys.exit(telemetry.FLWR_TELEMETRY_ENABLED)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stderr.strip() == "0"
