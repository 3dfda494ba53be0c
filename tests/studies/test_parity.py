"""Parity with Flower: a short comparison with Flower's strategies, the committed records, and their page."""

from pathlib import Path

import pytest
from harness import import_or_skip

from studies import parity
from uefl.experiment.records import read_records

ROOT = Path(__file__).parents[2]


def find_differences(record: dict) -> tuple[list[float], list[float]]:
    """Find the differences to Flower of the method and of its changed form."""
    differences = record["relative_differences"]
    (changed,) = (values for label, values in differences.items() if label.startswith(parity.CHANGED))
    return differences["this package"], changed


@pytest.fixture(scope="module")
def workload():
    import_or_skip("flwr")
    return parity.make_workload(num_rounds=2, train_sizes=(90, 60, 30), test_per_silo=20)


@pytest.mark.parametrize("precision", parity.MAX_DIFFERENCES)
@pytest.mark.parametrize("name", parity.METHODS)
def test_a_short_training_gives_the_weights_of_flowers_strategy(name, precision, workload):
    record = parity.compare_systems(name, workload, precision)
    same, changed = find_differences(record)
    assert len(same) == len(changed) == 2
    assert max(same) < parity.MAX_DIFFERENCES[precision]
    assert min(changed) > 10 * parity.MAX_DIFFERENCES[precision]
    assert record["accuracy"]["this package"] == pytest.approx(record["accuracy"]["Flower"], abs=1e-12)


@pytest.mark.records
def test_in_double_precision_the_recorded_differences_to_flower_are_within_the_bound():
    records = read_records(ROOT / parity.RECORDS)
    assert [(r["method"], r["precision"]) for r in records] == [
        (name, precision) for precision in parity.MAX_DIFFERENCES for name in parity.METHODS
    ]
    for record in records:
        if record["precision"] == "float64":
            same, changed = find_differences(record)
            assert max(same) < parity.MAX_DIFFERENCES["float64"] < min(changed)
            accuracy = record["accuracy"]
            assert accuracy["this package"] == pytest.approx(accuracy["Flower"], abs=1e-12)
            assert accuracy["Flower"][-1] > 0.5  # chance is 0.1


@pytest.mark.records
def test_the_page_on_parity_is_what_its_records_make():
    assert (ROOT / parity.PAGE).read_text() == parity.render_page(read_records(ROOT / parity.RECORDS))


@pytest.mark.records
def test_in_single_precision_two_recorded_runs_of_flower_exceed_the_bound_too():
    for record in read_records(ROOT / parity.RECORDS):
        if record["precision"] == "float32":
            differences = record["relative_differences"]
            runs_of_flower = [values[-1] for label, values in differences.items() if label.startswith("Flower, ")]
            assert len(runs_of_flower) == 2
            assert min(runs_of_flower) > parity.MAX_DIFFERENCES["float32"]
