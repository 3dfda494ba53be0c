"""After the last round every silo keeps its copy of the model, and only its own."""

import stat
from dataclasses import replace

import numpy as np
import pytest
import torch
from harness import call_cli
from small_federation import (
    SILOS,
    make_experiment,
    make_flower_engine,
    make_grid,
    make_serial_engine,
    max_difference,
    run_rounds,
)

from uefl.core.federation import is_codeword_tensor
from uefl.experiment.held_out import read_held_out
from uefl.experiment.loading import load, open_models
from uefl.experiment.run_folder import RunFolder
from uefl.flower.client_state import ClientStateStore
from uefl.flower.node_data import load_data_once


def find_copies(state_folder):
    return {path.parent.name.removeprefix("silo-"): path for path in state_folder.rglob(RunFolder.MODEL_FILE)}


@pytest.mark.parametrize("name", ["uefl", "fedbn", "local-only", "fine-tuning", "ditto", "ifca"])
def test_a_silos_copy_predicts_as_the_silo_was_evaluated(name, tmp_path):
    experiment, grid = make_experiment(name), make_grid(tmp_path)
    engine = make_flower_engine(grid, experiment)
    server, records = run_rounds(engine, experiment)
    copies = find_copies(tmp_path)
    assert sorted(copies) == sorted(SILOS)
    for silo in load_data_once(experiment.data, experiment.seed)[0]:
        model, recorded = load(copies[silo.name]), records[-1]["silos"][silo.name]
        predictions = model.predict(silo.test.x)
        assert (predictions.labels == silo.test.y.numpy()).mean() == pytest.approx(recorded["accuracy"])
        assert predictions.uncertainty.entropy.mean() == pytest.approx(recorded["entropy"])
        assert (model.silo_name, model.round) == (silo.name, 3)
        assert model.label_counts == tuple(np.bincount(silo.train.y, minlength=10))
        models = open_models(copies[silo.name])
        assert models.description.silo_names == (silo.name,)
        row = server.access[server.silo_names.index(silo.name)]
        for tensor_name, tensor in models.model_state.items():
            if is_codeword_tensor(tensor_name):
                assert torch.allclose(tensor, server.model_state[tensor_name][row])
    assert engine.get_personal_tensors(experiment.method, experiment.method.make_broadcast(engine, server)) == {}, (
        "what belongs to a silo stays there"
    )


def test_a_model_that_cannot_be_written_is_a_note(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ClientStateStore, "write_model", fail)
    experiment, notes = make_experiment("fedavg"), []
    engine = make_flower_engine(make_grid(tmp_path), experiment)
    query = engine.query

    def record_notes(*arguments):
        for reply in query(*arguments):
            notes.append(reply.note)
            yield reply

    monkeypatch.setattr(engine, "query", record_notes)
    _, records = run_rounds(engine, experiment)
    assert notes == ["the silo could not write its copy of the model"] * 3
    assert all("accuracy" in silo for silo in records[-1]["silos"].values())
    assert not find_copies(tmp_path)


def test_every_silo_calibrates_its_copy_with_examples_that_nothing_else_has_read(tmp_path):
    experiment = make_experiment("uefl")
    experiment = replace(experiment, data=replace(experiment.data, calibration_fraction=0.3))
    server, _ = run_rounds(make_flower_engine(make_grid(tmp_path), experiment), experiment)
    expected, _ = run_rounds(make_serial_engine(experiment), experiment)
    assert max_difference(server, expected) < 1e-9
    for silo in load_data_once(experiment.data, experiment.seed)[0]:
        folder = RunFolder(find_copies(tmp_path)[silo.name].parent)
        assert stat.S_IMODE(folder.held_out_path.stat().st_mode) == 0o600
        (own,) = read_held_out(folder.held_out_path, open_models(folder.path)).values()
        assert torch.equal(own.labels, silo.calibration.y)
        assert own.measurements.probabilities.numpy() == pytest.approx(
            load(folder.path).predict(silo.calibration.x).probabilities
        )
        answer = call_cli("calibrate", str(folder.path), "coverage=0.6", "risk=0")
        assert answer.code == 0, answer.stderr
        model = load(folder.path)
        assert model.thresholds["coverage"] == 0.6
        assert model.predict(silo.test.x).sets is not None
