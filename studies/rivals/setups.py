"""The setups: data, network and rounds, and for every method the same number of trials.

A trial is what a method may choose by validation: the weights of its own terms, the size of a codebook, the form of the
network. Optimizer, schedule and learning rate are chosen once, with FedAvg, and are the same for all methods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from uefl.algorithms import METHODS
from uefl.algorithms.extensible_codebook import ExtensibleCodebook
from uefl.core.local import LocalTraining
from uefl.data.config import DataConfig
from uefl.data.defaults import get_default_config
from uefl.experiment.experiment import Experiment
from uefl.models.model_config import ModelConfig

FEDAVG, UEFL = "FedAvg", "UEFL"
TRIAL_SEEDS = (20, 21)  # not used before
SEARCH_SEEDS = (30, 31)  # of the search for UEFL's own settings, before its trials were fixed
SEEDS = tuple(range(100, 110))  # fresh: no setting was chosen with them
NUM_TRIALS = 4


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One choice of a method's own settings."""

    label: str
    method: Mapping[str, Any] = field(default_factory=dict)
    local: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    lr_factor: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """One method with its trials."""

    method: str  # name in METHODS
    trials: Sequence[Trial]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Learning rate and its schedule, chosen with FedAvg."""

    schedule: str
    lr: float

    def __str__(self) -> str:
        return f"{self.schedule}, {self.lr:g}"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One table."""

    title: str
    data: DataConfig
    model: ModelConfig
    local: LocalTraining
    rounds: Mapping[str, Any]
    schedules: Sequence[Schedule]
    rows: Mapping[str, Row]
    search: Mapping[str, Row] = field(default_factory=dict)  # what was tried before the trials were fixed
    trials_of: str = ""  # another setup whose trials were chosen already, with the same data set
    folds: int = 0  # parts of a cross-validation; 0: a test set

    def make_experiment(self, row: str, trial: Trial, schedule: Schedule, seed: int, fold: int = 0) -> Experiment:
        """Make the experiment of one row, trial and seed."""
        lr = schedule.lr * trial.lr_factor
        local = replace(self.local, **{"schedule": schedule.schedule, "lr": lr, **trial.local})
        return Experiment(
            method=METHODS[self.rows[row].method](**{**self.rounds, "local": local, **trial.method}),
            data=replace(self.data, fold=f"{fold}/{self.folds}") if fold else self.data,
            model=replace(self.model, **trial.model),
            seed=seed,
        )


def make_codebook(**fields: Any) -> ExtensibleCodebook:
    """Return a codebook whose codewords stand for whole tokens and learn from the task too."""
    usual = {
        "num_codewords": 512,
        "segments": 1,
        "commitment_weight": 0.05,
        "min_standard_errors": 0.0,
        "codeword_gradient": "task",
    }
    return ExtensibleCodebook(**{**usual, **fields})


NO_NORM = {"feature_norm": "none"}
SLOWER = 1 / 3
NORM_TRIALS = (  # of methods without a setting of their own
    Trial(label="layer norm"),
    Trial(label="no layer norm", model=NO_NORM),
    Trial(label="layer norm, a third of the rate", lr_factor=SLOWER),
    Trial(label="no layer norm, a third of the rate", model=NO_NORM, lr_factor=SLOWER),
)


def list_tuning_trials(**fields: Any) -> tuple[Trial, ...]:
    """Return fine-tuning with two numbers of epochs, with and without layer norm."""
    return tuple(
        Trial(label=f"{e} epochs{label}", method={"fine_tuning_epochs": e, **fields}, model=model)
        for e in (5, 10)
        for label, model in (("", {}), (", no layer norm", NO_NORM))
    )


def make_uefl_trial(
    label: str,
    epochs: int = 5,
    *,
    batch_norm: str = "personal",
    model: Mapping[str, Any] | None = None,
    rounds: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Trial:
    """Return UEFL with a learned gate, own batch norm and fine-tuning, or with other values of these."""
    codebook = make_codebook(**{"num_codewords": 1024, "gate": "learned", "gate_value": 0.9, **fields})
    method = {"codebook": codebook, "batch_norm": batch_norm, "fine_tuning_epochs": epochs, **(rounds or {})}
    return Trial(label=label, method=method, model=model or {})


SEGMENTED: dict[str, Any] = {"num_codewords": 256, "segments": 4, "commitment_weight": 0.25, "model": NO_NORM}
IMAGE_ROWS: Mapping[str, Row] = {
    FEDAVG: Row(method="fedavg", trials=NORM_TRIALS),
    "FedBN": Row(method="fedbn", trials=NORM_TRIALS),
    "FedAvg, fine-tuned": Row(method="fine-tuning", trials=list_tuning_trials()),
    "FedBN, fine-tuned": Row(method="fine-tuning", trials=list_tuning_trials(batch_norm="personal")),
    "FedPer": Row(
        method="fedper",
        trials=(
            Trial(label="from the hidden layer on, a third of the rate", lr_factor=SLOWER),
            Trial(label="last layer", method={"personal_layers": "last"}),
            Trial(label="last layer, a third of the rate", method={"personal_layers": "last"}, lr_factor=SLOWER),
            Trial(label="last layer, a ninth of the rate", method={"personal_layers": "last"}, lr_factor=SLOWER**2),
        ),
    ),
    "Ditto": Row(
        method="ditto",
        trials=tuple(Trial(label=f"λ = {x:g}", method={"lam": x}) for x in (0.003, 0.01, 0.03, 0.1)),
    ),
    "IFCA": Row(
        method="ifca",
        trials=(
            *(Trial(label=f"{k} models", method={"num_models": k}) for k in (3, 4, 6)),
            Trial(label="4 models, one encoder", method={"num_models": 4, "initial_models": "classifier"}),
        ),
    ),
    "Local-only": Row(
        method="local-only",
        trials=(
            *(NORM_TRIALS[i] for i in (1, 2, 3)),
            Trial(label="no layer norm, a ninth of the rate", model=NO_NORM, lr_factor=SLOWER**2),
        ),
    ),
    UEFL: Row(
        method="uefl",
        trials=(
            make_uefl_trial("1 × 1024, gate from .5", model=NO_NORM, gate_value=0.5),
            make_uefl_trial("4 × 256, gate from .5", **SEGMENTED, gate_value=0.5),
            make_uefl_trial(
                "4 × 256, gate from .5, validated, 10 epochs", 10, **SEGMENTED, gate_value=0.5, extend="validated"
            ),
            make_uefl_trial("4 × 256, gate from .25, validated", **SEGMENTED, gate_value=0.25, extend="validated"),
        ),
    ),
}

# What was tried for UEFL, one change at a time from the first row, and the same options without a codebook.
IMAGE_SEARCH: Mapping[str, Row] = {
    "FedAvg": Row(
        method="fine-tuning",
        trials=(
            *(Trial(label=f"{e} epochs", method={"fine_tuning_epochs": e}) for e in (0, 5, 10, 20)),
            Trial(label="5 epochs, no layer norm", method={"fine_tuning_epochs": 5}, model=NO_NORM),
        ),
    ),
    "FedBN": Row(
        method="fine-tuning",
        trials=tuple(
            Trial(label=f"{e} epochs{label}", method={"fine_tuning_epochs": e, "batch_norm": "personal"}, model=model)
            for e in (0, 5, 10)
            for label, model in (("", {}), (", no layer norm", NO_NORM))
        ),
    ),
    UEFL: Row(
        method="uefl",
        trials=(
            make_uefl_trial("gate from .9, own batch norm, 5 epochs"),
            make_uefl_trial("no fine-tuning", 0),
            make_uefl_trial("10 epochs", 10),
            make_uefl_trial("20 epochs", 20),
            make_uefl_trial("no layer norm", model=NO_NORM),
            make_uefl_trial("gate from .5", gate_value=0.5),
            make_uefl_trial("gate from .5, no layer norm", model=NO_NORM, gate_value=0.5),
            make_uefl_trial("no gate", gate="none"),
            make_uefl_trial("shared batch norm", batch_norm="average"),
            make_uefl_trial("shared batch norm, no gate", batch_norm="average", gate="none"),
            make_uefl_trial("codewords for all", extend="all"),
            make_uefl_trial("no own codewords", extend="none"),
            make_uefl_trial("validated codewords", extend="validated"),
            make_uefl_trial("512 codewords", num_codewords=512),
            make_uefl_trial("4 segments of 256 codewords", num_codewords=256, segments=4),
            make_uefl_trial("commitment .25", commitment_weight=0.25),
            make_uefl_trial("commitment .01", commitment_weight=0.01),
            make_uefl_trial(
                "decisions from round 6 on, every 4 rounds", rounds={"rounds": 6, "extra_rounds": 4, "iterations": 7}
            ),
        ),
    ),
}

NINE_SILOS: dict[str, Any] = {
    "model": ModelConfig(width=16, hidden_size=128),
    "local": LocalTraining(optimizer="adam", batch_size=256, epochs=2, eval_batch_size=512),
    "rounds": {"rounds": 14, "extra_rounds": 8, "iterations": 3, "evaluate_local": False},
    "schedules": tuple(Schedule(schedule=s, lr=lr) for s in ("constant", "cosine") for lr in (1e-3, 3e-3, 1e-2)),
    "rows": IMAGE_ROWS,
    "search": IMAGE_SEARCH,
}
ROTATED = Setup(**NINE_SILOS, title="MNIST, nine silos, three rotations", data=get_default_config("mnist"))

# --- four hospitals ---------------------------------------------------------------------------------------------------

HOSPITAL_ADJUSTMENT = {"logit_adjustment": "local"}
LOGISTIC: dict[str, Any] = {"encoder": "identity", "width": 0, "hidden_size": 0, "dropout": 0.0, "feature_norm": "none"}


def list_regressions(*decays: float) -> tuple[Trial, ...]:
    """Return logistic regression with these weights of the ridge penalty."""
    return tuple(
        Trial(
            label=f"ridge {decay:g}",
            method=HOSPITAL_ADJUSTMENT,
            local={"lr": 0.03, "weight_decay": decay},
            model=LOGISTIC,
        )
        for decay in decays
    )


REGRESSION = list_regressions(0.1, 0.3, 1.0, 3.0)
TUNED_REGRESSION = tuple(replace(t, method={**t.method, "fine_tuning_epochs": 5}) for t in REGRESSION)
HOSPITAL_CODEBOOK: dict[str, Any] = {"num_codewords": 16, "segments": 4}


def list_regularized_trials(**model: Any) -> tuple[Trial, ...]:
    """Return two values of dropout with two of the weight decay."""
    return tuple(
        Trial(
            label=f"dropout {dropout:g}, decay {decay:g}",
            method=HOSPITAL_ADJUSTMENT,
            local={"weight_decay": decay},
            model={"dropout": dropout, **model},
        )
        for dropout in (0.5, 0.7)
        for decay in (0.1, 1.0)
    )


def list_method_trials(name: str, values: Sequence[float]) -> tuple[Trial, ...]:
    """Return values of a method's own setting, with the dropout that is best for FedAvg."""
    return tuple(
        Trial(label=f"{name} {value:g}", method={**HOSPITAL_ADJUSTMENT, name: value}, model=DROPOUT) for value in values
    )


def make_hospital_trial(
    label: str,
    *,
    lr: float = 1e-3,
    decay: float = 0.1,
    epochs: int = 0,
    model: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Trial:
    """Return UEFL with a learned gate for the hospitals, or with other values."""
    codebook = make_codebook(**{**HOSPITAL_CODEBOOK, "gate": "learned", "gate_value": 0.5, **fields})
    return Trial(
        label=label,
        method={**HOSPITAL_ADJUSTMENT, "codebook": codebook, "fine_tuning_epochs": epochs},
        local={"lr": lr, "weight_decay": decay},
        model=model or {},
    )


DROPOUT = {"dropout": 0.5}
LINEAR = {**LOGISTIC, "dropout": 0.1}
HOSPITAL_SEARCH: Mapping[str, Row] = {
    "Logistic regression, local": Row(method="local-only", trials=REGRESSION),
    "Logistic regression, FedAvg": Row(method="fedavg", trials=REGRESSION),
    "Logistic regression, FedAvg, fine-tuned": Row(
        method="fine-tuning",
        trials=TUNED_REGRESSION,
    ),
    FEDAVG: Row(
        method="fedavg",
        trials=tuple(
            Trial(
                label=f"decay {decay:g}, dropout {dropout:g}",
                method=HOSPITAL_ADJUSTMENT,
                local={"weight_decay": decay},
                model={"dropout": dropout},
            )
            for decay in (0.1, 1.0)
            for dropout in (0.1, 0.5)
        ),
    ),
    UEFL: Row(
        method="uefl",
        trials=(
            make_hospital_trial("gate from .5"),
            make_hospital_trial("gate from .9", gate_value=0.9),
            make_hospital_trial("no gate", gate="none"),
            make_hospital_trial("decay 1", decay=1.0),
            make_hospital_trial("dropout .5", model=DROPOUT),
            make_hospital_trial("dropout .5, decay 1", decay=1.0, model=DROPOUT),
            make_hospital_trial("dropout .5, 5 epochs", epochs=5, model=DROPOUT),
            make_hospital_trial("codewords for all", extend="all"),
            make_hospital_trial("width 16", model={"width": 16}),
            make_hospital_trial("linear, decay .1", lr=0.03, decay=0.1, model=LINEAR, segments=1),
            make_hospital_trial("linear, decay .3", lr=0.03, decay=0.3, model=LINEAR, segments=1),
            make_hospital_trial("linear, decay 1", lr=0.03, decay=1.0, model=LINEAR, segments=1),
            make_hospital_trial("linear, decay .3, 5 epochs", lr=0.03, decay=0.3, epochs=5, model=LINEAR, segments=1),
            make_hospital_trial(
                "linear, decay .3, gate from .1", lr=0.03, decay=0.3, model=LINEAR, segments=1, gate_value=0.1
            ),
        ),
    ),
}

HOSPITALS = Setup(
    title="Heart disease, four hospitals, 10 × 5 folds over patients",
    data=replace(get_default_config("heart"), validation_fraction=0.2),
    model=ModelConfig(encoder="mlp", width=64, hidden_size=32),
    local=LocalTraining(optimizer="adamw", batch_size=16, epochs=2, weight_decay=0.1),
    rounds={"rounds": 10, "extra_rounds": 5, "iterations": 3, "evaluate_local": False, "evaluate_every": 1000},
    schedules=(Schedule(schedule="cosine", lr=1e-3),),
    folds=5,
    search=HOSPITAL_SEARCH,
    rows={
        # The decay moves all weights to 0 in every step, and the silo's own prior is left.
        "Prevalence only": Row(method="local-only", trials=list_regressions(33.0)),
        "Logistic regression, local": Row(method="local-only", trials=list_regressions(1.0, 3.0, 10.0, 30.0)),
        "Logistic regression, FedAvg": Row(method="fedavg", trials=REGRESSION),
        "Logistic regression, FedAvg, fine-tuned": Row(method="fine-tuning", trials=TUNED_REGRESSION),
        "Logistic regression, centralized": Row(method="centralized", trials=REGRESSION),
        "Local-only": Row(method="local-only", trials=list_regularized_trials()),
        "Centralized": Row(method="centralized", trials=list_regularized_trials()),
        FEDAVG: Row(method="fedavg", trials=list_regularized_trials()),
        "FedAvg, fine-tuned": Row(
            method="fine-tuning", trials=list_method_trials("fine_tuning_epochs", (2, 5, 10, 20))
        ),
        "FedBN": Row(method="fedbn", trials=list_regularized_trials(encoder="mlp-bn")),
        "Ditto": Row(method="ditto", trials=list_method_trials("lam", (0.01, 0.1, 1.0, 3.0))),
        UEFL: Row(
            method="uefl",
            trials=(
                make_hospital_trial("no fine-tuning", model=DROPOUT),
                make_hospital_trial("5 epochs", epochs=5, model=DROPOUT),
                make_hospital_trial("10 epochs", epochs=10, model=DROPOUT),
                make_hospital_trial("5 epochs, decay 1", decay=1.0, epochs=5, model=DROPOUT),
            ),
        ),
    },
)

SETUPS: Mapping[str, Setup] = {
    "rotated": ROTATED,
    "imbalanced": replace(
        ROTATED,
        title="MNIST, three, one and one silos of three rotations",
        data=replace(ROTATED.data, num_silos=(3, 1, 1)),
        trials_of="rotated",
    ),
    "fashion": replace(ROTATED, title="Fashion-MNIST, nine silos, three rotations", data=get_default_config("fmnist")),
    "hospitals": HOSPITALS,
}
