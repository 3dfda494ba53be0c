"""The sentences about a silo that joins follow from the run's threshold and from what happened."""

import io
from dataclasses import replace

import pytest
from harness import NUM_CLASSES, SMALL_CODEBOOK, make_encoder, make_method, make_striped_silo, make_striped_silos
from rich.console import Console

import uefl
from uefl.experiment.join_report import (
    describe_choice,
    describe_last_decision,
    describe_missing_codewords,
    describe_own_parts,
    describe_uncertainty,
    is_uncertain,
    make_join_table,
)
from uefl.experiment.silo_models import SiloModels

NEWCOMER = make_striped_silo("bea", 24, 50, rotated=True)


@pytest.fixture(scope="module")
def models() -> SiloModels:
    """A run whose two silos have known entropies; γ = 0.5 and two standard errors decide."""
    codebook = replace(SMALL_CODEBOOK, gamma=0.5, min_standard_errors=2.0, min_examples=30)
    method = replace(make_method("uefl", codebook=True), codebook=codebook)
    silos = make_striped_silos()[:2]
    with pytest.warns(UserWarning, match="min_examples=30 is more than the largest silo has"):
        trained = uefl.train(method, silos, make_encoder(), num_classes=NUM_CLASSES, hidden_size=16).models
    reference = {"num_examples": 100.0, "entropy_variance": 0.04}
    facts = {
        name: replace(facts, reference={**reference, "entropy": entropy})
        for (name, facts), entropy in zip(trained.description.silos.items(), (0.4, 0.5))
    }
    return replace(trained, description=replace(trained.description, silos=facts))


def make_evaluation(entropy: float, variance: float = 0.04) -> dict[str, dict[str, float]]:
    return {"validation": {"entropy": entropy, "entropy_variance": variance, "num_examples": 100.0}}


@pytest.mark.parametrize(
    ("entropy", "variance", "expected"),
    [(0.7, 0.04, True), (0.59, 0.04, False), (0.7, 9.0, False)],  # threshold 0.6; 10.6, below it, 1.0 standard errors
)
def test_a_silo_is_uncertain_above_the_threshold_and_the_noise(models, entropy, variance, expected) -> None:
    evaluation = make_evaluation(entropy, variance)
    assert is_uncertain(models, "bea", evaluation) is expected
    text = describe_uncertainty(models, "bea", evaluation)
    assert "Threshold 0.60" in text
    assert ("bea is uncertain" in text) is expected
    assert ("bea is not uncertain" in text) is not expected


def test_the_standard_errors_are_those_from_the_least_uncertain_silo(models) -> None:
    text = describe_uncertainty(models, "bea", make_evaluation(0.7))
    assert "0.40 (ada) to 0.50 (bob)" in text
    assert "by 10.6 standard errors" in text  # 0.3 / sqrt(0.0004 + 0.0004)


def test_few_validation_examples_are_named_as_few(models) -> None:
    one = {"validation": {"entropy": 0.7, "entropy_variance": 0.0, "num_examples": 1.0}}
    text = describe_uncertainty(models, "bea", one)
    assert "on 1 validation example, too few to judge by" in text
    assert "bea is above it" in text
    assert "is uncertain" not in text
    assert "too few" not in describe_uncertainty(models, "bea", make_evaluation(0.7))


def test_the_table_fits_80_columns() -> None:
    metrics = {"accuracy": 0.5, "nll": 1.0, "entropy": 0.5}
    columns = ("shared model", "own parts, untrained", "own parts, trained")
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(make_join_table(dict.fromkeys(columns, metrics)))
    lines = console.export_text().splitlines()
    assert len(lines) == 8, "a label is wrapped"
    assert all(name in lines[2] for name in columns)


def test_what_is_not_known_is_said(models) -> None:
    assert "no validation examples" in describe_uncertainty(models, "bea", {})
    assert not is_uncertain(models, "bea", {})
    unknown = replace(models, description=replace(models.description, silos={}))
    assert "no entropies of its silos" in describe_uncertainty(unknown, "bea", make_evaluation(0.7))


def test_too_few_examples_for_codewords_are_named(models) -> None:
    result = uefl.join(models, NEWCOMER, epochs=0)
    line = describe_missing_codewords(models, result, 24)
    assert "min_examples=30 training examples (or groups), and the silo has 24 examples" in line
    assert describe_own_parts(models, result) == "own parts of bea: none"
    assert describe_choice(result) == "no training"


def test_the_last_decision_of_the_run_is_repeated_and_its_test_is_not() -> None:
    silos = {"ada": {"is_uncertain": True}, "bob": {"is_uncertain": False}}
    records = [{"round": 2, "has_decision": True, "silos": silos}, {"round": 3, "silos": {}}]
    assert describe_last_decision(records, "none") == "after round 2 the run reported ada as uncertain"
    assert "permutation test is not repeated" in describe_last_decision(records, "permutation")
    assert describe_last_decision(records[1:], "permutation") == ""
