"""The tables in which UEFL has the settings of the preset `default`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from studies.rivals.trials import FEDAVG, NO_CODEWORDS, NO_NORM, RATES, UEFL, Row, Schedule, Setup, Trial
from uefl.experiment.parsing import parse_experiments

LAST_ROUND = ("evaluate_every=1000", "evaluate_local=false")  # nothing else is read
OWN_IMAGES = (  # what the preset has for own images, at a size for a CPU
    *("encoder=residual", "train_per_silo=600", "test_per_silo=400", "width=16", "hidden_size=128"),
    *("rounds=8", "extra_rounds=6", "iterations=3", "local.lr=0.002", "batch_size=64", "epochs=1"),
)


def make_preset_setup(
    data: str,
    *settings: str,
    title: str,
    seeds: Sequence[int],
    num_rotations: int = 0,
    folds: int = 0,
    superseded: str = "",
) -> Setup:
    """Return a setup in which every method has the settings of the preset `default` for a data set.

    With a number of rotations, IFCA is beside the others and knows it. FedAvg also runs with UEFL's learning rates,
    with and without fine-tuning.
    """
    methods = {FEDAVG: "fedavg", "FedAvg, fine-tuned": "fine-tuning"}
    if num_rotations:
        methods |= {f"IFCA, {num_rotations} models": "ifca"}
        settings = (*settings, f"num_models={num_rotations}")
    methods |= {UEFL: "uefl"}
    experiments = parse_experiments([*methods.values(), data, *settings], (), "default")
    first = experiments["fedavg"]
    assert all(e.method.local == first.method.local for e in experiments.values())
    values = {}
    for row, name in methods.items():
        method = experiments[name].method
        values[row] = {f.name: getattr(method, f.name) for f in fields(method) if f.init and f.name != "local"}
    group_rounds = values[UEFL]["group_rounds"]
    rows = {row: Row(method=m, trials=(Trial(label="preset", method=values[row]),)) for row, m in methods.items()}
    restarted = [row for row in methods if row.startswith(FEDAVG)]
    if folds:  # the rows of such a table are its trials
        uefl, local = {UEFL: rows.pop(UEFL)}, {"restart_rounds": group_rounds}
        for row in restarted:
            (trial,) = rows[row].trials
            rows[f"{row}{RATES}"] = replace(rows[row], trials=(replace(trial, local=local),))
        rows |= uefl
    return Setup(
        title=title,
        data=first.data,
        model=first.model,
        local=first.method.local,
        rounds={},
        schedules=(Schedule(schedule=first.method.local.schedule, lr=first.method.local.lr),),
        rows=rows,
        seeds=seeds,
        receivers=(),
        ablations=NO_CODEWORDS,
        precision=first.precision,
        superseded=superseded,
        restart_rounds=0 if folds else group_rounds,
        restarted_rows=restarted,
        folds=folds,
    )


def make_searched_setup(data: str, *settings: str, title: str, seeds: Sequence[int], rates: Sequence[float]) -> Setup:
    """Return a setup with the preset's network and rounds, whose schedule and rate are chosen with FedAvg.

    Every method chooses by validation whether layer norm is used, and whether the rate starts again in the last rounds,
    as in UEFL's group rounds; UEFL chooses whether it has these.
    """
    preset = make_preset_setup(data, *settings, title=title, seeds=seeds)
    group_rounds = preset.rows[UEFL].trials[0].method["group_rounds"]
    rows = {}
    for name, row in preset.rows.items():
        method = row.trials[0].method
        variants: Mapping[str, dict[str, Any]] = {
            "one schedule": {"method": method},
            "restarted rate": {"method": method, "local": {"restart_rounds": group_rounds}},
        }
        if name == UEFL:
            variants = {"groups": {"method": method}, "no groups": {"method": {**method, "group_rounds": 0}}}
        trials = [
            Trial(label=f"{label}{norm}", **variant, model=model)
            for label, variant in variants.items()
            for norm, model in (("", {}), (", no layer norm", NO_NORM))
        ]
        rows[name] = Row(method=row.method, trials=trials)
    schedules = tuple(Schedule(schedule=s, lr=lr) for s in ("constant", "cosine") for lr in rates)
    return replace(preset, rows=rows, schedules=schedules, restart_rounds=0)  # a trial, where it is chosen


PRESET_SETUPS: Mapping[str, Setup] = {
    "default": make_preset_setup(
        "mnist5k",
        "group_rounds=0",  # as the preset was then
        title="Embedded digits, nine silos, every method with the preset `default`, before it had groups",
        seeds=range(120, 130),
        superseded="the preset has changed; `default-groups` is of the present one",
    ),
    "default-groups": make_preset_setup(
        "mnist5k",
        *LAST_ROUND,
        title="Embedded digits, nine silos, every method with the preset `default`",
        seeds=range(150, 160),
        num_rotations=3,
    ),
    "default-fashion": make_preset_setup(
        "fmnist",
        *LAST_ROUND,
        *OWN_IMAGES,
        "image_size=14",
        title="Fashion-MNIST at 14 × 14 pixels, nine silos of 600 images, every method with the preset for own images",
        seeds=range(120, 130),
    ),
    "default-color": make_preset_setup(
        "cifar10",
        *LAST_ROUND,
        *OWN_IMAGES,
        "image_size=16",
        title="CIFAR10 at 16 × 16 pixels, nine silos of 600 images, every method with the preset for own images",
        seeds=range(160, 170),
    ),
    "default-cifar10": make_preset_setup(
        "cifar10",
        *LAST_ROUND,
        "precision=bf16",  # faster than tf32, the default
        title="CIFAR10, nine silos, VGG16 without pretrained weights, every method with the preset `default`, in bf16",
        seeds=range(130, 135),
    ),
    "default-hospitals": make_preset_setup(
        "heart",
        *LAST_ROUND,
        "validation_fraction=0.2",
        title="Heart disease, every method with the preset `default`, other folds",
        seeds=range(260, 270),
        folds=5,
    ),
    "own-fashion": make_searched_setup(
        "fmnist",
        *LAST_ROUND,
        *OWN_IMAGES,
        "image_size=14",
        title="Fashion-MNIST at 14 × 14 pixels, nine silos of 600 images, schedule and rate chosen with FedAvg",
        seeds=range(180, 190),
        rates=(1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2),
    ),
    "own-color": make_searched_setup(
        "cifar10",
        *LAST_ROUND,
        *OWN_IMAGES,
        "image_size=16",
        title="CIFAR10 at 16 × 16 pixels, nine silos of 600 images, schedule and rate chosen with FedAvg",
        seeds=range(180, 190),
        rates=(1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2),
    ),
}
