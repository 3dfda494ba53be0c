"""The studies of calibration and drift: their parts in small, and their committed records."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from studies import after_training, calibration, drift
from uefl.core.conformal import compute_scores
from uefl.experiment.records import read_records

ROOT = Path(__file__).parents[2]
TINY = ("rounds=2", "extra_rounds=1", "iterations=1", "epochs=1", "mc_samples=2", "encoder=mlp", "width=8")
SMALL = ("hidden_size=8", "num_codewords=8", "warmup_rounds=1", "train_per_silo=60", "test_per_silo=40")
CHANGES = (*TINY, *SMALL, "calibration_fraction=0.5")


def make_setup(method):
    changes = [c for c in CHANGES if method == "uefl" or not c.startswith(("num_codewords", "warmup"))]
    names = {change.partition("=")[0] for change in changes}
    digits = after_training.SETUPS["digits"]
    kept = [s for s in digits.settings if s.partition("=")[0] not in names]
    codebook = tuple(s for s in digits.codebook if s.partition("=")[0] not in names)
    return digits._replace(settings=(*kept, *changes), calibration_size=30, codebook=codebook)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    root = tmp_path_factory.mktemp("study")
    return {m: after_training.train_method(make_setup(m), m, 0, root, "cpu") for m in ("uefl", "fedavg")}


def test_pools_are_the_calibration_and_test_images_as_the_silo_sees_them(trained):
    from uefl.experiment.parsing import parse_experiments

    models, pools = trained["uefl"]
    (experiment,) = parse_experiments(["uefl", *make_setup("uefl").settings, "seed=0"], (), "default").values()
    for silo, pool in zip(experiment.data.load(0)[0], pools, strict=True):
        inputs = models.description.input_format.convert(pool.pixels)
        assert torch.equal(inputs, torch.cat([silo.calibration.x, silo.test.x]))
        assert torch.equal(pool.y, torch.cat([silo.calibration.y, silo.test.y]))


def test_a_perfectly_calibrated_silo_has_the_asked_coverage_and_band():
    generator = torch.Generator().manual_seed(0)
    p = (2 * torch.randn(1000, 5, generator=generator)).softmax(-1)
    y = torch.multinomial(p, 1, generator=generator)[:, 0]
    found = calibration.measure_silo(compute_scores(p), y, 200, 3, 60)
    assert found["coverage"] == pytest.approx(181 / 201, abs=0.01)
    assert found["share_inside"] > 0.9
    assert found["band"][0] < 0.9 < found["band"][1]
    low, high = calibration.compute_band(200, 800)
    # The same by drawing: calibrate on 200 uniform scores, count 800 others.
    rng = np.random.default_rng(0)
    quantiles = np.sort(rng.random((4000, 200)), 1)[:, 180]
    counts = rng.binomial(800, quantiles)
    assert np.mean((counts >= low) & (counts <= high)) == pytest.approx(0.99, abs=0.006)


def test_the_band_of_one_split_and_of_their_mean_are_those_of_random_splits_of_one_pool():
    """One fixed pool, divided 4000 times: the counts have the law of the band, and means of 100 that of the mean."""
    rng, n, m = np.random.default_rng(0), 200, 800
    scores = rng.exponential(size=n + m)  # any pool
    orders = rng.permuted(np.tile(scores, (4000, 1)), axis=1)
    counts = (orders[:, n:] <= np.sort(orders[:, :n], 1)[:, 180:181]).sum(1)
    low, high = calibration.compute_band(n, m)
    assert np.mean((counts >= low) & (counts <= high)) == pytest.approx(0.991, abs=0.006)  # 4 standard errors
    assert counts.mean() / m == pytest.approx(181 / 201, abs=0.0015)  # 4 standard errors
    means = counts.reshape(40, 100).mean(1) / m
    low_mean, high_mean = calibration.compute_mean_band(n, m, 100, 0.99)
    assert np.mean((means >= low_mean) & (means <= high_mean)) >= 0.9  # 36 of 40, at 39.6 expected
    assert high_mean - low_mean < 0.125 * (high - low) / m * 1.2, "a tenth of the width of one split, roughly"


def test_counts_outside_bands_have_the_law_of_the_table_and_too_many_are_seen():
    silo = {"calibration": 200, "test": 800, "coverage": 181 / 201, "first_inside": True, "share_inside": 0.99}
    records = [{"method": "uefl", "seed": 0, "splits": 100, "silos": {f"D{i}": dict(silo) for i in range(9)}}]
    assert calibration.render_bands(records).splitlines()[2].startswith("| uefl | 0 of 9 | 1.00 | 9 of 900 | 0.")
    records[0]["silos"]["D1"] |= {"share_inside": 0.8, "coverage": 0.88, "first_inside": False, "first_coverage": 0.8}
    _, first, p_first, _, p_splits, mean_outside, p_mean = (
        calibration.render_bands(records).splitlines()[2].split(" | ")
    )
    assert (first, mean_outside) == ("1 of 9", "1 of 9")
    assert float(p_first) == pytest.approx(1 - 0.99**9, abs=0.02)
    assert p_splits == "0.00"
    assert p_mean == "0.09 |"
    assert 0.005 < calibration.compute_outside_probability(200, 800) <= 0.01


def test_the_page_of_calibration_is_made_from_records_alone(trained, tmp_path):
    models, pools = trained["uefl"]
    silos = calibration.measure_method(models, pools, 30, 0, 5, "cpu")
    assert list(silos) == ["D1-1", "D2-1", "D3-1"]
    out = tmp_path / "records.jsonl"
    after_training.write_record(
        out, "calibration", {"data": "digits", "method": "uefl", "seed": 0, "splits": 5, "silos": silos}
    )
    text = calibration.render_page(read_records(out))
    assert "| uefl | 1 |" in text
    assert "| uefl | 0 | D3-1 | 30 |" in text
    assert "studies.calibration" in text
    json.dumps(silos)


def test_commands_of_a_page_have_no_path_of_a_machine():
    commands = ("python -m studies.drift run --seeds 1 --runs /a/b --out /a/c.jsonl", "python -m studies.drift run")
    records = [{"command": command, "uefl": "1", "torch": "2"} for command in commands]
    expected = "Commands: `python -m studies.drift run --seeds 1`, `python -m studies.drift run` (uefl 1, torch 2)."
    assert after_training.render_commands(records) == expected


def test_drift_counts_alarms_of_each_test(trained, monkeypatch):
    monkeypatch.setattr(drift, "SIZES", (20,))
    monkeypatch.setattr(drift, "CHANGES", ("none", "rotate:45"))
    rows = []
    for method in ("uefl", "fedavg"):
        models, pools = trained[method]
        rows += drift.measure_models(models, pools[:1], 0, {True: 2, False: 2}, "cpu")
    assert {row["test"] for row in rows} == set(drift.TESTS)
    assert {row["change"] for row in rows} == {"none", "rotate:45"}
    text = drift.render_false_alarms(rows) + drift.render_power(rows)
    assert "rotate:45" in text


def test_a_strong_change_is_an_alarm_and_none_is_rarely_one():
    rng = np.random.default_rng(0)
    own = drift.Values(rng.random(400), np.zeros((400, 0)))
    changed = drift.Values(own.entropy + 0.5, own.counts)
    assert drift.count_alarms(own, changed, 100, 5, 1) == (5, 5)
    assert drift.count_alarms(own, own, 100, 40, 1)[0] <= 6  # 1 in 100 at a chance of 5 %
    assert drift.compute_entropy(torch.tensor([[0.5, 0.5], [1.0, 0.0]])).tolist() == pytest.approx([np.log(2), 0])
    assert drift.is_within_chance(19, 300)
    assert not drift.is_within_chance(30, 300)


@pytest.mark.records
@pytest.mark.parametrize("study", [calibration, drift], ids=lambda study: study.__name__)
def test_the_pages_are_those_of_the_records(study):
    assert (ROOT / study.PAGE).read_text() == study.render_page(read_records(ROOT / study.RECORDS))


@pytest.mark.records
def test_recorded_coverage_is_within_one_point_and_alarms_on_unchanged_images_are_rare():
    """The targets of the studies. Bands have a probability of 99 % each, so that a few silos may be outside."""
    records = read_records(ROOT / calibration.RECORDS)
    for record in records:
        coverages = [silo["coverage"] for silo in record["silos"].values()]
        assert abs(np.mean(coverages) - calibration.COVERAGE) <= calibration.MAX_DEVIATION, record["method"]
    for data in ("digits", "mnist"):
        table = calibration.render_bands([record for record in records if record["data"] == data]).splitlines()[2:]
        assert len(table) == len(after_training.METHODS)
        for line in table:  # no count refutes the coverage
            assert min(float(cell.strip(" |")) for cell in line.split(" | ")[2::2]) >= 0.01, line
    rows = [row for record in read_records(ROOT / drift.RECORDS) for row in record["rows"]]
    for test in drift.TESTS:
        assert drift.is_within_chance(*drift.sum_alarms(rows, test=test, change=drift.UNCHANGED)), test
