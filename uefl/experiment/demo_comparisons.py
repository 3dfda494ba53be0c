"""The two comparisons of `uefl demo`: four hospitals, and digits with minority domains (docs/log.md has their choice).

Trials chose the settings of each method by validation; UEFL had no more of them than the others, beside an earlier
search of its form in the hospitals. Settings that are not named here are the library's defaults.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from uefl.experiment.repeats import Comparison, compare_repeats

_FASTER = "evaluate_every=1000 evaluate_local=false"  # only decisions and the last round are shown
_HEART = f"heart validation_fraction=0.2 logit_adjustment=local {_FASTER}"
_LINEAR = "encoder=identity hidden_size=0 feature_norm=none optimizer=adam local.lr=0.03"
_CODEBOOK = "num_codewords=16 segments=1 gate=fixed gate_value=0.1"  # a tenth of a patient's columns is the codeword's
_DIGITS = (
    "mnist5k num_silos=3,1,1 image_size=14 train_per_silo=600 test_per_silo=400 validation_fraction=0.25 iterations=2 "
    f"epochs=1 schedule=cosine {_FASTER}"
)
_ROUNDS = "rounds=7 extra_rounds=5"
_GROUP_ROUNDS = "rounds=5 extra_rounds=7 group_rounds=4"  # as many, the last four in groups of alike silos
_TUNING = "fine_tuning_epochs=5"  # after the last round, at each silo
_LONG_TUNING = "fine_tuning_epochs=20"
NUM_FOLDS = 5

HOSPITALS = Comparison(
    title="Heart disease in four hospitals, 920 patients",
    arguments={
        "logistic regression alone": f"local-only {_HEART} {_LINEAR} dropout=0.2 weight_decay=0.02",
        "local-only": f"local-only {_HEART} dropout=0.7 weight_decay=0.03",
        "fedavg": f"fedavg {_HEART} {_LINEAR} dropout=0.3 weight_decay=0",
        "fine-tuned fedavg": f"fine-tuning {_HEART} {_LINEAR} dropout=0.2 weight_decay=0.003 {_TUNING}",
        "uefl": f"uefl {_HEART} {_LINEAR} dropout=0.1 weight_decay=0.01 {_CODEBOOK} {_TUNING} group_rounds=0",
    },
    repeats=[f"fold={i}/{NUM_FOLDS}" for i in range(1, NUM_FOLDS + 1)],
    unit="folds",
    test_to_train=1 / (NUM_FOLDS - 1),
)
DIGITS = Comparison(
    title="Digits: three upright silos (D1), one rotated by −50° (D2), one by 120° (D3)",
    arguments={
        "fedavg": f"fedavg {_DIGITS} {_ROUNDS} feature_norm=none dropout=0 weight_decay=0.01",
        "fine-tuned fedavg": f"fine-tuning {_DIGITS} {_ROUNDS} feature_norm=none dropout=0 {_LONG_TUNING}",
        "uefl": f"uefl {_DIGITS} {_GROUP_ROUNDS} feature_norm=none dropout=0.05 gate_value=0.1 {_LONG_TUNING}",
    },
    repeats=[f"seed={i}" for i in (290, 291, 292)],  # no setting was chosen with them
    unit="seeds",
)
COMPARISONS = {"hospitals": HOSPITALS, "digits": DIGITS}


def run_demo(out: Path, workers: int, console: Console) -> None:
    """Run both comparisons, one after another."""
    for comparison in COMPARISONS.values():
        compare_repeats(comparison, out, workers, console)
