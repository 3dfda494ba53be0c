"""Watching a silo's data: new examples of the silo raise no alarm, those of another kind do."""

from dataclasses import replace

import pytest
import torch
from harness import NUM_CLASSES, make_encoder, make_method, make_pattern_examples, make_pattern_silos

from uefl.core.drift import CODEWORDS, ENTROPY
from uefl.core.errors import InputError
from uefl.experiment.train import train
from uefl.experiment.watch import draw_watch, watch_silo


def train_method(name, **fields):
    silos = [
        replace(silo, calibration=make_pattern_examples(90, 50 + i, i / 2))
        for i, silo in enumerate(make_pattern_silos())
    ]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return train(make_method(name, **fields), silos, make_encoder(), num_classes=NUM_CLASSES, hidden_size=16).models


@pytest.fixture(scope="module")
def models():
    return train_method("uefl", codebook=True, rounds=3)


def watch(models, x, **fields):
    return watch_silo(models, "silo 0", x, **{"level": 0.05, "looks": 1, **fields})


def test_new_examples_of_the_silo_rarely_raise_an_alarm_and_changed_ones_do(models):
    reports = [watch(models, make_pattern_examples(60, 1000 + seed).x) for seed in range(20)]
    assert sum(report.is_alarm for report in reports) <= 4  # 1 in 300 at a chance of 5 %
    changed = watch(models, make_pattern_examples(60, 1000, brightness=1.5).x)
    assert changed.is_alarm
    assert {c.name for c in changed.comparisons} == {ENTROPY, CODEWORDS}
    assert all(c.p_value == pytest.approx(1 / 2000) for c in changed.comparisons if c.name == CODEWORDS)


def test_the_answer_is_in_words(models):
    report = watch(models, make_pattern_examples(40, 1001).x, looks=4)
    lines = report.describe()
    assert lines[0] == "No alarm: nothing shows that the 40 inputs are not like the data of silo silo 0."
    assert lines[-2] == (
        "Reference: 90 examples, the calibration part of the run. Levels are those of one of 4 planned looks."
    )
    assert lines[-1] == "40 inputs are few: only a large change would be found."
    assert min(c.level for c in report.comparisons) == pytest.approx(0.05 / 4 / 2)
    alarm = watch(models, make_pattern_examples(60, 1000, brightness=1.5).x).describe()
    assert alarm[0].startswith("ALARM: the 60 inputs are not like the data of silo silo 0; they differ in ")
    assert "before" in alarm[1]
    assert alarm[-1].endswith("Levels are those of a single look.")


def test_a_small_p_value_is_not_shown_as_zero(models):
    """With 52 looks, p-values below 0.00005 are compared with levels below 0.001."""
    report = watch(models, make_pattern_examples(60, 1000, brightness=1.5).x, looks=52)
    (line,) = [line for line in report.describe() if line.startswith(CODEWORDS)]
    assert "p = 2.404e-05 ≤ 0.000" in line  # 1 of 41600 arrangements


def test_draws_of_dropout_differ_between_reference_and_inputs(models):
    """The same images again: equal draws would give equal entropies."""
    x = make_pattern_examples(90, 50).x
    report = watch(models, x)
    own, new = report.reference.measurements, report.new
    assert torch.equal(own.codeword_counts, new.codeword_counts)
    assert (own.entropy != new.entropy).float().mean() > 0.9
    assert not report.is_alarm


def test_a_method_without_codewords_tests_the_entropy_alone(tmp_path):
    models = train_method("fedavg", rounds=1, iterations=1)
    report = watch(models, make_pattern_examples(60, 1000).x)
    assert [c.name for c in report.comparisons] == [ENTROPY]
    assert report.describe()[-1] == "This model has no codewords: only the entropy is tested."
    assert draw_watch(report, tmp_path / "a.png").exists()


def test_a_picture_is_never_overwritten(models, tmp_path):
    report = watch(models, make_pattern_examples(60, 1000).x)
    paths = [draw_watch(report, tmp_path / "watch-D1-1.png") for _ in range(3)]
    assert [path.name for path in paths] == ["watch-D1-1.png", "watch-D1-1-2.png", "watch-D1-1-3.png"]


def test_a_picture_is_drawn_without_a_search_for_the_best_place_of_a_legend(models, tmp_path, monkeypatch):
    """On a busy machine matplotlib warns that the search is slow."""
    monkeypatch.setattr("matplotlib.legend.Legend._find_best_position", None)
    draw_watch(watch(models, make_pattern_examples(60, 1000).x), tmp_path / "a.png")


def test_what_cannot_be_tested_is_one_line(models):
    with pytest.raises(InputError, match=r"^9 inputs are too few to tell a change from chance; 10 are needed$"):
        watch(models, make_pattern_examples(9, 0).x)
    without = replace(models, held_out={})
    with pytest.raises(InputError, match=r"^silo silo 0 has no reference; train with calibration_fraction=0\.2, or "):
        watch(without, make_pattern_examples(20, 0).x)
    few = replace(models.held_out["silo 0"], labels=models.held_out["silo 0"].labels[:5])
    with pytest.raises(InputError, match=r"^5 reference examples are too few"):
        watch(replace(models, held_out={"silo 0": few}), make_pattern_examples(20, 0).x)
