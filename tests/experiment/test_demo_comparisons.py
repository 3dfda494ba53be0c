"""The demo: data that need no download, equal settings for the methods that are compared, two minutes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import call_cli, call_with_mistake

from uefl.data import SOURCES
from uefl.experiment.demo_comparisons import COMPARISONS, DIGITS, HOSPITALS
from uefl.experiment.settings import iterate_settings

SHRUNK = "rounds=3 extra_rounds=1 iterations=2 mc_samples=3"


def test_hospitals_compare_what_each_can_do_alone_with_federated_methods_on_every_patient() -> None:
    assert list(HOSPITALS.arguments) == [
        "logistic regression alone",
        "local-only",
        "fedavg",
        "fine-tuned fedavg",
        "uefl",
    ]
    experiments = HOSPITALS.make_experiments()
    assert {e.data.name for e in experiments.values()} == {"heart"}
    folds = {experiments["uefl", repeat].data.fold for repeat in HOSPITALS.repeats}
    assert folds == {f"{i}/5" for i in range(1, 6)}, "every patient is tested once"
    regression = experiments["logistic regression alone", "fold=1/5"]
    assert (regression.method_name, regression.model.encoder, regression.model.hidden_size) == (
        "local-only",
        "identity",
        0,
    )


def test_digits_have_one_silo_of_each_minority_domain() -> None:
    silos, _ = DIGITS.make_experiments()["uefl", DIGITS.repeats[0]].data.load(0)
    assert [silo.name for silo in silos] == ["D1-1", "D1-2", "D1-3", "D2-1", "D3-1"]


def have_equal_settings(richer: object, other: object, own: set[tuple[str, ...]]) -> bool:
    settings = dict(iterate_settings(richer))
    return all(settings[path] == value for path, value in iterate_settings(other) if path not in own)


@pytest.mark.parametrize("comparison", COMPARISONS.values(), ids=COMPARISONS)
def test_the_demo_needs_no_download_and_gives_tuned_fedavg_and_uefl_the_same_settings(comparison) -> None:  # type: ignore[no-untyped-def]
    experiments = comparison.make_experiments()
    assert all(SOURCES[e.data.name].is_embedded for e in experiments.values())
    uefl, fedavg = (experiments[name, comparison.repeats[0]] for name in ("uefl", "fine-tuned fedavg"))
    assert (uefl.data, uefl.seed) == (fedavg.data, fedavg.seed)
    own = {("dropout",), ("feature_norm",)}  # trials chose these for each method, and the settings below
    assert have_equal_settings(uefl.model, fedavg.model, own)
    own = {("codebook",), ("local", "weight_decay"), ("fine_tuning_epochs",)}
    own |= {("rounds",), ("extra_rounds",)}  # UEFL may train in groups in the last of equally many rounds
    assert have_equal_settings(uefl.method, fedavg.method, own)
    assert uefl.method.total_rounds == fedavg.method.total_rounds


def test_the_command_runs_both_comparisons_and_says_where_the_pictures_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shrink(name: str, rows: list[str], num_repeats: int, settings: str) -> None:
        comparison = COMPARISONS[name]
        arguments = {row: f"{comparison.arguments[row].partition(' ')[0]} {settings} {SHRUNK}" for row in rows}
        shrunk = comparison._replace(arguments=arguments, repeats=comparison.repeats[:num_repeats])
        monkeypatch.setitem(COMPARISONS, name, shrunk)

    shrink("hospitals", ["logistic regression alone", "uefl"], 2, "heart epochs=1 batch_size=200")
    digits = "num_silos=3,1,1 image_size=8 train_per_silo=20 test_per_silo=10 width=4 hidden_size=16"
    shrink("digits", ["fedavg", "uefl"], 1, digits)
    answer = call_cli("demo", "--out", str(tmp_path), "--workers", "1")
    assert answer.code == 0, answer.stderr
    pictures = [line.removeprefix("picture: ") for line in answer.stdout.splitlines() if line.startswith("picture: ")]
    assert len(pictures) == 2
    assert all(Path(picture).exists() for picture in pictures)
    assert answer.stdout.count("the best other method by validation") == 2
    assert all(hospital in answer.stdout for hospital in ("Cleveland", "Hungary", "Switzerland", "VA Long Beach"))


def test_a_negative_number_of_workers_is_one_line() -> None:
    assert call_with_mistake("demo", "--workers", "-1") == "workers=-1 must be at least 0"


@pytest.mark.real
def test_the_demo_takes_less_than_two_minutes_of_two_cores(tmp_path: Path) -> None:
    before = os.times()
    command = [sys.executable, "-m", "uefl.cli.main", "demo", "--out", str(tmp_path), "--workers", "2"]
    subprocess.run(command, check=True, capture_output=True)
    after = os.times()
    assert after.children_user + after.children_system - before.children_user - before.children_system < 2 * 120
