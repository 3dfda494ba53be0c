"""The study of which silos should get new codewords: its rule, and its committed records."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from studies import receivers as study
from uefl.algorithms.extensible_codebook import Extend, ExtensibleCodebook
from uefl.experiment.records import read_records

ROOT = Path(__file__).parents[2]


def make_scores(**gains: list[float]) -> dict[str, dict[str, list[float]]]:
    """Return scores on two data sets of different level; a gain is in percent of the paper's value."""
    return {
        data: {value: [level * (1 - g / 100) for g in gains.get(value, [0.0, 0.0, 0.0])] for value in get_args(Extend)}
        for data, level in (("one", 1.0), ("other", 0.1))
    }


def test_gains_are_relative_so_that_every_data_set_counts_the_same() -> None:
    scores = make_scores(all=[1.0, 2.0, 3.0])
    assert study.compute_gains(scores["other"], "all") == pytest.approx([1.0, 2.0, 3.0])
    assert study.average_gains(scores, "all") == pytest.approx([1.0, 2.0, 3.0])
    assert study.average_gains(scores, study.PAPER) == [0.0, 0.0, 0.0]


def test_folds_count_once_per_seed_in_the_rule_and_share_patients_in_their_interval() -> None:
    values = {"uncertain": [1.0] * 10, "all": [0.99, 0.99, 0.99, 0.98, 0.95] * 2}  # gains 1, 1, 1, 2, 5 % per seed
    scores = {"hospitals": {value: values.get(value, [1.0] * 10) for value in get_args(Extend)}}
    assert study.average_gains(scores, "all") == pytest.approx([2.0, 2.0])
    of_folds, of_seeds = study.compare_value(scores, "all")
    assert (of_folds.mean, of_seeds.mean) == pytest.approx((2.0, 2.0))
    # s² = (3 · 1² + 0 + 3²) · 2 / 9, its factor 1/10 + 1/4, and 2.262 is the quantile of t with 9 degrees of freedom
    assert of_folds.low == pytest.approx(2 - 2.262 * (0.35 * 24 / 9) ** 0.5, abs=1e-3)


def test_a_value_becomes_the_default_only_if_its_gain_is_above_chance() -> None:
    assert study.choose_default(make_scores(all=[2.0, 2.1, 2.2], random=[1.0, 1.1, 1.2])) == "all"
    assert study.choose_default(make_scores(all=[-5.0, 2.1, 9.0])) == study.PAPER
    assert study.choose_default(make_scores(none=[-1.0, -1.1, -1.2])) == study.PAPER


def test_the_table_has_every_value_and_what_the_rule_chooses() -> None:
    lines = study.render_table(make_scores(all=[2.0, 2.1, 2.2])).splitlines()
    assert [line.split(" | ")[0].strip("| ") for line in lines[2:7]] == list(get_args(Extend))
    assert "+2.10 (+1.85 to +2.35)" in lines[2 + get_args(Extend).index("all")]  # 4.303 · 0.1 / √3
    assert lines[-1] == "By the rule, the default is `all`."


def test_every_value_has_the_same_runs() -> None:
    runs = study.list_runs()
    assert len(runs) == len(get_args(Extend)) * len(study.SEEDS) * (2 + len(study.FOLDS))
    assert all(run.experiment.method.codebook.extend == run.method for run in runs)


@pytest.mark.records
def test_the_default_is_what_the_recorded_rule_chooses() -> None:
    records = read_records(ROOT / study.RECORDS)
    assert len(records) == len(study.list_runs())
    assert ExtensibleCodebook().extend == study.choose_default(study.collect_scores(records))


@pytest.mark.records
def test_the_log_has_the_table_of_the_records() -> None:
    table = study.render_table(study.collect_scores(read_records(ROOT / study.RECORDS)))
    assert table in (ROOT / "docs" / "log.md").read_text(encoding="utf-8")
