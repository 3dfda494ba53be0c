"""Patients with several rows over Flower: `min_examples` counts patients, as in the serial engine."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from in_process_grid import InProcessGrid
from small_federation import QUICK_POLICY, run_rounds

from uefl.core.federation import Silo
from uefl.data.defaults import get_default_config
from uefl.data.table_config import TableConfig
from uefl.engines.serial import SerialEngine
from uefl.experiment.experiment import DTYPES, Experiment
from uefl.experiment.recipes import make_experiment
from uefl.flower.client import make_client_app
from uefl.flower.connect import connect
from uefl.flower.engine import FlowerEngine
from uefl.flower.node_data import fit_to_federation, load_own_folder

SHORT_RUN = {"rounds": 2, "extra_rounds": 1, "iterations": 2, "mc_samples": 2}
MIN_PATIENTS = 4
NUM_ROWS = 96
NUM_PATIENTS = {"clinic": 4, "hospital": 96, "practice": 6}  # with the training rows of the clinic: two


def make_patients_experiment(*, group: str) -> Experiment:
    """Every silo gets new codewords at the one decision; at most eight, of at least four patients each."""
    experiment = make_experiment("uefl", "table")
    fields = {"num_codewords": 8, "segments": 1, "warmup_rounds": 1, "min_examples": MIN_PATIENTS, "extend": "all"}
    codebook = replace(experiment.method.codebook, **fields)
    method = replace(experiment.method, codebook=codebook, group_rounds=0, fine_tuning_epochs=0, **SHORT_RUN)
    table = TableConfig(label="ill", ignore=() if group else ("patient",))
    data = replace(get_default_config("table"), group=group, table=table)
    return replace(experiment, method=method, data=data, precision="float64")


def write_silos(folder: Path) -> InProcessGrid:
    """Write one table of equally many rows per silo and return a grid of their nodes."""
    nodes, generator = {}, random.Random(0)
    for i, (name, num_patients) in enumerate(NUM_PATIENTS.items()):
        data = folder / name / "data"
        data.mkdir(parents=True)
        rows = [(p % num_patients, generator.gauss(0, 1), generator.gauss(0, 1), p % 2) for p in range(NUM_ROWS)]
        lines = [f"{patient},{age:.3f},{height:.3f},{ill}" for patient, age, height, ill in rows]
        (data / "visits.csv").write_text("\n".join(["patient,age,height,ill", *lines]))
        nodes[10 - i] = {"data_path": str(data), "silo": name}
    return InProcessGrid(make_client_app(state_folder=folder / "state"), nodes)


def load_silos(engine: FlowerEngine, experiment: Experiment, folder: Path) -> list[Silo]:
    """Return the silos as their nodes load them, in the format of the federation."""
    payload = {"classes": engine.class_names, "table": engine.table, "image_shape": engine.image_shape}
    return [
        fit_to_federation(load_own_folder(experiment, str(folder / name / "data"), name), {**payload, "silo": name})
        for name in NUM_PATIENTS
    ]


def count_centroids(records: list[dict]) -> dict[str, int]:
    """Return how many codewords each silo received at the decision: its centroids."""
    (decided,) = (record for record in records if record.get("has_decision"))
    return {name: silo["new_codewords"] for name, silo in decided["silos"].items()}


def test_centroids_of_a_silo_with_patients_are_as_many_as_in_the_serial_engine(tmp_path: Path) -> None:
    counts, serial_counts = {}, {}
    for group in ("patient", ""):
        experiment, folder = make_patients_experiment(group=group), tmp_path / (group or "rows")
        flower = connect(write_silos(folder), experiment, num_silos=3, policy=QUICK_POLICY)
        silos = load_silos(flower, experiment, folder)
        net = experiment.build_network(tuple(silos[0].test.x.shape[1:]), len(flower.class_names))
        serial = SerialEngine(silos, net, seed=experiment.seed, dtype=DTYPES[experiment.precision])
        counts[group] = count_centroids(run_rounds(flower, experiment)[1])
        serial_counts[group] = count_centroids(run_rounds(serial, experiment)[1])
    assert counts == serial_counts
    patients, rows = counts["patient"], counts[""]
    assert patients["clinic"] == 0 < patients["practice"] < patients["hospital"]
    assert patients["practice"] < rows["practice"], "rows of one patient count once"
    assert rows["clinic"] > 0
