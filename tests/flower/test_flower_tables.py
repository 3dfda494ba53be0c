"""Tables on Flower: silos send sums of columns, agree on a format, and get the results of the serial engine."""

import csv
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from in_process_grid import InProcessGrid
from small_federation import QUICK_POLICY, make_serial_engine, max_difference, run_rounds

from uefl.core.errors import InputError, ResumableError
from uefl.data.defaults import get_default_config
from uefl.data.readers.heart import HEART_FILE, HEART_TABLE
from uefl.data.table_format import TableFormat, compute_sums, scale_by_sums
from uefl.experiment.experiment import Experiment
from uefl.experiment.recipes import make_experiment
from uefl.flower.client import make_client_app
from uefl.flower.connect import connect
from uefl.flower.data_format import DataFormat
from uefl.flower.node_data import load_own_folder
from uefl.flower.server import RegistrationStore
from uefl.flower.wire import PAYLOAD_RECORD, read_payload

REGISTRATION_FIELDS = {
    *("versions", "silo", "domain", "num_examples", "image_shape", "classes", "table", "column_sums")
}
HOSPITALS = ("Cleveland", "Hungary", "Switzerland", "VA Long Beach")


def make_short_experiment(method: str = "uefl") -> Experiment:
    experiment = make_experiment(method, "heart")
    short = replace(experiment.method, rounds=3, extra_rounds=1, iterations=2, mc_samples=2)
    return replace(experiment, method=short, precision="float64")


def write_hospitals(folder: Path, *, drop: str = "") -> InProcessGrid:
    """Write one CSV file per hospital, in its own folder, and return a grid of their nodes."""
    with HEART_FILE.open() as file:
        rows = list(csv.DictReader(file))
    nodes = {}
    for i, hospital in enumerate(HOSPITALS):
        data = folder / hospital / "data"
        data.mkdir(parents=True)
        own = [
            {n: v for n, v in row.items() if not (n == drop and i == 1)} for row in rows if row["dataset"] == hospital
        ]
        with (data / "patients.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, own[0])
            writer.writeheader()
            writer.writerows(own)
        nodes[10 - i] = {"data_path": str(data), "silo": hospital}
    return InProcessGrid(make_client_app(state_folder=folder / "state"), nodes)


def make_deployed_experiment(**table_fields) -> Experiment:
    data = replace(get_default_config("table"), table=replace(HEART_TABLE, **table_fields))
    return replace(make_short_experiment(), data=data)


def open_engine(grid, experiment, events=(), **options):
    return connect(
        grid,
        experiment,
        num_silos=4,
        policy=QUICK_POLICY,
        on_silo_event=lambda _silo, text: events.append(text) if isinstance(events, list) else None,
        **options,
    )


def test_a_table_on_flower_agrees_with_the_serial_engine(tmp_path):
    experiment = make_short_experiment()
    nodes = {90 - i: {"partition-id": i} for i in range(4)}
    engine = open_engine(InProcessGrid(make_client_app(state_folder=tmp_path), nodes), experiment)
    _, images = experiment.data.load(experiment.seed)
    assert images.table is not None
    assert TableFormat.from_json(engine.table) == images.table
    flower, flower_records = run_rounds(engine, experiment)
    serial, serial_records = run_rounds(make_serial_engine(experiment), experiment)
    assert max_difference(serial, flower) < 1e-9
    assert flower_records[-1]["all_silos"] == serial_records[-1]["all_silos"]


def test_silos_with_their_own_files_send_sums_and_no_rows(tmp_path):
    experiment, grid = make_deployed_experiment(), write_hospitals(tmp_path)
    replies = []
    grid.tamper = lambda _message, reply: replies.append(reply) or reply
    engine = open_engine(grid, experiment)
    grid.tamper = lambda _message, reply: reply
    loaded = [load_own_folder(experiment, str(tmp_path / name / "data"), name) for name in HOSPITALS]
    table = loaded[0].table
    assert table is not None
    sums = [compute_sums(table, node_data.silo.train.x) for node_data in loaded]
    expected = replace(scale_by_sums(table, sums), classes=("negative", "positive"))
    assert TableFormat.from_json(engine.table) == expected
    by_silo = dict(zip(HOSPITALS, sums))
    for reply in replies:
        payload = read_payload(reply)
        assert payload["column_sums"] == json.loads(json.dumps(by_silo.pop(payload["silo"])))
        assert not {name for name in payload if name not in REGISTRATION_FIELDS}
        assert len(reply.content) == 1  # no tensors
    server, records = run_rounds(engine, experiment)
    assert server.round == experiment.method.total_rounds
    assert records[-1]["all_silos"]["auroc"] > 0.6
    assert not any("rejected" in silo for silo in records[-1]["silos"].values())


def test_levels_that_are_not_declared_are_named(tmp_path):
    levels = tuple(entry for entry in HEART_TABLE.levels if not entry.startswith("thal"))
    with pytest.raises(ResumableError) as caught:
        open_engine(write_hospitals(tmp_path), make_deployed_experiment(levels=levels))
    assert "column 'thal' is categorical; declare its levels in the settings of the run: levels.thal=…" in str(
        caught.value
    )


@pytest.mark.parametrize(
    ("positive", "found"), [("ill", "negative"), ("above:9", "negative"), ("above:-1", "positive")]
)
def test_a_positive_class_that_divides_the_rows_of_no_silo_is_one_line(tmp_path, positive, found):
    with pytest.raises(InputError) as caught:
        open_engine(write_hospitals(tmp_path), make_deployed_experiment(positive=(positive,)))
    assert str(caught.value) == (
        f"positive={positive} makes every row of every silo {found}; set it to values of the label that some silo has"
    )


def test_a_silo_without_the_positive_class_takes_part(tmp_path):
    """Almost all patients of Switzerland are ill; those who are not are removed."""
    grid = write_hospitals(tmp_path)
    path = tmp_path / "Switzerland" / "data" / "patients.csv"
    header, *rows = path.read_text().splitlines()
    path.write_text("\n".join([header, *(row for row in rows if not row.endswith(",0"))]))
    engine = open_engine(grid, make_deployed_experiment())
    assert engine.class_names == ("negative", "positive")
    assert {info.name: info.classes for info in engine.silo_infos}["Switzerland"] == ("positive",)
    assert set(engine.num_examples) == set(HOSPITALS)
    _, records = run_rounds(engine, make_deployed_experiment())
    assert records[-1]["silos"]["Switzerland"]["num_examples"] > 0


def test_a_silo_with_other_columns_is_left_out_by_name(tmp_path):
    events: list[str] = []
    experiment = make_deployed_experiment(numeric=tuple(n for n in HEART_TABLE.numeric if n != "oldpeak"))
    engine = open_engine(write_hospitals(tmp_path, drop="oldpeak"), experiment, events)
    assert list(engine.num_examples) == ["Cleveland", "Switzerland", "VA Long Beach"]
    assert any(
        "silo Hungary has another table than most silos: column 'slope' in place of 'oldpeak'" in e for e in events
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"column_sums": None}, "the sums of a table are incomplete"),
        ({"column_sums": [211, [1], [1.0], [1.0]]}, "the sums of a table are of 1 columns, but it has 13"),
        ({"column_sums": [211, [300] * 13, [0.0] * 13, [0.0] * 13]}, "a column of a table has 300 values in 211 rows"),
        ({"column_sums": [211, [10] * 13, [9e9] * 13, [1.0] * 13]}, "the sums of a table are not those of numbers"),
        ({"column_sums": [9, [1] * 13, [0.0] * 13, [0.0] * 13]}, "sent sums of 9 rows"),
        ({"table": "{}"}, "the format of a table is damaged"),
    ],
    ids=["none", "one column", "too many values", "impossible", "other rows", "no format"],
)
def test_a_forged_description_of_a_table_is_rejected(tmp_path, change, reason):
    grid, events = write_hospitals(tmp_path), []

    def forge(message, reply):
        if message.metadata.dst_node_id == 9 and message.metadata.message_type == "query":
            reply.content[PAYLOAD_RECORD]["json"] = json.dumps({**read_payload(reply), **change})
        return reply

    grid.tamper = forge
    engine = open_engine(grid, make_deployed_experiment(), events)
    assert "Hungary" not in engine.num_examples
    assert any(reason in event for event in events), events


def test_a_resumed_run_keeps_its_scaling(tmp_path):
    experiment, grid = make_deployed_experiment(), write_hospitals(tmp_path)
    engine = open_engine(grid, experiment)
    store = RegistrationStore(tmp_path / "silos.json")
    store.write(engine.silo_infos, DataFormat(engine.image_shape, engine.class_names, engine.table))
    known_silos, data_format = store.read(DataFormat())
    path = tmp_path / "Hungary" / "data" / "patients.csv"
    path.write_text(path.read_text().replace(",130,", ",200,"))
    resumed = open_engine(grid, experiment, known_silos=known_silos, data_format=data_format)
    assert resumed.table == engine.table
    assert resumed.silo_infos == engine.silo_infos


def test_a_message_with_another_table_is_rejected_by_the_silo(tmp_path):
    experiment, grid = make_deployed_experiment(), write_hospitals(tmp_path)
    engine = open_engine(grid, experiment)
    table = TableFormat.from_json(engine.table)
    engine._run_payload["table"] = replace(table, columns=table.columns[::-1]).to_json()
    with pytest.raises(ResumableError, match="this silo has another table than the federation: column 'age' in place"):
        run_rounds(engine, experiment)


def test_an_embedded_table_reads_no_folder(tmp_path):
    with pytest.raises(InputError, match="data=heart reads no folder"):
        load_own_folder(make_short_experiment(), str(tmp_path), "Cleveland")


@pytest.mark.real
def test_a_simulated_run_of_heart_has_the_metrics_of_the_serial_run(tmp_path):
    settings = ["fedavg", "heart", "rounds=2", "iterations=1", "mc_samples=2", "precision=float64"]
    summaries = {}
    for engine in ("serial", "flower"):
        command = [sys.executable, "-m", "uefl.cli.main", "run", *settings, "--engine", engine, "--out", engine]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=500, env={**os.environ})
        (path,) = (tmp_path / engine).glob("*/summary.json")
        summaries[engine] = json.loads(path.read_text())["last"]
    for name in ("mA", "mAUROC", "mAUPRC", "mSens"):
        assert summaries["flower"][name] == pytest.approx(summaries["serial"][name], abs=1e-9)
