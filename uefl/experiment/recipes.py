"""Settings of a method on a data set: `default`, the best by validation, or `paper`, a row of the paper."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from uefl.algorithms import METHODS
from uefl.algorithms.extensible_codebook import ExtensibleCodebook
from uefl.algorithms.uefl import UEFL
from uefl.core.errors import unknown_value_error
from uefl.core.local import LocalTraining
from uefl.data import SOURCES
from uefl.data.config import DataConfig
from uefl.data.defaults import get_default_config
from uefl.experiment.experiment import Experiment
from uefl.experiment.paper_presets import find_row, replace_settings
from uefl.models.model_config import ModelConfig

PRESETS = ("default", "paper")
COLOR_DATASETS = ("gtsrb", "cifar10", "cifar100")

PUBLIC_IMAGES = 1000  # for methods that need them (FCCL: 5000)
# Budget for the embedded data: a comparison of two methods takes three minutes on two cores (docs/log.md).
DEMO_BUDGET: dict[str, Any] = {"rounds": 8, "extra_rounds": 6, "iterations": 3}
# Budget for tables: twenty rounds take seconds for hundreds of rows.
TABLE_BUDGET: dict[str, Any] = {"rounds": 10, "extra_rounds": 5, "iterations": 3}


# The codebook for all data, chosen by validation (docs/log.md). Its size follows from one rule (D33). All silos above
# the threshold get codewords; the permutation test decides which of them are reported (D32).
DEFAULT_CODEBOOK: dict[str, Any] = {
    "num_codewords": 0,
    "segments": 0,
    "commitment_weight": 0.05,
    "codeword_gradient": "task",
    "gate": "learned",
    "gate_value": 0.25,
    "min_standard_errors": 0.0,
}
# After the last round every silo trains on, as with the method `fine-tuning`: by validation this lowers the NLL of the
# preset on all data tried, on Fashion-MNIST by little (docs/log.md).
DEFAULT_TUNING_EPOCHS = 5
# Before that, in the last iteration, groups of alike silos train one model each: by validation this lowers the NLL on
# nine silos of digits, on five silos of which two are alone in their domain, and on hospitals (docs/log.md).


def make_experiment(
    method_name: str,
    dataset: str,
    preset: str = "default",
    partitioner: str = "",
    *,
    encoder: str = "",
    with_codebook: bool = False,
    num_silos: str = "",
) -> Experiment:
    """Return the experiment of a method and a data set, optionally with another encoder or with a codebook.

    `num_silos` is the text that a command line assigns to it; it chooses among rows of the paper.
    """
    if preset not in PRESETS:
        raise unknown_value_error("preset", preset, PRESETS)
    method = METHODS[method_name]()
    if with_codebook and not method.codebook:
        method = replace(method, codebook=ExtensibleCodebook())
    experiment = Experiment(method=method, data=get_default_config(dataset, partitioner))
    experiment = _apply_paper(experiment, num_silos) if preset == "paper" else _apply_default(experiment)
    if method.needs_public_images:
        experiment = replace(experiment, data=add_public_images(experiment.data))
    if encoder in ("", experiment.model.encoder):
        return experiment
    return replace(experiment, model=replace(experiment.model, encoder=encoder, width=0, depth=0))


def add_public_images(data: DataConfig) -> DataConfig:
    """Return the data with public images of another embedded data set, so that silos keep their own images."""
    public_data = "digits" if data.name != "digits" else "mnist5k"
    return replace(data, public_images=PUBLIC_IMAGES, public_data=public_data)


def _apply_default(experiment: Experiment) -> Experiment:
    experiment = _apply_budget(experiment)
    method = experiment.method
    if method.codebook:
        method = replace(method, codebook=replace(method.codebook, **DEFAULT_CODEBOOK))
    if isinstance(method, UEFL):
        method = replace(method, fine_tuning_epochs=DEFAULT_TUNING_EPOCHS)
    return choose_group_rounds(replace(experiment, method=method))


def choose_group_rounds(experiment: Experiment) -> Experiment:
    """Return UEFL with its last iteration in groups, if two come before it: the codebook is extended between these."""
    method = experiment.method
    if not isinstance(method, UEFL):
        return experiment
    return replace(experiment, method=replace(method, group_rounds=method.extra_rounds if method.iterations > 2 else 0))


def _apply_budget(experiment: Experiment) -> Experiment:
    """Return the experiment with network, rounds and local training for its data, equal for all methods."""
    name, method = experiment.data.name, experiment.method
    if name == "mnist5k":
        local = LocalTraining(lr=2e-3, batch_size=64, epochs=3)
        method = replace(method, **DEMO_BUDGET, local=method.adapt_local_training(local))
        return replace(experiment, method=method, model=ModelConfig(width=16, hidden_size=128))
    if SOURCES[name].is_table:  # few rows: strong dropout, and each silo's own class frequencies (docs/log.md)
        local = LocalTraining(optimizer="adamw", lr=1e-3, schedule="cosine", batch_size=16, epochs=2)
        local = method.adapt_local_training(local)
        method = replace(method, **TABLE_BUDGET, local=local, logit_adjustment="local")
        model = ModelConfig(encoder="mlp", width=64, hidden_size=32, dropout=0.5)
        return replace(experiment, method=method, model=model)
    if name == "folder":  # own images: rounds of seconds, and a small network (docs/log.md)
        local = LocalTraining(lr=2e-3, batch_size=64, epochs=1)
        method = replace(method, **DEMO_BUDGET, local=method.adapt_local_training(local))
        return replace(experiment, method=method, model=ModelConfig(width=16, hidden_size=128))
    if name in COLOR_DATASETS:
        local = LocalTraining(lr=1e-4, batch_size=64, epochs=3)
        method = replace(method, local=method.adapt_local_training(local))
        return replace(experiment, method=method, model=ModelConfig(encoder="vgg16"))
    if name == "pacs":
        method = replace(method, local=method.adapt_local_training(LocalTraining(lr=1e-4, batch_size=32, epochs=1)))
        model = ModelConfig(encoder="resnet18", pretrained_weights="imagenet", frozen_batch_norm=True)
        return replace(experiment, method=method, model=model)
    local = method.adapt_local_training(LocalTraining(lr=1e-4, batch_size=256, epochs=5))
    return replace(experiment, method=replace(method, local=local))


def _apply_paper(experiment: Experiment, num_silos: str) -> Experiment:
    row = find_row(experiment.data.name, experiment.data.partitioner, num_silos, experiment.method_name)
    prefix = "method.local."
    local_row = {path.removeprefix(prefix): value for path, value in row.items() if path.startswith(prefix)}
    local = experiment.method.adapt_local_training(replace(LocalTraining(), **local_row))
    experiment = replace(experiment, method=replace(experiment.method, local=local), model=ModelConfig())
    return replace_settings(experiment, {path: value for path, value in row.items() if not path.startswith(prefix)})
