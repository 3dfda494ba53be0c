"""Calibrated models: sets and abstaining by the definition, at the silo alone, and carried by its copy."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from harness import NUM_CLASSES, make_encoder, make_method, make_pattern_examples, make_pattern_silos

from uefl.algorithms import METHODS
from uefl.core.abstention import ALL_ANSWERS, NO_ANSWER
from uefl.core.conformal import ALL_CLASSES
from uefl.core.errors import InputError
from uefl.core.temperature import TEMPERATURES
from uefl.experiment.calibration import CalibrationSettings, calibrate_silos
from uefl.experiment.held_out import MIN_TEMPERATURE_EXAMPLES, HeldOut, Measurements, read_held_out, save_held_out
from uefl.experiment.loading import load, open_models
from uefl.experiment.parsing import parse_experiments
from uefl.experiment.run import run
from uefl.experiment.run_folder import RunFolder
from uefl.experiment.train import train

SIZES = {"silo 0": 60, "silo 1": 30, "silo 2": 8}  # calibration examples


def make_plain_silos():
    """Return silos of which the first alone has enough validation examples for a temperature."""
    first, *others = make_pattern_silos()
    return [replace(first, validation=make_pattern_examples(MIN_TEMPERATURE_EXAMPLES, 70)), *others]


def make_silos():
    """Return silos with calibration examples, more of them than harmless for the smallest one."""
    return [
        replace(silo, calibration=make_pattern_examples(SIZES[silo.name], 50 + i, i / 2))
        for i, silo in enumerate(make_plain_silos())
    ]


@pytest.fixture(scope="module")
def result():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoder = make_encoder()
    method = make_method("uefl", codebook=True, rounds=3)
    return train(method, make_silos(), encoder, num_classes=NUM_CLASSES, hidden_size=16), encoder


def test_the_calibration_part_changes_no_record_and_no_weight(result):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoder = make_encoder()
    plain = train(
        make_method("uefl", codebook=True, rounds=3),
        make_plain_silos(),
        encoder,
        num_classes=NUM_CLASSES,
        hidden_size=16,
    )
    assert all(torch.equal(t, result[0].server.model_state[n]) for n, t in plain.server.model_state.items())
    assert plain.summary["last"]["silos"] == result[0].summary["last"]["silos"]
    assert plain.models.held_out == {}
    with pytest.raises(InputError, match=r"^no silo has a calibration part; set calibration_fraction=… in Silo"):
        plain.calibrate()


def test_sets_and_abstaining_follow_from_the_silos_own_examples(result):
    """Temperature, scores and quantile computed again with NumPy."""
    calibrated = result[0].calibrate(coverage=0.8, risk=0.3)
    for silo in make_silos()[:2]:
        plain, model = result[0].model(silo.name), calibrated.model(silo.name)
        p, v = plain.predict(silo.calibration.x).probabilities, plain.predict(silo.validation.x).probabilities
        y = silo.validation.y.numpy()

        def scale(probabilities, t):
            powers = np.asarray(probabilities, np.float64) ** (1 / t)
            return powers / powers.sum(1, keepdims=True)

        losses = [-np.log(scale(v, t)[np.arange(len(y)), y]).sum() for t in TEMPERATURES]
        assert (len(y) >= MIN_TEMPERATURE_EXAMPLES) == (silo.name == "silo 0")
        assert model.temperature == (TEMPERATURES[int(np.argmin(losses))] if silo.name == "silo 0" else 1)
        own = 1 - scale(p, model.temperature)
        label_scores = np.sort(own[np.arange(len(p)), silo.calibration.y.numpy()])
        n = len(label_scores)
        quantile = label_scores[-(-(n + 1) * 8 // 10) - 1]
        assert model.thresholds["set_threshold"] == pytest.approx(quantile, rel=1e-4)
        new = model.predict(silo.test.x)
        expected = scale(plain.predict(silo.test.x).probabilities, model.temperature)
        assert new.probabilities == pytest.approx(expected, abs=1e-6)
        assert (new.labels == plain.predict(silo.test.x).labels).all()
        assert [own_set.tolist() for own_set in new.sets] == [
            np.flatnonzero(row >= 1 - model.thresholds["set_threshold"]).tolist() for row in expected
        ]
        assert new.abstain.tolist() == (1 - expected.max(1) >= model.thresholds["answer_threshold"]).tolist()
        assert (new.uncertainty.entropy == plain.predict(silo.test.x).uncertainty.entropy).all()


def test_too_few_examples_give_all_classes_and_no_answer_and_say_so(result):
    found = calibrate_silos(result[0].models.held_out, CalibrationSettings())["silo 2"]
    assert (found.num_examples, found.set_threshold, found.answer_threshold) == (8, ALL_CLASSES, NO_ANSWER)
    assert found.notes == (
        "8 examples are too few for a coverage of 0.9, 9 are needed: every set has all classes",
        "8 examples cannot certify a risk of 0.05, 45 are needed: no answer is given",
    )
    model = result[0].calibrate().model("silo 2")
    predictions = model.predict(make_pattern_silos()[2].test.x)
    assert all(own.tolist() == [0, 1, 2] for own in predictions.sets)
    assert predictions.abstain.all()
    empty = model.predict(np.zeros((0, 1, 8, 8), np.float32))
    assert (empty.sets, empty.abstain.tolist()) == ([], [])
    always = calibrate_silos(result[0].models.held_out, CalibrationSettings(risk=0.0))["silo 2"]
    assert always.answer_threshold == ALL_ANSWERS
    assert len(always.notes) == 1


def test_another_silos_examples_matter_only_with_pooling(result):
    held_out = result[0].models.held_out
    alone = {"silo 2": held_out["silo 2"]}
    settings, pooled = CalibrationSettings(), CalibrationSettings(pooling=100)
    assert calibrate_silos(held_out, settings)["silo 2"] == calibrate_silos(alone, settings)["silo 2"]
    assert calibrate_silos(held_out, pooled)["silo 2"].set_threshold < ALL_CLASSES
    assert calibrate_silos(alone, pooled)["silo 2"].set_threshold == ALL_CLASSES


def test_a_silos_copy_carries_its_own_numbers_and_nobody_elses(result, tmp_path):
    calibrated, encoder = result[0].calibrate(coverage=0.8), result[1]
    calibrated.save(tmp_path / "copy", silo="silo 1")
    copy, x = load(tmp_path / "copy", encoder=encoder), make_silos()[1].test.x
    expected = calibrated.model("silo 1").predict(x)
    predictions = copy.predict(x)
    assert predictions.abstain.tolist() == expected.abstain.tolist()
    assert [s.tolist() for s in predictions.sets] == [s.tolist() for s in expected.sets]
    assert list(open_models(tmp_path / "copy", encoder=encoder).held_out) == ["silo 1"]
    for path in (tmp_path / "copy").iterdir():
        names = set(re.findall(rb"silo \d", path.read_bytes()))
        assert names == {b"silo 1"}, path
    copy.save(tmp_path / "second")
    assert load(tmp_path / "second", encoder=encoder).thresholds == copy.thresholds
    assert RunFolder(tmp_path / "second").held_out_path.exists()


def test_the_shared_model_is_not_calibrated(result):
    model = result[0].calibrate().model()
    assert not model.is_calibrated
    assert model.predict(make_silos()[0].test.x).sets is None


def test_held_out_examples_are_predictions_without_inputs(result, tmp_path):
    own, silo = result[0].models.held_out["silo 0"], make_silos()[0]
    model = result[0].model("silo 0")
    assert torch.equal(own.labels, silo.calibration.y)
    assert own.measurements.probabilities.numpy() == pytest.approx(model.predict(silo.calibration.x).probabilities)
    counts = own.measurements.codeword_counts
    assert counts.shape == (60, len(model.net.codebook.codewords))
    assert (counts.sum(1) == counts.sum(1)[0]).all()
    segments = model.net.encode_segments(silo.calibration.x[:5])[0]
    expected = torch.bincount(model.net.codebook.find_nearest(segments), minlength=counts.shape[1])
    assert torch.equal(counts[:5].sum(0).long(), expected)
    path = tmp_path / "held-out.safetensors"
    models = result[0].models
    save_held_out(path, models, models.held_out)
    assert path.stat().st_size < 98 * (3 + counts.shape[1] + 10) * 8 + 4000, "a few numbers per example"
    read = read_held_out(path, models)["silo 0"]
    assert (read.temperature, read.source) == (own.temperature, own.source)
    assert all(torch.equal(a, b) for a, b in zip(read.measurements, own.measurements, strict=True))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(
        InputError, match=r"held-out\.safetensors is damaged .*; move it away to predict; a new calibration "
    ):
        read_held_out(path, models)


def test_held_out_examples_of_another_model_are_refused(result, tmp_path):
    trained, encoder = result
    trained.save(tmp_path)
    assert sorted(open_models(tmp_path, encoder).held_out) == sorted(SIZES)
    state = dict(trained.models.model_state)
    name = next(n for n, t in state.items() if t.is_floating_point() and t.numel())
    changed = replace(trained.models, model_state={**state, name: state[name] + 1})
    changed.save(RunFolder(tmp_path).model_path)
    with pytest.raises(
        InputError, match=r"^\S*held-out\.safetensors was measured with another model than the one beside it; move it "
    ):
        load(tmp_path, encoder=encoder)


def test_prediction_sets_have_no_virtual_class():
    """VHL has an output per virtual class; too few examples ask for all classes, which are the real ones."""
    silos = make_silos()
    trained = train(make_method("vhl"), silos, make_encoder(), num_classes=NUM_CLASSES, hidden_size=16)
    assert trained.models.held_out["silo 2"].measurements.probabilities.shape[1] == 2 * NUM_CLASSES
    predictions = trained.calibrate().model("silo 2").predict(silos[2].test.x)
    assert all(own.tolist() == list(range(NUM_CLASSES)) for own in predictions.sets)
    found = calibrate_silos(trained.models.held_out, CalibrationSettings(), NUM_CLASSES)["silo 2"]
    assert found.mean_set_size == NUM_CLASSES


@pytest.mark.parametrize("name", METHODS)
def test_every_method_can_be_calibrated(name):
    silos = make_silos()
    method = make_method(name, **({"codebook": True} if name in ("uefl", "vq-fedavg") else {}))
    trained = train(method, silos, make_encoder(), num_classes=NUM_CLASSES, hidden_size=16)
    assert sorted(trained.models.held_out) == sorted(SIZES)
    predictions = trained.calibrate(risk=0.9).model("silo 0").predict(silos[0].test.x)
    assert len(predictions.sets) == len(predictions.abstain) == 30
    assert trained.models.held_out["silo 0"].measurements.codeword_counts.shape[1] == (
        0 if trained.server.access.shape[1] == 0 else int(trained.server.access[0].sum())
    )


def test_without_a_codebook_there_are_no_codewords():
    silos = make_silos()[:2]
    trained = train(make_method("fedbn", rounds=1, iterations=1), silos, make_encoder(), num_classes=NUM_CLASSES)
    assert trained.models.held_out["silo 0"].measurements.codeword_counts.shape == (60, 0)
    assert trained.calibrate().model("silo 1").predict(silos[1].test.x).sets is not None


def test_the_members_of_an_ensemble_have_codewords_of_their_own(tmp_path):
    settings = ["num_silos=1,1", "shifts=none,rotate:90", "train_per_silo=40", "test_per_silo=20", "encoder=mlp"]
    small = ["width=8", "hidden_size=8", "rounds=2", "extra_rounds=1", "iterations=1", "epochs=1", "num_codewords=8"]
    arguments = ["uefl", *settings, *small, "ensemble_size=2", "warmup_rounds=1", "calibration_fraction=0.25"]
    (experiment,) = parse_experiments(arguments, ["uefl"], "default").values()
    models = open_models(run(experiment, tmp_path))
    sizes = [len(member.codebook.codewords) for member in models.build("D1-1").net.members]
    counts = models.held_out["D1-1"].measurements.codeword_counts
    assert counts.shape == (10, sum(sizes))
    first, second = counts[:, : sizes[0]].sum(1), counts[:, sizes[0] :].sum(1)
    assert len(sizes) == 2
    assert first.tolist() == second.tolist()
    assert (first > 0).all()


def test_settings_outside_their_range_are_one_line():
    for name, value in (("coverage", 0.0), ("coverage", 1.0), ("risk", -0.1), ("risk", 1.0), ("pooling", -1)):
        with pytest.raises(InputError, match=f"^{name}={value} must be "):
            CalibrationSettings(**{name: value})


def test_a_calibration_of_another_model_or_a_damaged_one_is_refused(result, tmp_path):
    from uefl.experiment.calibration import write_calibrations

    trained, encoder = result
    trained.save(tmp_path)
    path = RunFolder(tmp_path).calibration_path
    found = calibrate_silos(trained.models.held_out, CalibrationSettings())
    write_calibrations(path, trained.models, found)
    assert open_models(tmp_path, encoder).is_calibrated
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "model": 1}))
    with pytest.raises(InputError, match=r"calibration\.json belongs to another model; move it away"):
        load(tmp_path, encoder=encoder)
    for text in ("{", "[]", json.dumps({**values, "silos": {"silo 0": {}}})):
        path.write_text(text)
        with pytest.raises(InputError, match=r"calibration\.json is damaged \("):
            load(tmp_path, encoder=encoder)


def test_coverage_on_new_examples_is_the_asked_one():
    """Random logits, 200 calibrations: the mean coverage is within four standard errors of (n+1)-rank / (n+1)."""
    covered = []
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        p = (2 * torch.randn(150, 4, generator=generator)).softmax(-1)
        y = torch.multinomial(p, 1, generator=generator)[:, 0]
        nothing = torch.zeros(50)
        own = HeldOut(y[:50], Measurements(p[:50], nothing, torch.zeros(50, 0)), temperature=1.3)
        found = calibrate_silos({"a": own}, CalibrationSettings())["a"]
        powers = p[50:].double() ** (1 / 1.3)
        scores = 1 - (powers / powers.sum(1, keepdim=True))[torch.arange(100), y[50:]]
        covered.append(float((scores <= found.set_threshold).double().mean()))
    expected = 46 / 51
    assert abs(np.mean(covered) - expected) < 4 * np.std(covered) / np.sqrt(200)
