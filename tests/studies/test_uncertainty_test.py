"""The study of the test of uncertain silos: its parts in small, and its committed records."""

from pathlib import Path

import pytest
import torch

from studies import uncertainty_test as study
from uefl.core.entropy_comparison import count_entropies
from uefl.core.metrics import ENTROPY_COUNTS
from uefl.experiment.records import read_records

ROOT = Path(__file__).parents[2]


def test_silos_have_different_sizes_and_no_common_example():
    silos = study.draw_silos(1, study.NUM_HELD_OUT)
    assert len(silos) == 9
    assert all(study.SMALLEST <= len(silo) <= study.LARGEST for silo in silos)
    assert len(set(map(len, silos))) > 3
    assert len(torch.cat(silos).unique()) == sum(map(len, silos))
    assert not torch.equal(silos[0], study.draw_silos(2, study.NUM_HELD_OUT)[0])


def test_sums_of_examples_by_themselves_show_their_own_entropies():
    model, x, y = study.train_once(num_train=60, rounds=1)
    sums = study.compute_example_sums(model, x[:5], y[:5])
    for example in sums:
        assert example["num_examples"] == 1
        assert torch.equal(example[ENTROPY_COUNTS], count_entropies(example["entropy"][None], 10))
    assert len({float(example["entropy"]) for example in sums}) == 5
    assert study.list_false_reports(sums * 720, 2) == []


def test_interval_of_clopper_and_pearson():
    """Of R's binom.test."""
    assert study.compute_interval(8, 10) == pytest.approx((0.4439045, 0.9747893), abs=1e-6)
    assert study.compute_interval(0, 10) == pytest.approx((0.0, 0.3084971), abs=1e-6)
    assert study.compute_interval(10, 10) == pytest.approx((0.6915029, 1.0), abs=1e-6)


@pytest.mark.records
def test_recorded_federations_of_one_distribution_have_few_reports():
    (record,) = (r for r in read_records(ROOT / study.RECORDS) if r["part"] == "chance")
    assert record["federations"] == 400
    assert record["reports"] == len(record["federations with a report"]) <= study.MAX_REPORTS
    assert record["accuracy"] > 0.85


@pytest.mark.records
def test_the_page_quotes_the_recorded_rate_of_false_reports():
    (record,) = (r for r in read_records(ROOT / study.RECORDS) if r["part"] == "chance")
    low, high = (100 * end for end in record["interval"])
    share = 100 * record["reports"] / record["federations"]
    page = " ".join((ROOT / "docs/algorithm.md").read_text(encoding="utf-8").split())
    quoted = f"{record['reports']} have a report ({share:.1f} %, 95 % interval {low:.1f} to {high:.1f} %;"
    assert quoted in page
