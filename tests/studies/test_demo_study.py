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
    TRIALS_FILE,
    add_seeds,
    list_trials,
    make_experiment,
    render_block,
    render_trials,
)
from studies.demo_trials import TRIAL_SEEDS, TRIALS
from uefl.experiment.demo_comparisons import COMPARISONS
from uefl.experiment.experiment import Experiment
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
    assert not {*SEEDS} & {*TRIAL_SEEDS, 290, 291, 292}, "seeds of trials, and those that the demo shows"


@pytest.mark.records
def test_the_log_has_the_table_of_all_trials() -> None:
    records = read_records(ROOT / TRIALS_FILE)
    assert all(run.is_recorded(records) for run in list_trials())
    assert render_trials(records) in (ROOT / "docs" / "log.md").read_text()


ROWS = [
    ("hospitals", "logistic regression alone", ["identity"]),
    ("hospitals", "local-only", ["mlp"]),
    ("hospitals", "fedavg", ["identity", "mlp"]),
    ("hospitals", "fine-tuned fedavg", ["identity", "mlp"]),
    ("hospitals", "uefl", ["identity", "mlp"]),
    ("digits", "fedavg", ["residual"]),
    ("digits", "fine-tuned fedavg", ["residual"]),
    ("digits", "uefl", ["residual"]),
]


def select_trials(data: str, row: str, encoders: list[str]) -> dict[tuple[str, str], Experiment]:
    """Return the trials of a row by data and label: the same method, examples and rounds as in the demo."""
    comparison = COMPARISONS[data]
    repeat = comparison.repeats[0]
    shown = comparison.make_experiments()[row, repeat]
    trials = {
        (name, label): make_experiment(f"{arguments} {repeat}")
        for name in TRIALS
        if name.startswith(("hospitals",) if data == "hospitals" else ("digits", "3, 1 and 1"))
        for label, arguments in TRIALS[name].items()
    }
    return {
        key: e
        for key, e in trials.items()
        if e.method_name == shown.method_name and e.model.encoder in encoders
        if (e.data, e.method.total_rounds) == (shown.data, shown.method.total_rounds)
    }


@pytest.mark.records
@pytest.mark.parametrize(("data", "row", "encoders"), ROWS)
def test_the_demo_has_the_settings_with_the_lowest_validation_nll(data: str, row: str, encoders: list[str]) -> None:
    scores = defaultdict[tuple[str, str], list[float]](list)
    for record in read_records(ROOT / TRIALS_FILE):
        scores[record["setup"], record["method"]].append(record["validation_nll"])
    trials = select_trials(data, row, encoders)
    best = min(trials, key=lambda trial: mean(scores[trial]))
    comparison = COMPARISONS[data]
    assert trials[best] == comparison.make_experiments()[row, comparison.repeats[0]]


@pytest.mark.parametrize(("data", "row", "encoders"), ROWS)
def test_uefl_had_no_more_trials_than_any_other_row(data: str, row: str, encoders: list[str]) -> None:
    own = next(encoders for name, other, encoders in ROWS if (name, other) == (data, "uefl"))
    counts = [len({*map(repr, select_trials(data, r, e).values())}) for r, e in ((row, encoders), ("uefl", own))]
    assert counts[0] >= counts[1]


@pytest.mark.records
def test_fedavg_chose_the_number_of_images_and_rounds_of_the_digits() -> None:
    scores = defaultdict[str, list[float]](list)
    for record in read_records(ROOT / TRIALS_FILE):
        if record["setup"] == "digits, less time":
            scores[record["method"]].append(record["validation_nll"])
    chosen = make_experiment(TRIALS["digits, less time"][min(scores, key=lambda label: mean(scores[label]))])
    shown = COMPARISONS["digits"].make_experiments()["fedavg", COMPARISONS["digits"].repeats[0]]
    assert (shown.data, shown.method.total_rounds) == (chosen.data, chosen.method.total_rounds)
    names = ("schedule", "lr", "epochs", "batch_size", "optimizer")
    assert all(getattr(shown.method.local, name) == getattr(chosen.method.local, name) for name in names)
