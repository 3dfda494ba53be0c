"""Fifteen trials for every method in the four hospitals: of linear models a grid of dropout and ridge penalty.

In the first two tables UEFL and fine-tuned logistic regression had trials with dropout, other linear models had none.
Where the best value of a row was the largest one, its grid was moved by a step, with as many trials.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from studies.rivals.hospital_setups import (
    HOSPITAL_ADJUSTMENT,
    HOSPITALS_AGAIN,
    LOGISTIC,
    make_gated_trial,
    use_chosen_rate,
)
from studies.rivals.trials import FEDAVG, RECEIVERS, UEFL, Row, Trial

NOTHING: Mapping[str, Any] = {}
DROPOUTS, LARGER_DROPOUTS = (0.0, 0.1, 0.2), (0.1, 0.2, 0.3)
PENALTIES = (0.001, 0.003, 0.01, 0.03, 0.1)
LARGER_PENALTIES = (0.003, 0.01, 0.03, 0.1, 0.3)  # for models of one hospital, or of all patients at one place
DECAYS = (0.0, 0.01, 0.1, 0.3, 1.0)


def make_trial(
    label: str, dropout: float, decay: float, *, model: Mapping[str, Any] = NOTHING, method: Mapping[str, Any] = NOTHING
) -> Trial:
    """Return a network with these values of dropout and weight decay."""
    return Trial(
        label=label,
        method={**HOSPITAL_ADJUSTMENT, **method},
        local={"weight_decay": decay},
        model={"dropout": dropout, **model},
    )


def make_linear_trial(dropout: float, penalty: float, label: str = "", **method: Any) -> Trial:
    """Return logistic regression with dropout and a ridge penalty."""
    return Trial(
        label=f"dropout {dropout:g}, L2 {penalty:g}{label}",
        method={**HOSPITAL_ADJUSTMENT, **method},
        local={"optimizer": "adam", "lr": 0.01, "schedule": "constant", "weight_decay": penalty},
        model={**LOGISTIC, "dropout": dropout},
    )


def list_linear_trials(
    penalties: Sequence[float] = PENALTIES, dropouts: Sequence[float] = DROPOUTS, **method: Any
) -> tuple[Trial, ...]:
    """Return logistic regression with every pair of a dropout and a ridge penalty."""
    return tuple(make_linear_trial(p, penalty, **method) for p, penalty in product(dropouts, penalties))


def list_networks(
    dropouts: Sequence[float] = (0.6, 0.7, 0.8), decays: Sequence[float] = DECAYS, **model: Any
) -> tuple[Trial, ...]:
    """Return networks with every pair of a dropout and a weight decay."""
    return tuple(
        make_trial(f"dropout {p:g}, decay {decay:g}", p, decay, model=model) for p, decay in product(dropouts, decays)
    )


def list_networks_by(name: str, values: Sequence[float]) -> tuple[Trial, ...]:
    """Return networks with every pair of a dropout and a value of the method's own setting."""
    return tuple(
        make_trial(f"dropout {p:g}, {name} {value:g}", p, 0.1, method={name: value})
        for p, value in product((0.6, 0.7, 0.8), values)
    )


HOSPITALS_EQUAL = replace(
    HOSPITALS_AGAIN,
    title="Heart disease, third table: fifteen trials for every method, other folds",
    receivers=RECEIVERS,
    receiver_trial=7,  # of UEFL's trials the one with the lowest mean validation NLL
    seeds=tuple(range(250, 260)),
    rows={
        "Prevalence only": HOSPITALS_AGAIN.rows["Prevalence only"],
        "Logistic regression, local": Row(
            method="local-only", trials=list_linear_trials(LARGER_PENALTIES, LARGER_DROPOUTS)
        ),
        "Logistic regression, FedAvg": Row(method="fedavg", trials=list_linear_trials()),
        "Logistic regression, FedAvg, fine-tuned": Row(
            method="fine-tuning", trials=list_linear_trials(fine_tuning_epochs=5)
        ),
        "Logistic regression, Ditto": Row(
            method="ditto",
            trials=tuple(
                make_linear_trial(p, penalty, f", λ = {lam:g}", lam=lam)
                for p, penalty in ((0.1, 0.01), (0.2, 0.01), (0.2, 0.03))
                for lam in (0.1, 0.3, 1.0, 3.0, 10.0)
            ),
        ),
        "Logistic regression, centralized": Row(
            method="centralized", trials=list_linear_trials(LARGER_PENALTIES, LARGER_DROPOUTS)
        ),
        "Local-only": Row(method="local-only", trials=list_networks(decays=(0.0, 0.01, 0.03, 0.1, 0.3))),
        "Centralized": Row(method="centralized", trials=list_networks((0.7, 0.8, 0.9), (0.0, 0.01, 0.03, 0.1, 0.3))),
        FEDAVG: Row(method="fedavg", trials=list_networks()),
        "FedAvg, fine-tuned": Row(
            method="fine-tuning", trials=list_networks_by("fine_tuning_epochs", (2, 5, 10, 20, 40))
        ),
        "FedBN": Row(
            method="fedbn", trials=list_networks((0.5, 0.6, 0.7), (0.1, 0.3, 1.0, 3.0, 10.0), encoder="mlp-bn")
        ),
        "Ditto": Row(method="ditto", trials=list_networks_by("lam", (1.0, 3.0, 10.0, 30.0, 100.0))),
        UEFL: use_chosen_rate(
            Row(
                method="uefl",
                trials=tuple(make_gated_trial(penalty, 0.1, p) for p, penalty in product(DROPOUTS, PENALTIES)),
            )
        ),
    },
)
