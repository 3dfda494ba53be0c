"""Settings of a method on a data set: `default`, the best configuration by validation, or `paper`, the paper's.

The paper leaves optimizer, learning rate, batch size, local epochs, β and test size open: both presets use our values.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from uefl.algorithms import METHODS
from uefl.algorithms.extensible_codebook import ExtensibleCodebook
from uefl.core.errors import unknown_value_error
from uefl.core.local import LocalTraining
from uefl.data.defaults import get_default_config
from uefl.experiment.experiment import Experiment
from uefl.models.model_config import ModelConfig

PRESETS = ("default", "paper")
COLOR_DATASETS = ("gtsrb", "cifar10", "cifar100")

# Budget for the embedded data: a comparison takes three minutes on two cores (docs/log.md).
DEMO_BUDGET: dict[str, Any] = {"rounds": 8, "extra_rounds": 6, "iterations": 3}

# The paper's values: codewords initially and per extension (v), threshold γ, segments s.
PAPER_CODEBOOKS: dict[str, tuple[int, float, int]] = {
    "mnist": (32, 0.3, 1),
    "fmnist": (64, 0.1, 1),
    "gtsrb": (64, 0.1, 2),
    "cifar10": (64, 0.2, 1),
    "cifar100": (64, 0.1, 4),
}


def make_experiment(
    method_name: str,
    dataset: str,
    preset: str = "default",
    partitioner: str = "",
    *,
    encoder: str = "",
    with_codebook: bool = False,
) -> Experiment:
    """Return the experiment of a method and a data set, optionally with another encoder or with a codebook."""
    if preset not in PRESETS:
        raise unknown_value_error("preset", preset, PRESETS)
    method = METHODS[method_name]()
    if with_codebook and not method.codebook:
        method = replace(method, codebook=ExtensibleCodebook())
    experiment = _apply_default(Experiment(method=method, data=get_default_config(dataset, partitioner)))
    experiment = _apply_paper(experiment) if preset == "paper" else experiment
    if encoder in ("", experiment.model.encoder):
        return experiment
    return replace(experiment, model=replace(experiment.model, encoder=encoder, width=0, depth=0))


def _apply_default(experiment: Experiment) -> Experiment:
    name, method = experiment.data.name, experiment.method
    if name == "mnist5k":
        local = LocalTraining(lr=2e-3, batch_size=64, epochs=3)
        # With 44 validation images per silo, the noise test of D22 would almost never find a silo uncertain.
        # A small commitment weight lets the codewords follow the features instead of holding them back (D26).
        codebook = method.codebook and replace(method.codebook, min_standard_errors=0.0, commitment_weight=0.01)
        method = replace(method, **DEMO_BUDGET, local=method.adapt_local_training(local), codebook=codebook)
        return replace(experiment, method=method, model=ModelConfig(width=16, hidden_size=128))
    if name == "folder":  # own images: rounds of seconds, and a small network (docs/log.md)
        local = LocalTraining(lr=2e-3, batch_size=64, epochs=1)
        codebook = method.codebook and replace(method.codebook, commitment_weight=0.01)
        method = replace(method, **DEMO_BUDGET, local=method.adapt_local_training(local), codebook=codebook)
        return replace(experiment, method=method, model=ModelConfig(width=16, hidden_size=128))
    if name in COLOR_DATASETS:
        local = LocalTraining(lr=1e-4, batch_size=64, epochs=3)
        codebook = method.codebook and replace(method.codebook, segments=16)
        method = replace(method, local=method.adapt_local_training(local), codebook=codebook)
        return replace(experiment, method=method, model=ModelConfig(encoder="vgg16"))
    if name == "pacs":
        method = replace(method, local=method.adapt_local_training(LocalTraining(lr=1e-4, batch_size=32, epochs=1)))
        return replace(experiment, method=method, model=ModelConfig(encoder="resnet18", frozen_batch_norm=True))
    local = method.adapt_local_training(LocalTraining(lr=1e-4, batch_size=256, epochs=5))
    return replace(experiment, method=replace(method, local=local))


def _apply_paper(experiment: Experiment) -> Experiment:
    name, method = experiment.data.name, experiment.method
    method = replace(method, rounds=40, extra_rounds=20, iterations=5)
    model = replace(experiment.model, feature_norm="none")
    if name in COLOR_DATASETS:
        model = replace(model, encoder="vgg16-bn")
    elif name != "pacs":
        model = replace(model, width=128, hidden_size=512)
    if method.codebook:
        num_codewords, gamma, segments = PAPER_CODEBOOKS.get(name, PAPER_CODEBOOKS["mnist"])
        codebook = replace(
            method.codebook,
            num_codewords=num_codewords,
            segments=segments,
            gamma=gamma,
            codebook_init="gaussian",
            commitment_weight=1.0,
            codebook_loss_weight=0.25,  # β; the paper gives no value
            min_standard_errors=0.0,
        )
        method = replace(method, codebook=codebook)
    return replace(experiment, method=method, model=model)
