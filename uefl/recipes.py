"""What a method and a data set mean unless told otherwise: `default`, the recipe that won, and `paper`, the paper's.

Everything the paper does not set (optimiser, rate, batch, local epochs, β, test size) is ours in both.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from uefl.algorithms import Book, algorithm
from uefl.data import defaults
from uefl.errors import unknown
from uefl.experiment import Architecture, Experiment
from uefl.local import Local

PRESETS = ("default", "paper")
COLOUR = ("gtsrb", "cifar10", "cifar100")

# Embedded data: small enough for three minutes on two cores, see docs/log.md for what was tried.
DEMO: dict[str, Any] = {"rounds": 8, "extra_rounds": 6, "iterations": 3}

# method.md's table of what the paper sets: words at first and per extension, threshold, segments.
PAPER: dict[str, tuple[int, float, int]] = {
    "mnist": (32, 0.3, 1),
    "fmnist": (64, 0.1, 1),
    "gtsrb": (64, 0.1, 2),
    "cifar10": (64, 0.2, 1),
    "cifar100": (64, 0.1, 4),
}


def recipe(
    method: str, data: str, preset: str = "default", cut: str = "", *, encoder: str = "", book: bool = False
) -> Experiment:
    """The experiment that a method's and a data set's names stand for; with another encoder, or a book around it."""
    if preset not in PRESETS:
        raise unknown("preset", preset, PRESETS)
    of = algorithm(method)()
    of = replace(of, codebook=Book()) if book and not of.codebook else of
    experiment = _default(Experiment(method=of, data=defaults(data, cut)))
    experiment = _paper(experiment) if preset == "paper" else experiment
    if encoder in ("", experiment.model.encoder):
        return experiment
    return replace(experiment, model=replace(experiment.model, encoder=encoder, width=0, depth=0))  # its own size


def _default(experiment: Experiment) -> Experiment:
    name, method = experiment.data.name, experiment.method
    if name == "mnist5k":
        local = Local(rate=2e-3, batch=64, epochs=3)
        # Validation parts of 44 images are too small for the test of D22: it would hardly ever find a silo uncertain.
        # A small weight on the encoder term lets the words follow the features instead of holding them (D26).
        book = replace(method.codebook, errors=0.0, commitment=0.01) if method.codebook else None
        method = replace(method, **DEMO, local=method.suited(local), codebook=book)
        return replace(experiment, method=method, model=Architecture(width=16, hidden=128))
    if name in COLOUR:
        book = replace(method.codebook, segments=16) if method.codebook else None
        method = replace(method, local=method.suited(Local(rate=1e-4, batch=64, epochs=3)), codebook=book)
        return replace(experiment, method=method, model=Architecture(encoder="vgg16"))
    if name == "pacs":
        method = replace(method, local=method.suited(Local(rate=1e-4, batch=32, epochs=1)))
        return replace(experiment, method=method, model=Architecture(encoder="resnet18", frozen_norms=True))
    local = method.suited(Local(rate=1e-4, batch=256, epochs=5))
    return replace(experiment, method=replace(method, local=local))


def _paper(experiment: Experiment) -> Experiment:
    name, method = experiment.data.name, experiment.method
    method = replace(method, rounds=40, extra_rounds=20, iterations=5)
    model = replace(experiment.model, normalise="none")
    if name in COLOUR:
        model = replace(model, encoder="vgg16-bn")
    elif name != "pacs":
        model = replace(model, width=128, hidden=512)
    if method.codebook:
        words, gamma, segments = PAPER.get(name, PAPER["mnist"])
        book = replace(
            method.codebook,
            words=words,
            segments=segments,
            gamma=gamma,
            first="gaussian",
            commitment=1.0,
            codeword=0.25,  # the paper names no value for β: this one is ours
            errors=0.0,
        )
        method = replace(method, codebook=book)
    return replace(experiment, method=method, model=model)
