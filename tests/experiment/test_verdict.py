"""Sentences of a comparison over seeds or folds claim no more than its interval, and name uncertain silos."""

from __future__ import annotations

from typing import Any

import pytest

from uefl.experiment.verdict import describe_uncertain_silos, describe_verdict, find_rival, format_signed

Decision = dict[str, Any]


def make_records(
    nll: dict[str, list[float]], accuracy: float = 0.9, decisions: list[Decision] | None = None
) -> list[dict[str, Any]]:
    """Return one record per method and seed; the validation NLL is the test NLL."""
    return [
        {
            "name": name,
            "repeat": f"seed={seed}",
            "nll": value,
            "accuracy": accuracy + 0.01 * (name == "uefl"),
            "validation_nll": value,
            "decision": decisions[seed] if decisions and name == "uefl" else {},
        }
        for name, values in nll.items()
        for seed, value in enumerate(values)
    ]


def make_decision(*uncertain_silos: str, test: str = "permutation", **entropy: float) -> Decision:
    silos = {name: {"entropy": value} for name, value in entropy.items()}
    return {"test": test, "threshold": 0.25, "silos": silos, "uncertain_silos": list(uncertain_silos)}


REFERENCE = [0.5, 0.6, 0.7]
ACCURACY = "of accuracy +1.0 (+1.0 to +1.0) points; 95 % intervals over 3 seeds."


@pytest.mark.parametrize(
    ("differences", "sentence"),
    [  # the half width of the interval of −0.1 ± 0.01 is 4.303 · 0.01 / √3
        (
            [-0.09, -0.1, -0.11],
            "By NLL, uefl is ahead of fedavg, the best other method by validation: "
            f"difference −0.100 (−0.125 to −0.075), lower is better; {ACCURACY}",
        ),
        (
            [0.09, 0.1, 0.11],
            "By NLL, uefl is behind fedavg, the best other method by validation: "
            f"difference +0.100 (+0.075 to +0.125), lower is better; {ACCURACY}",
        ),
        (
            [-0.01, -0.1, -0.19],
            "By NLL, no difference between uefl and fedavg, the best other method by validation, can be shown: "
            f"difference −0.100 (−0.324 to +0.124), lower is better; {ACCURACY}",
        ),
    ],
)
def test_a_verdict_is_one_sentence_that_claims_no_more_than_its_interval(
    differences: list[float], sentence: str
) -> None:
    nll = {"fedavg": REFERENCE, "uefl": [r + d for r, d in zip(REFERENCE, differences)]}
    assert describe_verdict(make_records(nll), "uefl", "seeds") == sentence


def test_folds_share_training_rows_so_that_less_can_be_claimed() -> None:
    nll = {"fedavg": REFERENCE, "uefl": [r + d for r, d in zip(REFERENCE, (-0.06, -0.1, -0.14))]}
    assert describe_verdict(make_records(nll), "uefl", "folds").startswith("By NLL, uefl is ahead")
    # 4.303 · √(1/3 + 1/4) · 0.04 = 0.131
    verdict = describe_verdict(make_records(nll), "uefl", "folds", test_to_train=0.25)
    assert verdict.startswith("By NLL, no difference")
    assert "difference −0.100 (−0.231 to +0.031)" in verdict


def test_a_single_run_has_no_interval_and_claims_nothing() -> None:
    records = make_records({"local-only": [0.9], "fedavg": [0.5], "uefl": [0.1]})
    assert describe_verdict(records, "uefl", "seeds") == (
        "No difference between uefl and fedavg, the best other method by validation, can be claimed from a single run "
        "each, which has no interval (NLL 0.100 and 0.500, lower is better; accuracy 0.910 and 0.900)."
    )


def test_the_rival_is_chosen_by_validation_and_not_by_test_examples() -> None:
    records = make_records({"local-only": REFERENCE, "fedavg": REFERENCE, "uefl": REFERENCE})
    for record in records:
        record["validation_nll"] = {"local-only": 0.4, "fedavg": 0.3, "uefl": 0.1}[record["name"]]
        record["nll"] = {"local-only": 0.1, "fedavg": 0.9, "uefl": 0.1}[record["name"]]
    assert find_rival(records, "uefl") == "fedavg"


def test_runs_are_paired_by_seed_in_any_order_of_the_records() -> None:
    records = make_records({"fedavg": REFERENCE, "uefl": [r - 0.1 for r in REFERENCE]})
    shuffled = [records[i] for i in (2, 4, 0, 3, 1, 5)]
    assert "difference −0.100 (−0.100 to −0.100)" in describe_verdict(shuffled, "uefl", "seeds")


def test_uncertain_silos_are_named_with_their_entropy_and_the_threshold() -> None:
    decisions = [
        make_decision("east", "south", east=0.5, south=0.4, west=0.2),
        make_decision("east", east=0.7, south=0.2, west=0.2) | {"threshold": 0.35},  # south's e_k does not count here
    ]
    records = make_records({"fedavg": [0.5, 0.5], "uefl": [0.5, 0.5]}, decisions=decisions)
    assert describe_uncertain_silos(records, "uefl", "seeds") == (
        "uefl found silos more uncertain "
        "than the least uncertain one beyond chance: east in 2 of 2 seeds (entropy e_k 0.60, threshold 0.30), south "
        "in 1 of 2 seeds (entropy e_k 0.40, threshold 0.25)."
    )


def test_a_threshold_without_a_test_does_not_speak_of_chance() -> None:
    decision = make_decision("east", test="none", east=0.5, west=0.2)
    sentence = describe_uncertain_silos(make_records({"uefl": [0.5]}, decisions=[decision]), "uefl", "seeds")
    assert sentence == (
        "uefl found silos more uncertain "
        "than the least uncertain one: east in 1 of 1 seeds (entropy e_k 0.50, threshold 0.25)."
    )


def test_where_no_silo_is_uncertain_the_highest_entropy_is_given() -> None:
    decisions = [make_decision(east=0.3, west=0.1), make_decision(east=0.2, west=0.1)]
    records = make_records({"uefl": [0.5, 0.5]}, decisions=decisions)
    assert describe_uncertain_silos(records, "uefl", "folds") == (
        "uefl found no silo more uncertain "
        "than the least uncertain one beyond chance in 2 folds (highest: east, entropy "
        "e_k 0.25, threshold 0.25)."
    )
    without = describe_uncertain_silos(make_records({"uefl": [0.5]}), "uefl", "folds")
    assert without == "uefl decided nothing: no silo's uncertainty was compared."


@pytest.mark.parametrize(
    ("value", "text"), [(-0.0004, "0.000"), (0.0004, "0.000"), (-0.0006, "−0.001"), (0.02, "+0.020")]
)
def test_a_number_that_rounds_to_zero_has_no_sign(value: float, text: str) -> None:
    assert format_signed(value, 3) == text


def test_silos_with_tensors_of_their_own_are_not_compared() -> None:
    decision = make_decision(test="not_comparable", east=0.5, west=0.2)
    sentence = describe_uncertain_silos(make_records({"uefl": [0.5]}, decisions=[decision]), "uefl", "seeds")
    assert sentence == (
        "uefl compared no silo's uncertainty: silos predict with tensors of their own, such as batch norm."
    )
