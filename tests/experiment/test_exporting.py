"""Exported models: the same answers in onnxruntime and torch.export, and nothing of another silo in the file."""

import json
import re
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import (
    IMAGE_SHAPE,
    NUM_CLASSES,
    SMALL_CODEBOOK,
    call_cli,
    call_with_mistake,
    import_or_skip,
    make_encoder,
    make_method,
    make_striped_silos,
)

import uefl
from uefl.core.errors import InputError
from uefl.experiment import export_files
from uefl.experiment.export_files import export_model
from uefl.experiment.silo_models import SiloModels

PIXELS = np.random.default_rng(0).integers(0, 256, (9, *IMAGE_SHAPE), dtype=np.uint8)
TEMPERATURE = 2.0


def make_thresholds(i: int) -> dict[str, float]:
    return {"set_threshold": 0.125 + i, "answer_threshold": 0.5}


@pytest.fixture(scope="module")
def models() -> SiloModels:
    """Two silos with codewords and label priors of their own, and calibrated values."""
    method = replace(make_method("uefl", codebook=True, logit_adjustment="local"), codebook=SMALL_CODEBOOK)
    silos = make_striped_silos()[:3]
    trained = uefl.train(method, silos, make_encoder(), num_classes=NUM_CLASSES, hidden_size=16).models
    facts = {
        name: replace(facts, temperature=TEMPERATURE, thresholds=make_thresholds(i))
        for i, (name, facts) in enumerate(trained.description.silos.items())
    }
    return replace(trained, description=replace(trained.description, silos=facts))


@pytest.fixture(scope="module")
def onnx_file(models: SiloModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import_or_skip("onnxruntime")
    import_or_skip("onnxscript")
    path = tmp_path_factory.mktemp("onnx") / "bob.onnx"
    return export_model(models, "bob", path, run_name="uefl-digits-1").path


@pytest.fixture(scope="module")
def program_file(models: SiloModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_model(models, "bob", tmp_path_factory.mktemp("pt2") / "bob.pt2", run_name="uefl-digits-1").path


def run_onnx(path: Path, x: Any) -> list[Any]:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    outputs: list[Any] = session.run(None, {"pixels": x})
    return outputs


def list_own_codewords(models: SiloModels, silo_name: str) -> torch.Tensor:
    """Return the codewords that this silo may use and no other."""
    (codewords,) = [t for n, t in models.model_state.items() if n.endswith("codewords")]
    row = models.access[models.description.silo_names.index(silo_name)]
    return codewords[row & (models.access.sum(0) == 1)]


def contains_row(tensors: list[Any], row: torch.Tensor) -> bool:
    rows = [t.reshape(-1, t.shape[-1]) for t in tensors if t.ndim == 2 and t.shape[-1] == len(row)]
    transposed = [t.T for t in tensors if t.ndim == 2 and t.shape[0] == len(row)]
    return any(bool((np.abs(t - row.numpy()).max(-1) == 0).any()) for t in (*rows, *transposed))


def test_onnxruntime_gives_the_probabilities_of_predict_for_any_batch(models, onnx_file) -> None:
    model = models.build("bob")
    p = model.predict_batch(model.input_format.convert(torch.from_numpy(PIXELS)), 0, is_calibrated=False).probabilities
    expected = p ** (1 / TEMPERATURE) / (p ** (1 / TEMPERATURE)).sum(-1, keepdims=True)
    np.testing.assert_allclose(model.predict(PIXELS).probabilities, expected, atol=1e-5)
    for count in (1, 4, 9):
        logits, probabilities, entropy, information = run_onnx(onnx_file, PIXELS[:count])
        np.testing.assert_allclose(probabilities, expected[:count], atol=1e-5)
        softmax = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        np.testing.assert_allclose(softmax, expected[:count], atol=1e-5)
        assert entropy.shape == information.shape == (count,)


def test_an_example_has_the_same_uncertainty_in_every_batch(onnx_file) -> None:
    whole, single = run_onnx(onnx_file, PIXELS), run_onnx(onnx_file, PIXELS[4:5])
    for one, other in zip(whole, single):
        np.testing.assert_allclose(one[4:5], other, atol=1e-6)


def test_uncertainty_agrees_with_that_of_predict_up_to_chance(models, tmp_path) -> None:
    export_model(models, "ada", tmp_path / "ada.pt2", mc_samples=3000)
    outputs = torch.export.load(tmp_path / "ada.pt2").module()(torch.from_numpy(PIXELS))
    expected = models.build("ada").predict(PIXELS, mc_samples=3000).uncertainty
    # An entropy of 3000 samples has a standard error below 0.01 nats.
    np.testing.assert_allclose(outputs[2].numpy(), expected.entropy, atol=0.03)
    np.testing.assert_allclose(outputs[3].numpy(), expected.mutual_information, atol=0.03)
    assert float(outputs[3].max()) > 0.001


def test_the_file_has_the_silo_s_codewords_and_nobody_else_s(models, onnx_file, program_file) -> None:
    import onnx

    initializers = [onnx.numpy_helper.to_array(t) for t in onnx.load(onnx_file).graph.initializer]
    program = [t.numpy() for t in torch.export.load(program_file).state_dict.values()]
    others = torch.cat([list_own_codewords(models, name) for name in ("ada", "cyd")])
    assert len(others)
    for tensors in (initializers, program):
        assert all(contains_row(tensors, row) for row in list_own_codewords(models, "bob"))
        assert not any(contains_row(tensors, row) for row in others)


def test_metadata_name_this_silo_and_no_other(models, onnx_file, program_file) -> None:
    import onnx

    metadata = {p.key: p.value for p in onnx.load(onnx_file).metadata_props}
    with zipfile.ZipFile(program_file) as file:
        (name,) = [n for n in file.namelist() if n.endswith(export_files.METADATA_FILE)]
        assert json.loads(file.read(name)) == metadata
        contents = b"".join(map(file.read, file.namelist()))
    assert metadata["uefl.silo"] == "bob"
    assert metadata["uefl.run"] == "uefl-digits-1"
    assert json.loads(metadata["uefl.classes"]) == list(models.description.class_names)
    assert json.loads(metadata["uefl.input_shape"]) == list(IMAGE_SHAPE)
    assert json.loads(metadata["uefl.temperature"]) == TEMPERATURE
    assert json.loads(metadata["uefl.thresholds"]) == make_thresholds(1)  # bob's, not that of ada or cyd
    for data in (onnx_file.read_bytes(), contents):
        assert not re.search(rb"\b(ada|cyd)\b", data)
        assert str(Path(uefl.__file__).parent).encode() not in data, "a path of this machine"


def test_a_program_runs_where_uefl_is_not_imported(program_file) -> None:
    code = (
        "import sys, torch; module = torch.export.load(sys.argv[1]).module();"
        "x = torch.zeros(5, 1, 8, 8, dtype=torch.uint8); print(*module(x)[1].shape, 'uefl' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code, str(program_file)], capture_output=True, text=True)
    assert result.stdout.split() == ["5", "3", "False"], result.stderr


def test_a_table_takes_cells_with_missing_ones_and_an_ensemble_its_members(tmp_path) -> None:
    settings = ["rounds=2", "iterations=1", "epochs=1", "ensemble_size=2", "hidden_size=8", "width=8"]
    answer = call_cli("run", "fedavg", "heart", *settings, "--out", str(tmp_path / "runs"))
    (run,) = (tmp_path / "runs").glob("fedavg-heart-*")
    answer = call_cli("export", str(run), "--silo", "Cleveland", str(tmp_path / "heart.pt2"))
    assert answer.code == 0, answer
    assert "input cells [n, 13] float64" in answer.stdout
    assert "the 2 members of the ensemble" in answer.stdout
    assert "largest difference" in answer.stdout
    outputs = torch.export.load(tmp_path / "heart.pt2").module()(torch.full((2, 13), torch.nan, dtype=torch.float64))
    assert all(bool(output.isfinite().all()) for output in outputs)
    mistake = call_with_mistake("export", str(run), "--silo", "Cleveland", str(tmp_path / "heart.pt2"))
    assert mistake.endswith("heart.pt2 exists; choose another file")


def test_a_file_that_disagrees_is_not_left_behind(models, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(export_files, "MAX_DIFFERENCE", -1.0)
    with pytest.raises(InputError, match="differs from `predict`"):
        export_model(models, "bob", tmp_path / "bob.pt2")
    assert not list(tmp_path.iterdir())


def test_mistakes_are_one_line(models, tmp_path, monkeypatch) -> None:
    (tmp_path / "old.onnx").write_text("mine")
    with pytest.raises(InputError, match=r"must end in \.onnx or \.pt2"):
        export_model(models, "bob", tmp_path / "bob.pb")
    with pytest.raises(InputError, match=r"old\.onnx exists"):
        export_model(models, "bob", tmp_path / "old.onnx")
    for suffix in (".onnx", ".pt2"):
        with pytest.raises(InputError, match="nowhere is not a folder"):
            export_model(models, "bob", tmp_path / f"nowhere/bob{suffix}")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(InputError, match="extra `onnx`"):
        export_model(models, "bob", tmp_path / "bob.onnx")
    assert (tmp_path / "old.onnx").read_text() == "mine"
    assert "no such model file" in call_with_mistake("export", str(tmp_path / "none"), str(tmp_path / "a.onnx"))


def test_a_method_that_draws_its_predictions_is_refused(tmp_path) -> None:
    silos = make_striped_silos()[:2]
    trained = uefl.train(make_method("fedsr"), silos, make_encoder(), num_classes=NUM_CLASSES, hidden_size=16)
    with pytest.raises(InputError, match="fedsr draws its predictions"):
        export_model(trained.models, "", tmp_path / "a.pt2")
