"""Trained models: every method predicts as its evaluation does, and a file holds all that a prediction needs."""

import re
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from harness import CODEBOOK_METHODS, NUM_CLASSES, make_encoder, make_method, make_pattern_silos
from safetensors import safe_open

from uefl.algorithms import METHODS
from uefl.algorithms.fedavg import FedAvg
from uefl.core.errors import InputError
from uefl.core.federation import Silo, is_codeword_tensor
from uefl.experiment.loading import load, open_models
from uefl.experiment.parsing import parse_experiments
from uefl.experiment.run import run
from uefl.experiment.run_folder import RunFolder
from uefl.experiment.train import train

SILOS = make_pattern_silos()
EXTENDING = {"rounds": 3, "codebook": True}


def train_method(method, silos=SILOS, encoder=None):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoder = encoder or make_encoder()
    return train(method, silos, encoder, num_classes=NUM_CLASSES, hidden_size=16), encoder


def assert_predictions_match(predictions, silo, recorded):
    assert (predictions.labels == silo.test.y.numpy()).mean() == pytest.approx(recorded["accuracy"])
    assert predictions.uncertainty.entropy.mean() == pytest.approx(recorded["entropy"], rel=1e-5)
    information = predictions.uncertainty.mutual_information.mean()
    assert information == pytest.approx(recorded["mutual_information"], rel=1e-4, abs=1e-6)


BUILT_AROUND_A_CODEBOOK = ("uefl", "vq-fedavg")
CASES = [(name, name in BUILT_AROUND_A_CODEBOOK) for name in METHODS] + [(name, True) for name in CODEBOOK_METHODS]


@pytest.mark.parametrize(("name", "codebook"), CASES)
def test_every_method_predicts_as_its_evaluation_does(name, codebook, tmp_path):
    """Also after the model was saved and loaded, and from a silo's own copy."""
    result, encoder = train_method(make_method(name, **(EXTENDING if codebook else {})))
    result.save(tmp_path / "all")
    for silo in SILOS:
        recorded = result.records[-1]["silos"][silo.name]
        assert_predictions_match(result.model(silo.name).predict(silo.test.x), silo, recorded)
        result.save(tmp_path / silo.name, silo=silo.name)
        for model in (load(tmp_path / "all", silo.name, encoder=encoder), load(tmp_path / silo.name, encoder=encoder)):
            assert_predictions_match(model.predict(silo.test.x.numpy()), silo, recorded)


def test_a_run_on_the_command_line_saves_what_its_method_needs(tmp_path):
    tiny = ["rounds=1", "iterations=1", "epochs=1", "mc_samples=2", "encoder=mlp", "width=8", "hidden_size=8"]
    small = ["num_silos=1,1,1", "train_per_silo=40", "test_per_silo=20"]
    silos = None
    for arguments in (["fedcr"], ["fedavg", "ensemble_size=2"]):
        (experiment,) = parse_experiments([*arguments, *tiny, *small], ["uefl"], "default").values()
        folder, silos = RunFolder(run(experiment, tmp_path)), silos or experiment.data.load(0)[0]
        for silo in silos:
            recorded = folder.read_summary()["last"]["silos"][silo.name]
            assert_predictions_match(load(folder.path, silo.name).predict(silo.test.x), silo, recorded)


@pytest.fixture(scope="module")
def extended():
    result, encoder = train_method(make_method("uefl", **EXTENDING))
    assert result.server.access.shape[1] > 6, "the run must extend, or the tests below prove less"
    return result, encoder


def read_file(path):
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()["uefl"]  # noqa: SIM118


def test_a_silos_copy_holds_nothing_of_other_silos(extended, tmp_path):
    result, encoder = extended
    row = result.server.access[result.server.silo_names.index("silo 1")]
    tensors, text = read_file(result.save(tmp_path, silo="silo 1"))
    (codewords,) = (t for name, t in tensors.items() if is_codeword_tensor(name))
    expected = result.server.model_state["codebook.codewords"][row]
    assert torch.equal(codewords, expected)
    assert len(codewords) < result.server.access.shape[1]
    assert "silo 1" in text
    assert not {"silo 0", "silo 2", "domain 0", "domain 2"} & set(re.findall(r"(?:silo|domain) \d", text))
    model = load(tmp_path, encoder=encoder)
    assert model.silo_name == "silo 1"
    assert model.label_prior.tolist() == pytest.approx([1 / 3] * 3)
    with pytest.raises(InputError, match=r"^unknown silo 'silo 0'; known: silo 1$"):
        load(tmp_path, "silo 0", encoder=encoder)


def test_a_loaded_model_writes_the_same_copy(extended, tmp_path):
    result, encoder = extended
    result.save(tmp_path / "all")
    copied = load(tmp_path / "all", "silo 2", encoder=encoder).save(tmp_path / "copy")
    assert copied.read_bytes() == result.save(tmp_path / "direct", silo="silo 2").read_bytes()


def test_without_a_silo_only_shared_codewords_are_used(extended):
    result, _ = extended
    shared = int(result.server.access.all(0).sum())
    assert len(result.model().net.codebook.codewords) == shared == 6
    assert len(result.model("silo 1").net.codebook.codewords) > shared


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("fedbn", "encoder.1.weight"),
        ("fedcr", "classifier.head.1.weight"),
        ("distrans", "encoder.offset"),
        ("local-only", "encoder.0.weight"),
    ],
)
def test_a_method_with_personal_parts_has_no_shared_model(name, part):
    result, _ = train_method(make_method(name, rounds=1, iterations=1))
    message = f"{name} has no model that all silos share: every silo has its own {part}; choose a silo: silo 0, silo 1"
    with pytest.raises(InputError, match=f"^{re.escape(message)}"):
        result.model()


def test_without_a_silo_fine_tuning_predicts_with_the_model_of_fedavg(tmp_path):
    """Bit by bit, also from a file; with batch norm of silos' own there is no shared model."""
    (tuned, encoder), (fedavg, _) = (train_method(make_method(name)) for name in ("fine-tuning", "fedavg"))
    x = SILOS[1].test.x
    expected = fedavg.model().predict(x).probabilities
    assert (tuned.model().predict(x).probabilities == expected).all()
    assert (tuned.model("silo 1").predict(x).probabilities != expected).any()
    tuned.save(tmp_path)
    assert (load(tmp_path, encoder=encoder).predict(x).probabilities == expected).all()
    personal, _ = train_method(make_method("fine-tuning", batch_norm="personal"))
    with pytest.raises(InputError, match=r"^fine-tuning has no model that all silos share: every silo has its own "):
        personal.model()


def test_the_class_prior_of_fedsr_is_not_needed_for_predictions():
    result, _ = train_method(make_method("fedsr", rounds=1, iterations=1))
    assert len(result.model().predict(SILOS[0].test.x)) == 30


def test_the_virtual_classes_of_vhl_have_names():
    result, _ = train_method(make_method("vhl", rounds=1, iterations=1))
    assert result.model().predict(SILOS[0].test.x).classes == ("0", "1", "2", "virtual 0", "virtual 1", "virtual 2")


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros((4, 1, 9, 8), np.float32), "predict: x has shape [4, 1, 9, 8]; this model takes [n, 1, 8, 8]"),
        (
            np.zeros((1, 8, 8), np.float32),
            "predict: x has shape [1, 8, 8]; this model takes [n, 1, 8, 8]; for one example, use x[None]",
        ),
        (np.zeros((4, 1, 8, 8), np.int64), "predict: x has type int64; this model takes uint8 pixels or floats"),
        (np.zeros((4, 1, 8, 8), bool), "predict: x has type bool; this model takes uint8 pixels or floats"),
        (np.full((4, 1, 8, 8), np.nan), "predict: x[0] contains nan; all values must be finite"),
    ],
)
def test_wrong_inputs_are_refused_in_one_line(extended, x, message):
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        extended[0].model("silo 0").predict(x)


def test_text_is_refused_in_one_line(extended):
    with pytest.raises(InputError, match=r"^predict: x must be a tensor, an array or a list of numbers \([^\n]+\)$"):
        extended[0].model("silo 0").predict("image.png")


def test_predictions_are_arrays_and_seeded(extended):
    model, x = extended[0].model("silo 0"), SILOS[0].test.x.numpy()
    one, same, other = model.predict(x), model.predict(x), model.predict(x, seed=1)
    assert all(type(a) is np.ndarray for a in (one.labels, one.probabilities, *one.uncertainty))
    assert one.labels.dtype == np.int64
    assert one.probabilities.sum(1) == pytest.approx(np.ones(30))
    assert (one.confidence == one.probabilities.max(1)).all()
    assert one.names == [str(label) for label in one.labels]
    assert one.sets is None
    assert (one.uncertainty.entropy == same.uncertainty.entropy).all()
    assert (one.uncertainty.entropy != other.uncertainty.entropy).any()
    assert (one.probabilities == other.probabilities).all()
    assert len(model.predict(x[:0])) == 0
    with pytest.raises(InputError, match=r"^mc_samples=0 must be at least 1$"):
        model.predict(x, mc_samples=0)


def test_prediction_leaves_torchs_generator_as_it_was(extended):
    before = torch.get_rng_state()
    extended[0].model("silo 0").predict(SILOS[0].test.x)
    assert torch.equal(torch.get_rng_state(), before)


def test_silos_of_uint8_pixels_predict_uint8_pixels():
    pixels = [Silo.from_tensors(s.name, (s.test.x * 40 + 128).clamp(0, 255).byte(), s.test.y) for s in SILOS]
    result, _ = train_method(make_method("fedavg", rounds=1, iterations=1), pixels)
    raw = (SILOS[0].test.x * 40 + 128).clamp(0, 255).byte()
    expected = result.model().predict((raw.float() / 255 - 0.5) / 0.25)
    assert (result.model().predict(raw.numpy()).probabilities == expected.probabilities).all()


def test_a_result_is_saved_whole_and_never_overwritten(extended, tmp_path):
    result, _ = extended
    result.save(tmp_path)
    assert {f.name for f in tmp_path.iterdir()} == {"model.safetensors", "records.jsonl", "summary.json"}
    with pytest.raises(InputError, match=r"model\.safetensors exists; choose another folder$"):
        result.save(tmp_path)


def test_a_frame_has_one_row_per_round_and_silo(extended, monkeypatch):
    frame = extended[0].frame()
    assert len(frame) == 3 * len(extended[0].records)
    last = frame[(frame["round"] == frame["round"].max()) & (frame["silo"] == "silo 1")]
    assert last["accuracy"].item() == extended[0].records[-1]["silos"]["silo 1"]["accuracy"]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InputError, match=r"^result\.frame\(\) needs pandas; install it with `pip install pandas`$"):
        extended[0].frame()


@dataclass(frozen=True, kw_only=True)
class OwnMethod(FedAvg):
    pass


def test_an_encoder_and_a_method_of_the_users_own_are_given_to_load(tmp_path):
    short = make_method("fedavg", rounds=1, iterations=1)
    method = OwnMethod(rounds=1, iterations=1, mc_samples=2, local=short.local)
    result, encoder = train_method(method)
    result.save(tmp_path)
    with pytest.raises(InputError, match=r"^this model has a method of your own; give it to `load` as method=…$"):
        load(tmp_path, encoder=encoder)
    with pytest.raises(InputError, match=r"^this model has an encoder of your own; give it to `load` as encoder=…$"):
        load(tmp_path, method=method)
    with pytest.raises(InputError, match=r"^the encoder or method does not fit this model: "):
        load(tmp_path, method=method, encoder=torch.nn.Conv2d(1, 4, 3))
    x = SILOS[0].test.x
    loaded = load(tmp_path, method=method, encoder=encoder).predict(x)
    assert (loaded.probabilities == result.model().predict(x).probabilities).all()


def test_what_is_no_model_is_named_in_one_line(tmp_path):
    with pytest.raises(InputError, match=r"no such model file, and no folder with a model\.safetensors$"):
        load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(InputError, match=r"model\.safetensors is not a model file, or it is damaged \([^\n]+\)$"):
        load(tmp_path)
    with pytest.raises(InputError, match=r"^device=gpu is not available; available devices: cpu"):
        load(tmp_path, device="gpu")


def test_tensors_that_stayed_at_a_silo_are_not_invented(tmp_path):
    """The coordinator of a deployment has no personal tensors."""
    result, encoder = train_method(make_method("fedbn", rounds=1, iterations=1))
    result.models.personal_tensors.clear()
    result.save(tmp_path)
    with pytest.raises(InputError, match=r"^encoder\.1\.weight of silo silo 0 stayed at the silo; use the copy"):
        open_models(tmp_path, encoder).build("silo 0")
