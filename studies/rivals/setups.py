"""The setups: data, network and rounds, and the rows of every table with their trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from studies.rivals.color_setups import COLOR_SETUPS
from studies.rivals.trials import (
    FEDAVG,
    IMAGE_ROWS,
    NO_NORM,
    UEFL,
    Row,
    Schedule,
    Setup,
    Trial,
    make_codebook,
    make_uefl_trial,
)
from uefl.core.local import LocalTraining
from uefl.data.defaults import get_default_config
from uefl.models.model_config import ModelConfig

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
            make_hospital_trial("linear, decay .1", lr=0.03, decay=0.1, model=LINEAR, segments=1),
            make_hospital_trial("linear, decay .3", lr=0.03, decay=0.3, model=LINEAR, segments=1),
            make_hospital_trial("linear, decay 1", lr=0.03, decay=1.0, model=LINEAR, segments=1),
            make_hospital_trial("linear, decay .3, 5 epochs", lr=0.03, decay=0.3, epochs=5, model=LINEAR, segments=1),
            make_hospital_trial(
                "linear, decay .3, gate from .1", lr=0.03, decay=0.3, model=LINEAR, segments=1, gate_value=0.1
            ),
            *(
                make_hospital_trial(f"dropout .5, 5 epochs, {label}", epochs=5, model={**DROPOUT, **model}, **fields)
                for label, model, fields in HOSPITAL_VARIANTS
            ),
            make_hospital_trial("dropout .5, 10 epochs", epochs=10, model=DROPOUT),
            make_hospital_trial("dropout .5, 20 epochs", epochs=20, model=DROPOUT),
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
                make_hospital_trial("gate from .75, 5 epochs", epochs=5, model=DROPOUT, gate_value=0.75),
                make_hospital_trial("gate from .5, 5 epochs", epochs=5, model=DROPOUT),
                make_hospital_trial("gate from .5, 10 epochs", epochs=10, model=DROPOUT),
                make_hospital_trial("gate from .5, 5 epochs, dropout .6", epochs=5, model={"dropout": 0.6}),
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
    **COLOR_SETUPS,
}
