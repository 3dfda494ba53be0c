"""The setup of four hospitals: rows and trials of the table, and what was tried before they were fixed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from studies.rivals.trials import FEDAVG, NO_NORM, UEFL, Row, Schedule, Setup, Trial, make_codebook
from uefl.core.local import LocalTraining
from uefl.data.defaults import get_default_config
from uefl.models.model_config import ModelConfig

LINEAR_RATE = 0.03  # of linear models in the first table; no rate had been searched
HOSPITAL_ADJUSTMENT = {"logit_adjustment": "local"}
LOGISTIC: dict[str, Any] = {"encoder": "identity", "width": 0, "hidden_size": 0, "dropout": 0.0, "feature_norm": "none"}


def list_regressions(*decays: float) -> tuple[Trial, ...]:
    """Return logistic regression with these weights of the ridge penalty."""
    return tuple(
        Trial(
            label=f"ridge {decay:g}",
            method=HOSPITAL_ADJUSTMENT,
            local={"lr": LINEAR_RATE, "weight_decay": decay},
            model=LOGISTIC,
        )
        for decay in decays
    )


def list_l2_regressions(*weights: float, **method: Any) -> tuple[Trial, ...]:
    """Return logistic regression whose ridge penalty is a part of the loss, with these weights of it."""
    return tuple(
        Trial(
            label=f"L2 {weight:g}",
            method={**HOSPITAL_ADJUSTMENT, **method},
            local={"optimizer": "adam", "lr": LINEAR_RATE, "weight_decay": weight},
            model=LOGISTIC,
        )
        for weight in weights
    )


# The decay makes all weights 0 in the first step, and steps are too small to change a probability: the prior is left.
NO_WEIGHTS = Trial(
    label="weights of 0", method=HOSPITAL_ADJUSTMENT, local={"lr": 1e-12, "weight_decay": 1e12}, model=LOGISTIC
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


# Without the patients of others, or on a network for all, the best of the values above were the largest dropout and the
# smallest decay, in nearly every fold.
LARGER_DROPOUT = tuple(
    Trial(
        label=f"dropout {dropout:g}, decay {decay:g}",
        method=HOSPITAL_ADJUSTMENT,
        local={"weight_decay": decay},
        model={"dropout": dropout},
    )
    for dropout, decay in ((0.7, 0.1), (0.8, 0.1), (0.9, 0.1), (0.8, 0.03))
)


def list_method_trials(name: str, values: Sequence[float]) -> tuple[Trial, ...]:
    """Return values of a method's own setting, with the dropout that is best for FedAvg."""
    return tuple(
        Trial(label=f"{name} {value:g}", method={**HOSPITAL_ADJUSTMENT, name: value}, model=DROPOUT) for value in values
    )


def list_rates(*rates: float, model: Mapping[str, Any], **local: Any) -> tuple[Trial, ...]:
    """Return learning rates, each with both schedules."""
    return tuple(
        Trial(
            label=f"{schedule}, {rate:g}",
            method=HOSPITAL_ADJUSTMENT,
            local={"lr": rate, "schedule": schedule, **local},
            model=model,
        )
        for schedule in ("cosine", "constant")
        for rate in rates
    )


def make_hospital_trial(
    label: str,
    *,
    lr: float = 1e-3,
    decay: float = 0.1,
    optimizer: str = "adamw",
    epochs: int = 0,
    model: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Trial:
    """Return UEFL with a learned gate for the hospitals, or with other values."""
    codebook = make_codebook(**{**HOSPITAL_CODEBOOK, "gate": "learned", "gate_value": 0.5, **fields})
    return Trial(
        label=label,
        method={**HOSPITAL_ADJUSTMENT, "codebook": codebook, "fine_tuning_epochs": epochs},
        local={"lr": lr, "weight_decay": decay, "optimizer": optimizer},
        model=model or {},
    )


def make_linear_trial(label: str, decay: float = 0.01, epochs: int = 5, **fields: Any) -> Trial:
    """Return UEFL on the columns themselves, with a linear classifier and a ridge penalty as a part of the loss."""
    settings = {"lr": LINEAR_RATE, "segments": 1, "model": LINEAR, **fields}
    return make_hospital_trial(label, decay=decay, optimizer="adam", epochs=epochs, **settings)


def make_gated_trial(decay: float, gate: float, dropout: float = 0.0) -> Trial:
    """Return UEFL with a linear classifier on the columns, a fixed part of which codewords replace."""
    label = f"dropout {dropout:g}" if dropout else "no dropout"
    return make_linear_trial(
        f"linear, L2 {decay:g}, 5 epochs, {label}, fixed gate {gate:g}",
        decay,
        gate="fixed",
        gate_value=gate,
        model={**LOGISTIC, "dropout": dropout},
    )


DROPOUT = {"dropout": 0.5}
LINEAR = {**LOGISTIC, "dropout": 0.1}
HOSPITAL_VARIANTS: Sequence[tuple[str, dict[str, Any], dict[str, Any]]] = (
    ("dropout .6", {"dropout": 0.6}, {}),
    ("dropout .7", {"dropout": 0.7}, {}),
    ("width 128", {"width": 128}, {}),
    ("no layer norm", NO_NORM, {}),
    ("lr .003", {}, {"lr": 3e-3}),
    ("gate from .25", {}, {"gate_value": 0.25}),
    ("gate from .75", {}, {"gate_value": 0.75}),
    ("no gate", {}, {"gate": "none"}),
    ("8 segments", {}, {"segments": 8}),
    ("codewords for all", {}, {"extend": "all"}),
    ("no own codewords", {}, {"extend": "none"}),
)
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
            for decay, dropout in ((0.1, 0.1), (0.1, 0.5), (1.0, 0.1), (1.0, 0.5), (0.0, 0.5))
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
            make_hospital_trial("linear, decay .1", lr=LINEAR_RATE, decay=0.1, model=LINEAR, segments=1),
            make_hospital_trial("linear, decay .3", lr=LINEAR_RATE, decay=0.3, model=LINEAR, segments=1),
            make_hospital_trial("linear, decay 1", lr=LINEAR_RATE, decay=1.0, model=LINEAR, segments=1),
            make_hospital_trial(
                "linear, decay .3, 5 epochs", lr=LINEAR_RATE, decay=0.3, epochs=5, model=LINEAR, segments=1
            ),
            make_hospital_trial(
                "linear, decay .3, gate from .1", lr=LINEAR_RATE, decay=0.3, model=LINEAR, segments=1, gate_value=0.1
            ),
            *(
                make_hospital_trial(f"dropout .5, 5 epochs, {label}", epochs=5, model={**DROPOUT, **model}, **fields)
                for label, model, fields in HOSPITAL_VARIANTS
            ),
            make_hospital_trial("dropout .5, 10 epochs", epochs=10, model=DROPOUT),
            make_hospital_trial("dropout .5, 20 epochs", epochs=20, model=DROPOUT),
            *(make_linear_trial(f"linear, L2 {decay:g}, 5 epochs", decay) for decay in (0.003, 0.01, 0.03)),
            make_linear_trial("linear, L2 0.01, 10 epochs", epochs=10),
            make_linear_trial("linear, L2 0.01, 5 epochs, gate from .25", gate_value=0.25),
            make_linear_trial("linear, L2 0.01, 5 epochs, gate from .1", gate_value=0.1),
            make_linear_trial("linear, L2 0.01, 5 epochs, no own codewords", extend="none"),
            make_linear_trial("linear, L2 0.01, 5 epochs, no dropout", model=LOGISTIC),
            *(
                make_gated_trial(decay, gate)
                for decay, gate in ((0.01, 0.1), (0.01, 0.25), (0.01, 0.5), (0.003, 0.25), (0.003, 0.1), (0.03, 0.1))
            ),
            *(make_gated_trial(decay, 0.1, dropout=0.1) for decay in (0.003, 0.01, 0.03)),
            *(
                make_hospital_trial(
                    f"dropout .5, L2 {decay:g}, 5 epochs", decay=decay, optimizer="adam", epochs=5, model=DROPOUT
                )
                for decay in (0.003, 0.01)
            ),
        ),
    ),
    "FedAvg, fine-tuned, L2": Row(
        method="fine-tuning",
        trials=tuple(
            Trial(
                label=f"dropout 0.5, L2 {decay:g}, 5 epochs",
                method={**HOSPITAL_ADJUSTMENT, "fine_tuning_epochs": 5},
                local={"weight_decay": decay, "optimizer": "adam"},
                model=DROPOUT,
            )
            for decay in (0.003, 0.01)
        ),
    ),
    "FedAvg, fine-tuned": Row(
        method="fine-tuning",
        trials=tuple(
            Trial(
                label=f"dropout {dropout:g}, width {width}, decay {decay:g}, {epochs} epochs",
                method={**HOSPITAL_ADJUSTMENT, "fine_tuning_epochs": epochs},
                local={"weight_decay": decay},
                model={"dropout": dropout, "width": width},
            )
            for dropout, width, decay, epochs in (
                (0.5, 64, 0.1, 5),
                (0.5, 64, 0.1, 10),
                (0.7, 64, 0.1, 5),
                (0.5, 128, 0.1, 5),
            )
        ),
    ),
    "Logistic regression, local, L2": Row(method="local-only", trials=list_l2_regressions(0.01, 0.03, 0.1, 0.3)),
    "Logistic regression, FedAvg, L2": Row(method="fedavg", trials=list_l2_regressions(0.003, 0.01, 0.03, 0.1)),
    "Logistic regression, centralized, L2": Row(
        method="centralized", trials=list_l2_regressions(0.003, 0.01, 0.03, 0.1)
    ),
    "Logistic regression, FedAvg, fine-tuned, L2": Row(
        method="fine-tuning", trials=list_l2_regressions(0.003, 0.01, 0.03, 0.1, fine_tuning_epochs=5)
    ),
    "Logistic regression, centralized": Row(method="centralized", trials=REGRESSION),
    "FedAvg, rates": Row(method="fedavg", trials=list_rates(3e-4, 1e-3, 3e-3, weight_decay=0.1, model=DROPOUT)),
    "Logistic regression, FedAvg, rates": Row(
        method="fedavg",
        trials=list_rates(0.001, 0.003, 0.01, 0.03, 0.1, optimizer="adam", weight_decay=0.01, model=LOGISTIC),
    ),
    "Logistic regression, FedAvg, tuned longer": Row(
        method="fine-tuning",
        trials=tuple(
            replace(t, label=f"{t.label}, {epochs} epochs", method={**t.method, "fine_tuning_epochs": epochs})
            for t in REGRESSION[1:3]
            for epochs in (10,)
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
    seeds=tuple(range(110, 120)),  # the folds of seeds 100 to 109 were seen before UEFL's trials were chosen
    search=HOSPITAL_SEARCH,
    fedavg_rows=(FEDAVG, "Logistic regression, FedAvg"),
    rows={
        "Prevalence only": Row(method="local-only", trials=(NO_WEIGHTS,)),
        "Logistic regression, local": Row(method="local-only", trials=list_l2_regressions(0.01, 0.03, 0.1, 0.3)),
        "Logistic regression, FedAvg": Row(method="fedavg", trials=list_l2_regressions(0.003, 0.01, 0.03, 0.1)),
        "Logistic regression, FedAvg, fine-tuned": Row(
            method="fine-tuning",
            trials=tuple(
                replace(t, label=f"{t.label}{label}", model={**LOGISTIC, "dropout": dropout})
                for dropout, label in ((0.0, ""), (0.1, ", dropout .1"))
                for t in list_l2_regressions(0.003, 0.01, fine_tuning_epochs=5)
            ),
        ),
        "Logistic regression, centralized": Row(
            method="centralized", trials=list_l2_regressions(0.001, 0.003, 0.01, 0.03)
        ),
        "Local-only": Row(method="local-only", trials=LARGER_DROPOUT),
        "Centralized": Row(method="centralized", trials=LARGER_DROPOUT),
        FEDAVG: Row(method="fedavg", trials=list_regularized_trials()),
        "FedAvg, fine-tuned": Row(
            method="fine-tuning", trials=list_method_trials("fine_tuning_epochs", (2, 5, 10, 20))
        ),
        "FedBN": Row(method="fedbn", trials=list_regularized_trials(encoder="mlp-bn")),
        "Ditto": Row(method="ditto", trials=list_method_trials("lam", (1.0, 3.0, 10.0, 30.0))),
        UEFL: Row(
            method="uefl",
            trials=tuple(make_gated_trial(decay, 0.1, dropout) for dropout in (0.1, 0.0) for decay in (0.01, 0.003)),
        ),
    },
)


def use_chosen_rate(row: Row) -> Row:
    """Return a row whose linear models have the rate and schedule with which FedAvg's has the lowest validation NLL."""
    chosen = {"lr": 0.01, "schedule": "constant"}
    return replace(
        row,
        trials=tuple(
            replace(t, local={**t.local, **chosen}) if t.local.get("lr") == LINEAR_RATE else t for t in row.trials
        ),
    )


HOSPITALS_AGAIN = replace(
    HOSPITALS,
    title="Heart disease, again: linear models at the rate that validation chose, other folds",
    seeds=tuple(range(120, 130)),
    search={},
    receivers=(),
    rows={name: use_chosen_rate(row) for name, row in HOSPITALS.rows.items()},
)
