"""What a setup is, and the trials of every method on images: the same number for each.

A trial is what a method may choose by validation: the weights of its own terms, the size of a codebook, the form of the
network. Optimizer, schedule and learning rate are chosen once, with FedAvg, and are the same for all methods.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from uefl.algorithms import METHODS
from uefl.algorithms.extensible_codebook import ExtensibleCodebook
from uefl.core.local import LocalTraining
from uefl.data.config import DataConfig
from uefl.experiment.experiment import Experiment, Precision
from uefl.models.model_config import ModelConfig

FEDAVG, IFCA, UEFL = "FedAvg", "IFCA", "UEFL"
RATES = ", UEFL's rates"  # ending of the rows with the learning rates of UEFL's group rounds
RECEIVERS = ("none", "uncertain", "random", "all")  # silos that get codewords: values of `extend` that are compared
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
    rows_of: str = ""  # another setup of the same data: rows that are the same there keep the choice made there
    also_tried_in: Sequence[str] = ()  # setups of the same data: their runs of equal trials count here, too
    superseded: str = ""  # why the table does not count any more; empty if it does
    folds: int = 0  # parts of a cross-validation; 0: a test set
    seeds: Sequence[int] = SEEDS  # of the table
    trial_seeds: Sequence[int] = TRIAL_SEEDS
    receivers: Sequence[str] = RECEIVERS  # of codewords, compared after the table
    precision: Precision = "auto"
    fedavg_rows: Sequence[str] = (FEDAVG,)  # forms of FedAvg; the primary comparison is with the best by validation
    ablations: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by label: changes of UEFL's codebook
    # What schedules and trials are compared by, on validation examples; the last: by accuracy, among the trials whose
    # NLL is not above that of FedAvg's best one.
    chosen_by: Literal["nll", "accuracy", "accuracy_within_nll"] = "nll"
    restart_rounds: int = 0  # of UEFL, in groups: other rows run with its learning rates too
    restarted_rows: Sequence[str] = ()  # which; empty: all
    receiver_trial: int = 0  # with folds: the trial of UEFL whose receivers of codewords are exchanged

    def make_experiment(self, row: str, trial: Trial, schedule: Schedule, seed: int, fold: int = 0) -> Experiment:
        """Make the experiment of one row, trial and seed."""
        lr = schedule.lr * trial.lr_factor
        local = replace(self.local, **{"schedule": schedule.schedule, "lr": lr, **trial.local})
        return Experiment(
            method=METHODS[self.rows[row].method](**{**self.rounds, "local": local, **trial.method}),
            data=replace(self.data, fold=f"{fold}/{self.folds}") if fold else self.data,
            model=replace(self.model, **trial.model),
            seed=seed,
            precision=self.precision,
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


# Codewords that change a feature by a millionth: they find the groups, and nothing else.
NO_CODEWORDS: Mapping[str, Mapping[str, Any]] = {
    "codewords in the features": {"gate": "fixed", "gate_value": 1e-6, "commitment_weight": 0.0}
}
NO_NORM = {"feature_norm": "none"}
SLOWER = 1 / 3
NORM_TRIALS = (  # of methods without a setting of their own
    Trial(label="layer norm"),
    Trial(label="no layer norm", model=NO_NORM),
    Trial(label="layer norm, a third of the rate", lr_factor=SLOWER),
    Trial(label="no layer norm, a third of the rate", model=NO_NORM, lr_factor=SLOWER),
)


def list_tuning_trials(epochs: Sequence[int] = (5, 10), **fields: Any) -> tuple[Trial, ...]:
    """Return fine-tuning with two numbers of epochs, with and without layer norm."""
    return tuple(
        Trial(label=f"{e} epochs{label}", method={"fine_tuning_epochs": e, **fields}, model=model)
        for e in epochs
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
    if rounds and "group_rounds" in rounds:
        fields = {"alike_rule": "spacing", **fields}  # the only rule when these tables were made
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
    IFCA: Row(
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
            make_uefl_trial("1 × 1024, gate from .25, 10 epochs", 10, model=NO_NORM, gate_value=0.25),
            make_uefl_trial("4 × 256, gate from .5", **SEGMENTED, gate_value=0.5),
            make_uefl_trial("4 × 256, gate from .25, validated", **SEGMENTED, gate_value=0.25, extend="validated"),
        ),
    ),
}
