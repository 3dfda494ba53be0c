"""The choice of a silo by its inputs: the nearest codewords, and a warning if none are near."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness import NUM_CLASSES, SMALL_CODEBOOK, make_encoder, make_method, make_striped_silo

from uefl.core.errors import InputError
from uefl.data.shifts import apply_shift
from uefl.experiment.loading import open_models
from uefl.experiment.parsing import parse_experiments
from uefl.experiment.run import run
from uefl.experiment.silo_choice import choose_silo, measure_distances, measure_entropy
from uefl.experiment.train import train

SILOS = [make_striped_silo("up", 60, 0), make_striped_silo("down", 60, 10, rotated=True)]


def train_small(name, **fields):
    return train_method(make_method(name, **fields))


def train_method(method):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        encoder = make_encoder()
    return train(method, SILOS, encoder, num_classes=NUM_CLASSES, hidden_size=16)


@pytest.fixture(scope="module")
def extended():
    result = train_small("uefl", rounds=6, extra_rounds=4, codebook=SMALL_CODEBOOK)
    assert not bool((result.server.access == result.server.access[:1]).all())
    return result


def test_the_distances_are_those_of_the_record(extended):
    for silo in SILOS:
        distances = measure_distances(extended.model(silo.name), silo.validation.x)
        recorded = extended.records[-1]["silos"][silo.name]["validation"]["quantization_error"]
        assert distances.mean().item() == pytest.approx(recorded, rel=1e-5)


def test_the_silo_with_the_smallest_distance_is_chosen(extended):
    choice = choose_silo(extended.models, SILOS[1].test.x)
    distances = {s.name: measure_distances(extended.model(s.name), SILOS[1].test.x).mean().item() for s in SILOS}
    assert choice.scores == pytest.approx(distances)
    assert choice.silo_name == min(distances, key=distances.get)
    assert choice.fits
    assert choice.describe() == (
        f"silo auto: {choice.silo_name} fits best, mean distance to its codewords {distances[choice.silo_name]:.3g}; "
        "no coverage is guaranteed for a silo that is chosen by its inputs"
    )


def test_the_choice_leaves_the_uncertainty_of_the_chosen_silo_as_it_is(extended):
    """The draws are addressed by the silo, whether the user or its inputs chose it."""
    named = {silo.name: extended.model(silo.name).predict(SILOS[1].test.x) for silo in SILOS}
    choice = choose_silo(extended.models, SILOS[1].test.x)
    chosen = extended.models.build(choice.silo_name).predict(SILOS[1].test.x)
    for one, other in zip(named[choice.silo_name].uncertainty, chosen.uncertainty, strict=True):
        assert one.tolist() == other.tolist()


def test_inputs_that_no_silo_has_are_named(extended):
    choice = choose_silo(extended.models, torch.randn(200, 1, 8, 8, generator=torch.Generator().manual_seed(0)))
    assert not choice.fits
    assert choice.describe().startswith("warning: silo auto: no silo fits these inputs; the nearest is ")
    assert "standard errors from that of its own examples; no coverage is guaranteed" in choice.describe()


def test_personal_models_are_chosen_by_their_uncertainty():
    result = train_small("local-only", rounds=2, iterations=1)
    x = SILOS[0].test.x
    choice = choose_silo(result.models, x)
    entropies = {s.name: result.model(s.name).predict(x).uncertainty.entropy.mean() for s in SILOS}
    assert choice.measure == "mean predictive entropy"
    assert choice.scores == pytest.approx(entropies)
    assert choice.silo_name == min(entropies, key=entropies.get)


@pytest.mark.parametrize("extend", [SMALL_CODEBOOK.extend, "none"])
def test_fine_tuned_models_are_chosen_by_codewords_where_these_differ(extend):
    method = make_method("uefl", rounds=6, extra_rounds=4, fine_tuning_epochs=2)
    result = train_method(replace(method, codebook=replace(SMALL_CODEBOOK, extend=extend)))
    has_own_codewords = not bool((result.server.access == result.server.access[:1]).all())
    assert has_own_codewords == (extend != "none")
    x = SILOS[1].test.x
    choice = choose_silo(result.models, x)
    measure = measure_distances if has_own_codewords else measure_entropy
    scores = {s.name: measure(result.model(s.name), x).mean().item() for s in SILOS}
    assert choice.scores == pytest.approx(scores)
    assert choice.silo_name == min(scores, key=scores.get)
    assert choice.measure == ("mean distance to its codewords" if has_own_codewords else "mean predictive entropy")
    copy = choose_silo(result.models.select_silo("up"), x)
    assert (copy.silo_name, copy.measure) == ("up", "mean distance to its codewords")


def test_equal_models_need_no_choice():
    result = train_small("fedavg", rounds=1, iterations=1)
    choice = choose_silo(result.models, SILOS[0].test.x)
    assert (choice.silo_name, choice.fits) == ("", True)
    assert choice.describe().startswith("silo auto: the models of all silos are equal; no coverage")
    with pytest.raises(InputError, match=r"^silo auto needs at least one input$"):
        choose_silo(result.models, SILOS[0].test.x[:0])


@pytest.mark.real
def test_on_rotated_digits_the_choice_is_mostly_a_silo_of_the_right_rotation(tmp_path: Path) -> None:
    """A silo that never received codewords of its own cannot be nearest; the others of its rotation are."""
    sizes = ["num_silos=2,2,2", "train_per_silo=300", "test_per_silo=60", "width=8", "hidden_size=64"]
    settings = [*sizes, "rounds=4", "extra_rounds=2", "mc_samples=3", "evaluate_local=false"]
    codebook = ["num_codewords=64", "gamma=0", "min_standard_errors=0"]
    (experiment,) = parse_experiments(["uefl", *settings, *codebook], ["uefl"], "default").values()
    models = open_models(run(experiment, tmp_path))
    silos, images = experiment.data.load(0)
    domains = {silo.name: silo.domain for silo in silos}
    choices = {(silo.name, n): choose_silo(models, silo.test.x[:n]) for silo in silos for n in (20, 60)}
    right = [domains[choice.silo_name] == domains[name] for (name, _), choice in choices.items()]
    assert sum(right) >= 0.8 * len(right), {key: choice.silo_name for key, choice in choices.items()}
    assert sum(choice.fits for choice in choices.values()) >= 0.8 * len(choices)
    for shift in ("noise:80", "contrast:0.2"):
        x = apply_shift(images.x[:200], shift, 0, torch.arange(200))
        assert not choose_silo(models, models.description.input_format.convert(x)).fits
