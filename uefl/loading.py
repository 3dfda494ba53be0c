"""A trained model from its file, ready to predict for one silo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from uefl.algorithms import algorithm
from uefl.checkpoint import load_tensors
from uefl.engines.serial import load
from uefl.errors import InputError, unknown
from uefl.experiment import Architecture
from uefl.federation import gathered
from uefl.settings import from_plain


def load_model(path: str | Path, silo: str = "") -> nn.Module:
    """The network of a run's `model.safetensors` with the words this silo may use; without a silo, those all share."""
    if not Path(path).is_file():
        raise InputError(f"{path}: no such model file")
    tensors, about = load_tensors(Path(path))
    silos, access = about["silos"], tensors.pop("access")
    if silo and silo not in silos:
        raise unknown("silo", silo, silos)
    row = access[silos.index(silo)] if silo else access.all(0)
    net = _network(about)
    state = {n.removeprefix("state/"): t for n, t in tensors.items() if n.startswith("state/")}
    kept = {n.removeprefix(f"kept/{silo}/"): t for n, t in tensors.items() if silo and n.startswith(f"kept/{silo}/")}
    known = dict(net.named_parameters()) | dict(net.named_buffers())
    load(net, {**gathered(state, row), **{n: t for n, t in kept.items() if n in known}})
    return net.eval()


def _network(about: dict[str, Any]) -> nn.Module:
    experiment = about["experiment"]
    method = from_plain(algorithm(experiment["name"]), experiment["method"])
    model = from_plain(Architecture, {**experiment["model"], "pretrained": ""})
    with torch.random.fork_rng(devices=[]):
        return method.build(model.build(tuple(about["shape"]), len(about["classes"])))
