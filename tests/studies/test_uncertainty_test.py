"""The study of the test of uncertain silos: its parts in small, and its committed records."""

from pathlib import Path

import pytest
import torch

from studies import uncertainty_test as study
from uefl.core.entropy_comparison import count_entropies
from uefl.core.federation import SPLITS
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


@pytest.mark.parametrize("data", study.FEDERATION_SETTINGS)
def test_a_federation_of_one_distribution_has_the_examples_and_sizes_of_its_silos(data):
    silos, _ = study.parse_run(study.FEDERATION_SETTINGS[data], 1).data.load(1)
    divided = study.divide_at_random(silos, 1)
    assert [[len(s.examples(split).y) for split in SPLITS] for s in divided] == [
        [len(s.examples(split).y) for split in SPLITS] for s in silos
    ]
    before, after = (
        sorted(tuple(row) for s in group for split in SPLITS for row in s.examples(split).x.flatten(1).tolist())
        for group in (silos, divided)
    )
    assert before == after
    assert not torch.equal(divided[0].train.x, silos[0].train.x)


def test_all_decisions_of_a_federation_are_counted(monkeypatch):
    short = ["heart", "rounds=3", "extra_rounds=1", "group_rounds=0", "uncertainty_level=0.99", "gamma=0"]
    monkeypatch.setitem(study.FEDERATION_SETTINGS, "hospitals", short)
    reported, num_decisions = study.list_federation_reports("hospitals", 3)
    assert num_decisions == 2
    assert reported


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
@pytest.mark.parametrize("data", study.FEDERATION_SETTINGS)
def test_recorded_trained_federations_of_one_distribution_have_few_reports(data):
    records = [r for r in read_records(ROOT / study.RECORDS) if r["part"] == "federations"]
    (record,) = (r for r in records if r["data"] == data)
    assert record["arguments"] == study.FEDERATION_SETTINGS[data]
    assert record["federations"] == record["decisions"] == 400
    assert record["reports"] == len(record["federations with a report"]) <= study.MAX_REPORTS


@pytest.mark.records
def test_recorded_runs_find_the_minority_and_no_silo_of_the_majority():
    *_, record = (r for r in read_records(ROOT / study.RECORDS) if r["part"] == "minority")
    assert len(record["runs"]) == 20
    assert record["found"] >= 0.8 * len(record["runs"])
    assert not any(name.startswith(study.MAJORITY) for run in record["runs"] for name in run["reported"])


@pytest.mark.records
@pytest.mark.parametrize(("part", "data"), [("chance", None), *(("federations", d) for d in study.FEDERATION_SETTINGS)])
def test_the_page_quotes_the_recorded_rates_of_false_reports(part, data):
    (record,) = (r for r in read_records(ROOT / study.RECORDS) if r["part"] == part and r.get("data") == data)
    low, high = (100 * end for end in record["interval"])
    share = 100 * record["reports"] / record["federations"]
    command = f"| `{record['command'].split('studies.uncertainty_test ')[1]}` |"
    (row,) = (line for line in (ROOT / "docs/algorithm.md").read_text(encoding="utf-8").splitlines() if command in line)
    assert row.endswith(f"{command} {record['reports']} ({share:.1f} %, {low:.1f} to {high:.1f} %) |")
