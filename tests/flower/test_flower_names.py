"""A silo runs only installed code: names are looked up there, and unknown names are rejected."""

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest
from flwr.app import Message, MessageType
from small_federation import make_experiment, make_grid

from uefl.algorithms.fedavg import FedAvg
from uefl.core import registry
from uefl.experiment.experiment import Experiment
from uefl.flower.wire import pack_content, read_payload

TRAINING = {
    "silo": "D1-1",
    "round": 1,
    "lr": 0.1,
    "accepted_round": 0,
    "run_id": "ab",
    "image_shape": [1, 14, 14],
    "classes": list("0123456789"),
    "half_precision": False,
    "evaluate": False,
}


def query_node(grid, config, message_type=MessageType.QUERY, **payload):
    message = Message(pack_content({"experiment": config, **payload}), 90, message_type, ttl=60)
    (reply,) = grid.send_and_receive([message])
    return read_payload(reply)


def make_changed_config(**changes):
    """Return an experiment's configuration with changed values; `data__name` reaches the inner field."""
    config = make_experiment("fedavg").to_config()
    for path, value in changes.items():
        *parents, last = path.split("__")
        table = config
        for parent in parents:
            table = table[parent]
        table[last] = value
    return config


INVALID_CONFIGS = {
    "method": ({"name": "os.system"}, "unknown method 'os.system'"),
    "encoder": ({"model__encoder": "torch.hub.load"}, "unknown encoder 'torch.hub.load'"),
    "reader": ({"data__name": "../../etc"}, "unknown data set '../../etc'"),
    "field": ({"method__evil": 1}, "unknown field of FedAvg 'evil'"),
    "type": ({"method__rounds": "many"}, "rounds='many' is not of type int"),
    "table": ({"method": 3}, "must be a table"),
    "precision": ({"precision": "float8"}, "precision=float8; allowed: auto, float32"),
}


@pytest.mark.parametrize("kind", INVALID_CONFIGS)
def test_an_unknown_name_is_rejected_at_the_silo(kind, tmp_path):
    changes, reason = INVALID_CONFIGS[kind]
    reply = query_node(make_grid(tmp_path), make_changed_config(**changes), MessageType.TRAIN, **TRAINING)
    assert reason in reply["rejected"]


@pytest.mark.parametrize("task", ["nothing", "__init__", "local", "make_updates"])
def test_an_unknown_task_is_rejected_at_the_silo(task, tmp_path):
    payload = {"task": task, "splits": ["test"]}
    reply = query_node(make_grid(tmp_path), make_changed_config(), MessageType.EVALUATE, **payload)
    assert f"unknown task of fedavg '{task}'" in reply["rejected"]


@pytest.mark.parametrize("run_id", ["../../somewhere", "", "AB/"])
def test_a_run_id_cannot_leave_the_state_folder(run_id, tmp_path):
    payload = {**TRAINING, "run_id": run_id}
    reply = query_node(make_grid(tmp_path), make_changed_config(), MessageType.TRAIN, **payload)
    assert "run id" in reply["rejected"]


def test_a_message_without_a_payload_is_rejected(tmp_path):
    grid = make_grid(tmp_path)
    content = pack_content({})
    content["uefl"]["json"] = "[1, 2"
    (reply,) = grid.send_and_receive([Message(content, 90, MessageType.QUERY, ttl=60)])
    assert "no readable payload" in read_payload(reply)["rejected"]


def test_an_experiment_survives_the_wire():
    for name in ("uefl", "fedavg", "local-only"):
        experiment = make_experiment(name)
        assert Experiment.from_config(experiment.to_config()) == experiment


def test_a_method_of_an_installed_package_is_found_by_its_entry_point(monkeypatch):
    plugin = EntryPoint("my-method", "uefl.algorithms.references:LocalOnly", "uefl.methods")
    monkeypatch.setattr(registry, "entry_points", lambda group: [plugin] if group == plugin.group else [])
    methods = registry.Registry("method", {}, group="uefl.methods")
    assert issubclass(methods["my-method"], FedAvg)
    assert "another-method" not in methods


def test_uefl_itself_never_imports_flower():
    code = "import sys, uefl, uefl.cli.main, uefl.experiment.run; sys.exit(len({'flwr', 'ray'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("module", ["uefl.flower.engine", "uefl.flower.simulation", "uefl.flower.client"])
def test_flower_sends_no_telemetry(module):
    code = f"import sys, {module}; from flwr.supercore import telemetry; sys.exit(telemetry.FLWR_TELEMETRY_ENABLED)"
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert completed.stderr.strip() == "0"
