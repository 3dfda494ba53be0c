"""Load a trained model, ready to predict for one silo."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import nn

from uefl.algorithms.fedavg import FedAvg
from uefl.core.errors import InputError
from uefl.engines.choosing import check_device
from uefl.experiment.calibration import apply_calibrations, read_calibrations
from uefl.experiment.held_out import read_held_out
from uefl.experiment.run_folder import RunFolder
from uefl.experiment.silo_models import SiloModels
from uefl.experiment.trained_model import TrainedModel


def load(
    path: str | Path,
    silo: str = "",
    *,
    encoder: nn.Module | None = None,
    method: FedAvg | None = None,
    device: str = "cpu",
) -> TrainedModel:
    """Load the model of a silo from a run folder or a model file; without a silo, the one that all silos share.

    `encoder` and `method` are needed only for those of your own, which a file cannot hold.
    """
    check_device(device)
    return open_models(path, encoder, method).build(silo, device)


def open_models(path: str | Path, encoder: nn.Module | None = None, method: FedAvg | None = None) -> SiloModels:
    """Read the models of all silos from a run folder or a model file, with what a calibration has written beside it."""
    file = find_model_file(Path(path))
    models = SiloModels.read(file, encoder, method)
    if file.name != RunFolder.MODEL_FILE:
        return models
    folder = RunFolder(file.parent)
    models = replace(models, held_out=read_held_out(folder.held_out_path, models))
    return apply_calibrations(models, read_calibrations(folder.calibration_path, models))


def find_model_file(path: Path) -> Path:
    """Return the model file that a path names, or that is in the folder that it names."""
    if path.is_file():
        return path
    folder = RunFolder(path)
    if folder.model_path.is_file():
        return folder.model_path
    if folder.has_header:
        raise InputError(f"{path} is unfinished and has no model; run the original command again to resume it")
    if (path / RunFolder.COMPARISON_FILE).is_file():
        raise InputError(
            f"{path} is a comparison and has no model of its own; give one of the run folders that `uefl compare` named"
        )
    raise InputError(f"{path}: no such model file, and no folder with a {folder.MODEL_FILE}")
