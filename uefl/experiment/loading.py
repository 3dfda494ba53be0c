"""Load a trained model, ready to predict for one silo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from uefl.algorithms import METHODS
from uefl.core.errors import InputError, unknown_value_error
from uefl.core.federation import gather_accessible_rows
from uefl.engines.serial import copy_into_network
from uefl.experiment.checkpoint import NamedTensors, load_tensors
from uefl.experiment.experiment import Experiment
from uefl.experiment.run_folder import RunFolder, check_results_format
from uefl.experiment.settings import from_dict
from uefl.models.model_config import ModelConfig


def load(path: str | Path, silo_name: str = "") -> nn.Module:
    """Load the network of a `model.safetensors` with a silo's codewords; without a silo, with those all silos share."""
    if not Path(path).is_file():
        raise InputError(f"{path}: no such model file")
    flat, metadata = load_tensors(Path(path))
    check_results_format(metadata, Path(path))
    silo_names, access, tensors = metadata["silo_names"], flat[RunFolder.ACCESS], NamedTensors.from_flat(flat)
    if silo_name and silo_name not in silo_names:
        raise unknown_value_error("silo", silo_name, silo_names)
    access_row = access[silo_names.index(silo_name)] if silo_name else access.all(0)
    experiment = _read_experiment(metadata)
    net = experiment.build_network(tuple(metadata["input_shape"]), len(metadata["class_names"]))
    names = dict(net.named_parameters()) | dict(net.named_buffers())
    client_state = {n: t for n, t in tensors.client_states.get(silo_name, {}).items() if n in names}
    received, stored = gather_accessible_rows(tensors.model_state, access_row), tensors.client_states.get(silo_name, {})
    initialized = experiment.method.initialize_client(net.state_dict(), received, stored)
    copy_into_network(net, {**received, **initialized, **client_state})
    return net.eval()


def _read_experiment(metadata: dict[str, Any]) -> Experiment:
    config = metadata["experiment"]
    method = from_dict(METHODS[config["name"]], config["method"])
    model = from_dict(ModelConfig, {**config["model"], "pretrained_weights": ""})
    return Experiment(method=method, model=model, seed=config["seed"])
