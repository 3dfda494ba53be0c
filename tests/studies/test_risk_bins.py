"""The study of AUGRC from a histogram: its exact value, the earlier bins, a run and the table."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from studies import risk_bins as study
from uefl.core.selective_risk import augrc
from uefl.experiment.parsing import parse_experiments
from uefl.experiment.records import read_records
from uefl.experiment.run import run


def make_predictions(size: int = 500) -> tuple[torch.Tensor, torch.Tensor]:
    """Return entropies over many orders of magnitude, and whether the label is right: seldom where it is large."""
    generator = torch.Generator().manual_seed(0)
    entropy = 2.3 * torch.rand(size, generator=generator, dtype=torch.float64) ** 8
    return entropy, torch.rand(size, generator=generator) > entropy / 2.3


def test_the_exact_value_is_that_of_sorted_examples() -> None:
    entropy, is_correct = make_predictions()
    wrong = (~is_correct)[entropy.argsort()].double().cumsum(0)
    expected = float((wrong - (~is_correct)[entropy.argsort()].double() / 2).sum()) / len(entropy) ** 2
    assert augrc(study.count_exactly(entropy, is_correct)) == pytest.approx(expected, abs=1e-12)


def test_equal_entropies_are_accepted_together() -> None:
    counts = study.count_exactly(torch.tensor([0.5, 0.1, 0.5]), torch.tensor([True, True, False]))
    assert counts.tolist() == [[0, 1], [1, 1]]


def test_the_earlier_bins_do_not_separate_the_most_certain_examples() -> None:
    counts = study.count_in_earlier_bins(
        torch.tensor([0.0, 1e-7, 0.1, math.log(10)]), torch.tensor([True, False, True, False]), 10
    )
    assert counts.shape == (2, study.EARLIER_BINS)
    assert counts.sum() == 4
    assert counts[:, 0].tolist() == [1, 1]
    assert counts[0, -1] == 1


SMALL = ["num_silos=1,1,1", "train_per_silo=40", "test_per_silo=30", "encoder=mlp", "width=8", "hidden_size=8"]


def test_every_run_without_a_record_is_measured_once(tmp_path, monkeypatch) -> None:
    """Rows of a table share their data, so a run is known by its folder."""
    experiments = parse_experiments(["fedavg", "local-only", "rounds=1", "iterations=1", *SMALL], [], "default")
    setup = replace(study.SETUPS[study.SETUP], data=experiments["fedavg"].data, seeds=(0,))
    monkeypatch.setattr(study, "SETUPS", {study.SETUP: setup})
    folders = [run(experiment, tmp_path) for experiment in experiments.values()]
    path = tmp_path / "records.jsonl"
    for measured in (folders[:1], folders, folders):
        study.run(measured, path)
    records = read_records(path)
    assert [record["run"] for record in records] == [folder.name for folder in folders]
    assert [record["method"] for record in records] == ["fedavg", "local-only"]


def test_a_run_is_measured_by_the_predictions_of_its_models(tmp_path) -> None:
    (experiment,) = parse_experiments(["fedavg", "rounds=1", *SMALL], ["uefl"], "default").values()
    record = study.measure_run(run(experiment, tmp_path), experiment.data.load(0)[0])
    assert list(record) == ["entropy", "exact", "present", "earlier"]
    assert 0 < record["exact"] < 0.5
    assert record["present"] == pytest.approx(record["exact"], abs=0.005)


def test_the_table_has_the_largest_error_of_the_runs_of_a_row() -> None:
    records = [
        {"entropy": 0.011, "exact": 0.010, "present": 0.010, "earlier": 0.012},
        {"entropy": 0.012, "exact": 0.020, "present": 0.0201, "earlier": 0.019},
        {"entropy": 0.5, "exact": 0.1, "present": 0.1, "earlier": 0.1},
    ]
    lines = study.render_table(records).splitlines()
    assert lines[2] == "| 0.01 to 0.02 | 2 | 1.500 | 0.2000 | 0.0100 |"
    assert lines[3] == "| above 0.1 | 1 | 10.000 | 0.0000 | 0.0000 |"
    assert len(lines) == 4
