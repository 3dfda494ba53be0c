"""Every benchmark runs at a tiny size, and its measurements become records and a table. Speed is not asserted."""

import importlib
import json
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import uefl
from benchmarks import __main__ as command_line
from benchmarks import processes, ten_thousand_clients
from benchmarks.__main__ import BENCHMARKS
from benchmarks.frameworks import AGREEMENT, CONTENDERS
from benchmarks.harness import Measurement, Options, append_records, make_table, read_commit
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
    write_clients(file, 110, "mnist5k", 2)
    name, contender = next(iter(ten_thousand_clients.CONTENDERS.items()))
    outcome = ten_thousand_clients.measure_contender(name, contender, file, 2, "float32")
    assert min(outcome[:5]) > 0
    assert outcome.first_memory != outcome.last_memory, "each is read in its own round"
    assert 0 < float(outcome.accuracy) < 1


def test_what_runs_with_many_clients_report_becomes_measurements(monkeypatch):
    def measure(name, *_):
        memories = (300.0, 301.0) if name == "uefl" else (float("nan"), float("nan"))
        return ten_thousand_clients.Outcome(
            1.0, 2.0, 400.0, *memories, "0.9", [torch.tensor([2.0 if name == "uefl" else 2.5])]
        )

    monkeypatch.setattr(ten_thousand_clients, "psutil", "installed")
    monkeypatch.setattr(ten_thousand_clients, "write_clients", lambda *_: None)
    monkeypatch.setattr(ten_thousand_clients, "find_spec", lambda package: package in ("uefl", "pfl"))
    monkeypatch.setattr(ten_thousand_clients, "measure_contender", measure)
    values = {(m.contender, m.quantity): m.values for m in ten_thousand_clients.run(Options(repeats=1, tiny=True))}
    assert values["uefl", "120 clients: resident memory amid the first round"] == [300.0]
    assert values["uefl", "120 clients: resident memory amid the last round"] == [301.0]
    assert values["pfl", "120 clients: peak memory"] == [400.0]
    assert not any("resident" in quantity for contender, quantity in values if contender == "pfl")
    for precision in ("float32", "float64"):
        assert values["pfl", f"120 clients: {AGREEMENT}, {precision}"] == [0.25], "of its weights from ours"


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
    assert record["uefl"] == uefl.__version__
    assert record["commit"] == read_commit()


def test_the_command_records_the_load_before_the_run_too(tmp_path, monkeypatch):
    path = tmp_path / "records.jsonl"
    fake = SimpleNamespace(run=lambda _: [Measurement("uefl", "a round", "s", [1.0])])
    monkeypatch.setitem(sys.modules, "fake_benchmark", fake)
    monkeypatch.setitem(BENCHMARKS, "kmeans", "fake_benchmark")
    monkeypatch.setattr(command_line, "read_load", lambda: [0.1, 0.2, 0.3])
    command_line.main("kmeans", repeats=1, data="mnist5k", device="cpu", workers=0, tiny=True, kernels=None, out=path)
    record = json.loads(path.read_text())
    assert record["load_before"] == [0.1, 0.2, 0.3]
    assert len(record["load"]) == 3


@pytest.mark.skipif(not shutil.which("git"), reason="git is not installed")
def test_a_record_names_the_commit_and_whether_the_code_differs_from_it(tmp_path):
    def run_git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    code, record = tmp_path / "uefl" / "code.py", tmp_path / "benchmarks" / "records" / "speed.jsonl"
    for path in (code, record):
        path.parent.mkdir(parents=True)
        path.write_text("1\n")
    assert read_commit(tmp_path) == "", "no repository"
    run_git("init")
    assert read_commit(tmp_path) == "", "no commit"
    run_git("add", ".")
    run_git("commit", "-m", "first")
    commit = read_commit(tmp_path)
    assert re.fullmatch("[0-9a-f]{10,}", commit)
    record.write_text("2\n")
    assert read_commit(tmp_path) == commit, "a record is no code"
    code.write_text("2\n")
    assert read_commit(tmp_path) == f"{commit}-dirty"


def test_the_table_compares_others_with_uefl():
    table = make_table(
        "speed", [Measurement("uefl", "a round", "s", [2.0]), Measurement("peer", "a round", "s", [5.0])]
    )
    assert list(table.columns[5].cells) == ["", "2.5x"]
