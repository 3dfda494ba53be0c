"""Setups that need files: color images with pretrained encoders, and digits of three devices.

Before a run, these files must be in the current folder: `VGG16_WEIGHTS` and `RESNET18_WEIGHTS` (torchvision's ImageNet
weights of the encoder, under torchvision's names; any precision) and `DEVICES` (`python -m studies.digit_devices`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from studies.rivals.trials import (
    FEDAVG,
    IMAGE_ROWS,
    NO_NORM,
    NORM_TRIALS,
    SEEDS,
    TRIAL_SEEDS,
    UEFL,
    Row,
    Schedule,
    Setup,
    Trial,
    list_tuning_trials,
    make_uefl_trial,
)
from uefl.core.local import LocalTraining
from uefl.data.defaults import get_default_config
from uefl.models.model_config import ModelConfig

VGG16_WEIGHTS, RESNET18_WEIGHTS = "vgg16_features_imagenet.safetensors", "resnet18_backbone_imagenet.safetensors"
DEVICES = "digit-devices.zip"


def list_schedules(*rates: float) -> tuple[Schedule, ...]:
    """Return a constant and a falling learning rate for each of these."""
    return tuple(Schedule(schedule=s, lr=lr) for s in ("constant", "cosine") for lr in rates)


def make_faster(trial: Trial, factor: float) -> Trial:
    """Return a trial with a multiple of the learning rate."""
    return replace(trial, label=f"{trial.label}, {factor:g} × the rate", lr_factor=factor)


# Encoders without batch norm of their own to keep, or with a frozen one: FedBN is FedAvg there.
PRETRAINED_ROWS: Mapping[str, Row] = {
    FEDAVG: Row(method="fedavg", trials=NORM_TRIALS),
    "FedAvg, fine-tuned": Row(method="fine-tuning", trials=list_tuning_trials()),
    UEFL: Row(
        method="uefl",
        trials=tuple(
            make_uefl_trial(
                label, epochs, batch_norm="average", model=model, num_codewords=0, segments=0, gate_value=gate_value
            )
            for label, epochs, model, gate_value in (
                ("gate from .1", 0, {}, 0.1),
                ("gate from .1, 5 epochs", 5, {}, 0.1),
                ("gate from .25, 5 epochs", 5, {}, 0.25),
                ("gate from .25, no layer norm, 10 epochs", 10, NO_NORM, 0.25),
            )
        ),
    ),
}
# CIFAR has three silos of each of three rotations, which can train in groups in the last 3 of the 12 rounds.
_GROUPS: dict[str, Any] = {"iterations": 3, "group_rounds": 3}
_PRETRAINED_CODEBOOK: dict[str, Any] = {"batch_norm": "average", "num_codewords": 0, "segments": 0}
CIFAR_TRIALS = (
    make_uefl_trial("gate from .1", 0, **_PRETRAINED_CODEBOOK, gate_value=0.1),
    make_uefl_trial("gate from .25, 5 epochs", 5, **_PRETRAINED_CODEBOOK, gate_value=0.25),
    make_uefl_trial("gate from .1, in groups", 0, **_PRETRAINED_CODEBOOK, gate_value=0.1, rounds=_GROUPS),
    make_uefl_trial("gate from .25, in groups, 5 epochs", 5, **_PRETRAINED_CODEBOOK, gate_value=0.25, rounds=_GROUPS),
)
CIFAR_ROWS: Mapping[str, Row] = {**PRETRAINED_ROWS, UEFL: Row(method="uefl", trials=CIFAR_TRIALS)}
# A second table of CIFAR10: schedule and other rows of the first one, half of the rounds in groups, other fresh seeds.
_MORE_GROUPS: dict[str, Any] = {"rounds": 3, "extra_rounds": 3, "iterations": 4, "group_rounds": 6}
GROUP_TRIALS = tuple(
    make_uefl_trial(
        f"gate from {gate:g}, 6 rounds in groups, epochs: {epochs}",
        epochs,
        **_PRETRAINED_CODEBOOK,
        gate_value=gate,
        rounds=_MORE_GROUPS,
    )
    for gate, epochs in ((0.1, 0), (0.1, 5), (0.25, 0), (0.25, 5))
)
# The paper trains for longer. These tables train for 48 epochs instead of 24, with other fresh seeds, and every method
# chooses again: schedule, rate, trial. A constant rate was tried at one value alone in the first tables.
_LARGER_GATE: dict[str, Any] = {**_PRETRAINED_CODEBOOK, "model": NO_NORM, "gate_value": 0.25}
LONG_GTSRB_TRIALS = (
    make_uefl_trial("gate from .25, 10 epochs", 10, **_LARGER_GATE),
    make_uefl_trial("gate from .25, in groups", 0, **_LARGER_GATE, rounds=_GROUPS),
    make_uefl_trial("gate from .25, in groups, 5 epochs", 5, **_LARGER_GATE, rounds=_GROUPS),
    make_uefl_trial("gate from .1, in groups", 0, **_PRETRAINED_CODEBOOK, gate_value=0.1, rounds=_GROUPS),
)
# On CIFAR10 the rate with the lowest NLL costs accuracy, and three times that rate costs NLL. These trials are between.
FASTER_ROWS: Mapping[str, Row] = {
    FEDAVG: Row(
        method="fedavg",
        trials=(
            NORM_TRIALS[1],
            *(make_faster(NORM_TRIALS[1], factor) for factor in (1.5, 2.0)),
            make_faster(NORM_TRIALS[0], 1.5),
        ),
    ),
    "FedAvg, fine-tuned": Row(
        method="fine-tuning",
        trials=(
            *(make_faster(list_tuning_trials((5,))[0], factor) for factor in (1.0, 1.5)),
            *(make_faster(list_tuning_trials((2,))[0], factor) for factor in (1.5, 2.0)),
        ),
    ),
    UEFL: Row(
        method="uefl",
        trials=(
            *(make_faster(CIFAR_TRIALS[2], factor) for factor in (1.0, 1.5, 2.0)),
            make_faster(GROUP_TRIALS[0], 1.5),
        ),
    ),
}
LOCAL_TRIALS = (  # a silo alone may need larger steps than all together
    *NORM_TRIALS[:2],
    Trial(label="layer norm, three times the rate", lr_factor=3.0),
    Trial(label="no layer norm, three times the rate", model=NO_NORM, lr_factor=3.0),
)
PRETRAINED: dict[str, Any] = {
    "local": LocalTraining(optimizer="adam", batch_size=64, epochs=2, eval_batch_size=512),
    "rounds": {"rounds": 6, "extra_rounds": 3, "iterations": 3, "evaluate_local": False, "evaluate_every": 1000},
    "schedules": (*list_schedules(3e-5, 1e-4, 3e-4, 1e-3)[4:], Schedule(schedule="constant", lr=1e-4)),
    "rows": PRETRAINED_ROWS,
    "seeds": SEEDS[:5],
    "trial_seeds": TRIAL_SEEDS[:1],  # these networks are large
    "receivers": (),
    "precision": "bf16",
}
# UEFL's chosen trial of these tables has groups: FedAvg, with and without fine-tuning, also runs with its rates.
RESTARTED: dict[str, Any] = {"restart_rounds": 3, "restarted_rows": (FEDAVG, "FedAvg, fine-tuned")}
VGG16 = ModelConfig(encoder="vgg16", hidden_size=512, pretrained_weights=VGG16_WEIGHTS)
RESNET18 = ModelConfig(encoder="resnet18", hidden_size=512, pretrained_weights=RESNET18_WEIGHTS, frozen_batch_norm=True)
NINE_SILOS: Mapping[str, Setup] = {
    name: Setup(
        **{**PRETRAINED, "rows": rows, **(RESTARTED if name == "cifar10" else {})},
        title=f"{name.upper()}, nine silos, VGG16",
        data=get_default_config(name),
        model=VGG16,
    )
    for name, rows in {"gtsrb": PRETRAINED_ROWS, "cifar10": CIFAR_ROWS, "cifar100": CIFAR_ROWS}.items()
}


def make_longer(name: str, schedules: Sequence[Schedule], trials: Sequence[Trial]) -> Setup:
    """Return a setup with twice as many epochs, other schedules, and other trials of UEFL."""
    return replace(
        NINE_SILOS[name],
        title=f"{NINE_SILOS[name].title}, 48 epochs, other fresh seeds",
        local=replace(PRETRAINED["local"], epochs=4),
        schedules=schedules,
        rows={**NINE_SILOS[name].rows, UEFL: Row(method="uefl", trials=trials)},
        seeds=tuple(range(110, 115)),
        **RESTARTED,
    )


COLOR_SETUPS: Mapping[str, Setup] = {
    **NINE_SILOS,
    "cifar10-again": replace(
        NINE_SILOS["cifar10"],
        title=f"{NINE_SILOS['cifar10'].title}, again: half of UEFL's rounds in groups, other fresh seeds",
        schedules=(Schedule(schedule="cosine", lr=0.0001),),  # chosen in the first table
        rows={**CIFAR_ROWS, UEFL: Row(method="uefl", trials=GROUP_TRIALS)},
        rows_of="cifar10",
        superseded="UEFL had eight trials and the others four; `cifar10-both` has four for every method",
        restart_rounds=0,
        seeds=tuple(range(115, 120)),
    ),
    "cifar10-accuracy": replace(
        NINE_SILOS["cifar10"],
        title=f"{NINE_SILOS['cifar10'].title}, again: all choices by validation accuracy, other fresh seeds",
        # The best by FedAvg's validation accuracy of the first table's grid, and inside it.
        schedules=(Schedule(schedule="cosine", lr=0.0003),),
        seeds=tuple(range(120, 125)),
        chosen_by="accuracy",
    ),
    "cifar10-both": replace(
        NINE_SILOS["cifar10"],
        title=f"{NINE_SILOS['cifar10'].title}, again: the most accurate trials within FedAvg's NLL, ten fresh seeds",
        schedules=(Schedule(schedule="cosine", lr=0.0001),),  # chosen in the first table
        rows=FASTER_ROWS,
        seeds=tuple(range(140, 150)),
        trial_seeds=TRIAL_SEEDS,
        chosen_by="accuracy_within_nll",
    ),
    "gtsrb-long": make_longer("gtsrb", list_schedules(1e-4, 3e-4, 1e-3), LONG_GTSRB_TRIALS),
    "cifar10-long": make_longer(
        "cifar10",
        (*list_schedules(1e-6, 3e-6, 1e-5, 3e-5, 1e-4)[:5], *list_schedules(3e-5, 1e-4, 3e-4)[3:]),  # constant, cosine
        CIFAR_TRIALS,
    ),
    "pacs": Setup(
        **{
            **PRETRAINED,
            "local": replace(PRETRAINED["local"], batch_size=32),
            "schedules": (*list_schedules(3e-6, 1e-5)[2:], *PRETRAINED["schedules"]),
            "seeds": SEEDS,
            "rows": {
                **{name: PRETRAINED_ROWS[name] for name in (FEDAVG, "FedAvg, fine-tuned")},
                "Local-only": Row(method="local-only", trials=LOCAL_TRIALS),
                UEFL: PRETRAINED_ROWS[UEFL],
            },
        },
        title="PACS, four domains as silos, ResNet18 (reconstructed ImageNet weights)",
        data=replace(get_default_config("pacs", "domains"), image_size=96),
        model=RESNET18,
    ),
    "devices": Setup(
        title="Digits of a scanner, of forms and of a tablet",
        data=replace(get_default_config("folder"), path=DEVICES),
        model=ModelConfig(width=16, hidden_size=128),
        local=LocalTraining(optimizer="adam", batch_size=64, epochs=2, eval_batch_size=512),
        rounds={"rounds": 10, "extra_rounds": 5, "iterations": 3, "evaluate_local": False, "evaluate_every": 1000},
        schedules=list_schedules(3e-4, 1e-3, 3e-3, 1e-2),
        rows={name: IMAGE_ROWS[name] for name in (FEDAVG, "FedBN", "FedAvg, fine-tuned", "Local-only", UEFL)},
    ),
}
