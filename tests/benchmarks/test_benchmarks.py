"""Every benchmark runs at a tiny size, and its measurements become records and a table. Speed is not asserted."""

import importlib
import json

import pytest

from benchmarks import processes, ten_thousand_clients
from benchmarks.__main__ import BENCHMARKS
from benchmarks.frameworks import CONTENDERS
from benchmarks.harness import Measurement, Options, append_records, make_table
from benchmarks.peers.clients_file import write_clients

# These start processes; the last one two federations on Flower, which takes a minute.
IN_PROCESS = set(BENCHMARKS) - {"frameworks", "client-scaling", "processes", "ten-thousand-clients", "round-cost"}


@pytest.mark.parametrize("name", [*sorted(IN_PROCESS), pytest.param("round-cost", marks=pytest.mark.real)])
def test_it_runs(name):
    measurements = list(importlib.import_module(BENCHMARKS[name]).run(Options(repeats=1, tiny=True)))
    assert measurements
    assert all(value >= 0 for m in measurements for value in m.values)


@pytest.mark.parametrize("contender", [*CONTENDERS.values(), *ten_thousand_clients.CONTENDERS.values()])
def test_the_program_of_every_framework_exists(contender):
    assert importlib.util.find_spec(f"benchmarks.peers.{contender.module}")


def test_our_run_of_many_clients_is_measured(tmp_path):
    pytest.importorskip("psutil")
    file = tmp_path / "clients.safetensors"
    write_clients(file, 110, "mnist5k")
    name, contender = next(iter(ten_thousand_clients.CONTENDERS.items()))
    outcome = ten_thousand_clients.measure_contender(name, contender, file, 2)
    assert min(outcome[:3]) > 0
    assert 0 < float(outcome.accuracy) < 1


def test_one_process_and_several_train_the_same_model(monkeypatch):
    """The benchmark itself raises an error if their accuracies differ."""
    monkeypatch.setattr(processes, "find_spec", lambda _: None)  # without peers
    monkeypatch.setattr(processes, "TINY_FEDERATIONS", {"nine silos": processes.TINY_FEDERATIONS["nine silos"]})
    measurements = list(processes.run(Options(repeats=1, tiny=True, workers=1)))
    assert [m.contender for m in measurements] == ["uefl", "uefl, one process", "uefl, no exchange"]
    assert all(m.values[0] > 0 for m in measurements)


def test_a_record_has_all_values_and_their_environment(tmp_path):
    path = tmp_path / "records.jsonl"
    append_records("speed", [Measurement("uefl", "a round", "CPU s", [3.0, 1.0, 2.0])], Options(), path)
    (record,) = map(json.loads, path.read_text().splitlines())
    assert (record["value"], record["repeats"], record["contender"]) == (2.0, [3.0, 1.0, 2.0], "uefl")
    assert record["quantity"] == "a round"
    assert {"threads", "device", "torch", "load", "date", "command"} <= set(record)


def test_the_table_compares_others_with_uefl():
    table = make_table(
        "speed", [Measurement("uefl", "a round", "s", [2.0]), Measurement("peer", "a round", "s", [5.0])]
    )
    assert list(table.columns[5].cells) == ["", "2.5x"]
