"""Twelve trials for every method on nine silos of MNIST, as many as UEFL had had when its second table was made.

Then sixteen: UEFL's further four have the rule for alike silos that is the default since. Those of the other methods
combine what lowered their validation NLL among the twelve.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from studies.rivals.trials import (
    FEDAVG,
    IFCA,
    IMAGE_ROWS,
    NO_NORM,
    SEGMENTED,
    SLOWER,
    UEFL,
    Row,
    Trial,
    list_tuning_trials,
    make_uefl_trial,
)

REGULARIZERS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "dropout 0": {"model": {"dropout": 0.0}},
    "dropout 0.3": {"model": {"dropout": 0.3}},
    "decay 0.0001": {"local": {"weight_decay": 1e-4}},
    "decay 0.001": {"local": {"weight_decay": 1e-3}},
}
FURTHER_REGULARIZERS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    **REGULARIZERS,
    "decay 0.003": {"local": {"weight_decay": 3e-3}},
    "dropout 0.3, decay 0.0001": {"model": {"dropout": 0.3}, "local": {"weight_decay": 1e-4}},
    "dropout 0.3, decay 0.001": {"model": {"dropout": 0.3}, "local": {"weight_decay": 1e-3}},
    "dropout 0.5": {"model": {"dropout": 0.5}},
}


def change_trial(trial: Trial, label: str, **changes: Mapping[str, Any]) -> Trial:
    """Return a trial with other settings beside its own."""
    merged: dict[str, Any] = {part: {**getattr(trial, part), **values} for part, values in changes.items()}
    return replace(trial, label=f"{trial.label}, {label}", **merged)


def drop_norm(trials: Sequence[Trial]) -> list[Trial]:
    """Return trials without layer norm."""
    return [change_trial(trial, "no layer norm", model=NO_NORM) for trial in trials]


def regularize(trials: Sequence[Trial]) -> list[Trial]:
    """Return every trial with two values of dropout and two of the weight decay."""
    return [change_trial(trial, label, **changes) for trial in trials for label, changes in REGULARIZERS.items()]


def make_equal_rows(group_trials: Sequence[Trial]) -> dict[str, Row]:
    """Return the rows of the first table with more trials; UEFL's are those of both tables, and four more."""
    first = {name: list(row.trials) for name, row in IMAGE_ROWS.items()}
    ditto = [Trial(label=f"λ = {x:g}", method={"lam": x}) for x in (0.0003, 0.001, 0.3, 1.0)]
    more = {
        FEDAVG: regularize(first[FEDAVG][:2]),
        "FedBN": regularize(first["FedBN"][:2]),
        "FedAvg, fine-tuned": [*list_tuning_trials((1, 2, 20, 40))],
        "FedBN, fine-tuned": [*list_tuning_trials((1, 2, 20, 40), batch_norm="personal")],
        "FedPer": [*drop_norm(first["FedPer"]), *regularize(first["FedPer"][2:3])],
        "Ditto": [*ditto, *drop_norm([*ditto[1:2], *first["Ditto"][:3]])],
        IFCA: [
            *drop_norm(first[IFCA]),
            *(replace(t, label=f"{t.label}, a third of the rate", lr_factor=SLOWER) for t in first[IFCA][:2]),
            *regularize(first[IFCA][1:2])[1:3],
        ],
        "Local-only": regularize([first["Local-only"][0], first["Local-only"][2]]),
        UEFL: [
            *group_trials,
            *regularize(group_trials[:1])[:3],
            make_uefl_trial(
                "4 × 256, gate from .1", 0, **SEGMENTED, gate_value=0.1, rounds=_read_rounds(group_trials[0])
            ),
        ],
    }
    return {name: replace(row, trials=(*first[name], *more[name])) for name, row in IMAGE_ROWS.items()}


def make_further_rows(group_trials: Sequence[Trial]) -> dict[str, Row]:
    """Return the rows of the third table with four more trials each."""
    rows = make_equal_rows(group_trials)

    def combine(row: str, label: str, *regularizers: str) -> list[Trial]:
        trial = next(t for t in rows[row].trials if t.label == label)
        return [change_trial(trial, r, **FURTHER_REGULARIZERS[r]) for r in regularizers]

    decays, both = ("decay 0.0001", "decay 0.001"), ("dropout 0.3, decay 0.0001", "dropout 0.3, decay 0.001")
    more = {
        FEDAVG: combine(FEDAVG, "layer norm", "decay 0.003", *both, "dropout 0.5"),
        "FedBN": combine("FedBN", "layer norm", "decay 0.003", *both, "dropout 0.5"),
        "FedAvg, fine-tuned": combine("FedAvg, fine-tuned", "5 epochs, no layer norm", "dropout 0.3", *decays, both[1]),
        "FedBN, fine-tuned": [
            *combine("FedBN, fine-tuned", "40 epochs, no layer norm", "dropout 0.3", "decay 0.001"),
            *combine("FedBN, fine-tuned", "5 epochs", "dropout 0.3", "decay 0.001"),
        ],
        "FedPer": combine("FedPer", "last layer, no layer norm", "dropout 0.3", *decays, both[1]),
        "Ditto": combine("Ditto", "λ = 0.01, no layer norm", "dropout 0.3", *decays, both[1]),
        IFCA: [
            *combine(IFCA, "4 models", "decay 0.001", "dropout 0.3, decay 0.0001"),
            *(t for k in (3, 6) for t in combine(IFCA, f"{k} models, no layer norm", "decay 0.0001")),
        ],
        "Local-only": [
            *combine("Local-only", "no layer norm", "decay 0.003", *both),
            *combine("Local-only", "no layer norm, a third of the rate", "decay 0.003"),
        ],
        UEFL: list_halves_trials(group_trials[0]),
    }
    return {name: replace(row, trials=(*row.trials, *more[name])) for name, row in rows.items()}


def list_halves_trials(trial: Trial) -> list[Trial]:
    """Return a trial in groups of silos with the present rule for alike silos, regularized, and with a smaller gate."""
    codebook = replace(trial.method["codebook"], alike_rule="halves")
    halves = replace(trial, label=f"{trial.label}, halves", method={**trial.method, "codebook": codebook})
    gated = {**halves.method, "codebook": replace(codebook, gate_value=0.1)}
    regularizers = ("dropout 0.3", "dropout 0.3, decay 0.0001", "dropout 0.5")
    return [
        *(change_trial(halves, r, **FURTHER_REGULARIZERS[r]) for r in regularizers),
        change_trial(halves, "gate from .1, dropout 0.3", method=gated, **FURTHER_REGULARIZERS["dropout 0.3"]),
    ]


def _read_rounds(trial: Trial) -> dict[str, Any]:
    """Return the rounds of a trial in groups of silos."""
    return {name: trial.method[name] for name in ("iterations", "group_rounds")}
