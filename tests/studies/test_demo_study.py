"""The README's tables over seeds are what its command makes from the records, and trials chose the demo's settings."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import mean

import pytest

from studies.demo import (
    BLOCK,
    RECORDS_FILE,
    SEEDS,
    TRIAL_SEEDS,
    TRIALS,
    TRIALS_FILE,
    add_seeds,
    list_trials,
    make_experiment,
    render_block,
    render_trials,
)
from uefl.experiment.demo_comparisons import COMPARISONS
from uefl.experiment.records import read_records

ROOT = Path(__file__).parents[2]


@pytest.mark.records
def test_the_readme_has_the_block_that_its_command_makes() -> None:
    (match,) = BLOCK.finditer((ROOT / "README.md").read_text())
    assert match[0] == match[1] + render_block(read_records(ROOT / RECORDS_FILE)) + match[2]


@pytest.mark.records
def test_the_records_are_runs_of_the_present_demo_with_fresh_seeds() -> None:
    records = read_records(ROOT / RECORDS_FILE)
    expected = [
        f"{arguments} {repeat}"
        for comparison in map(add_seeds, COMPARISONS.values())
        for arguments in comparison.arguments.values()
        for repeat in comparison.repeats
    ]
    assert sorted(record["arguments"] for record in records) == sorted(expected)
    assert not {*SEEDS} & {*TRIAL_SEEDS, *range(3)}


@pytest.mark.records
def test_the_log_has_the_table_of_all_trials() -> None:
    records = read_records(ROOT / TRIALS_FILE)
    assert all(run.is_recorded(records) for run in list_trials())
    assert render_trials(records) in (ROOT / "docs" / "log.md").read_text()


def select_labels(data: str, beginning: str) -> list[str]:
    return [label for label in TRIALS[data] if label.startswith(beginning)]


@pytest.mark.records
@pytest.mark.parametrize(
    ("data", "row", "candidates"),
    [
        ("hospitals", "logistic regression alone", select_labels("hospitals", "logistic regression alone, ")),
        ("hospitals", "fedavg", [f"FedAvg of logistic regression, L2 {w:g}" for w in (0.003, 0.01, 0.03)]),
        ("hospitals", "fine-tuned fedavg", [x for x in select_labels("hospitals", "FedAvg") if "fine-tuned" in x]),
        ("hospitals", "uefl", select_labels("hospitals", "UEFL")),
        ("digits, less time", "fedavg", list(TRIALS["digits, less time"])),
        ("digits, codebook", "uefl", select_labels("digits, codebook", "UEFL")),
        ("digits, codebook", "fine-tuned fedavg", ["FedAvg, fine-tuned", "FedAvg, fine-tuned, 10 epochs"]),
    ],
)
def test_the_demo_has_the_settings_with_the_lowest_validation_nll(data: str, row: str, candidates: list[str]) -> None:
    scores = defaultdict[str, list[float]](list)
    for record in read_records(ROOT / TRIALS_FILE):
        scores[record["method"]].append(record["validation_nll"])
    best = min(candidates, key=lambda label: mean(scores[label]))
    comparison = COMPARISONS[data.partition(",")[0]]
    repeat = comparison.repeats[0]
    assert make_experiment(f"{TRIALS[data][best]} {repeat}") == comparison.make_experiments()[row, repeat]
