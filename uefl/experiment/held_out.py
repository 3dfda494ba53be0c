"""What a silo's model predicts for its calibration examples: all that a calibration and a watch need of them.

It is stored beside the model when a run ends, so that neither needs the data again. Per example it has label,
probabilities, predictive entropy and how often each codeword is used; it has no image and no row of a table. In a
deployment, each silo has its own and sends nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from uefl.core.errors import InputError
from uefl.core.federation import Silo, iterate_batch_slices
from uefl.core.temperature import fit_temperature
from uefl.data.readers.context import ReadContext
from uefl.experiment.checkpoint import load_tensors, save_tensors
from uefl.experiment.silo_models import SiloModels, compute_model_checksum
from uefl.experiment.trained_model import TrainedModel

CALIBRATION_PART = "the calibration part of the run"
LABELED_FILES = "labeled files"
MIN_TEMPERATURE_EXAMPLES = 50  # of the validation split; fewer can make a temperature extreme, and the NLL worse
_TENSORS = ("labels", "probabilities", "entropy", "codeword_counts")


class Measurements(NamedTuple):
    """What a model predicts for n examples of C classes with V codewords."""

    probabilities: Tensor  # [n, C] without dropout, before temperature scaling
    entropy: Tensor  # [n] predictive entropy of the sampled predictions, in nats
    codeword_counts: Tensor  # [n, V] int32, how many features of an example have each codeword; V is 0 without codebook


@dataclass(frozen=True, eq=False)
class HeldOut:
    """The calibration examples of one silo, as its model sees them."""

    labels: Tensor  # [n] int64
    measurements: Measurements
    temperature: float = 1.0  # fitted on validation examples; 1 where there are none
    source: str = CALIBRATION_PART


def measure_examples(
    model: TrainedModel, x: Tensor, first_batch: int = 0, *, show_progress: bool = False
) -> Measurements:
    """Measure converted inputs; the number of the first batch addresses the draws of dropout."""
    slices = list(iterate_batch_slices(len(x), model.batch_size)) or [slice(0, 0)]
    tracked = ReadContext(show_progress=show_progress).track_progress(slices, "predicting", len(slices))
    batches = [_measure_batch(model, x[s], first_batch + i) for i, s in enumerate(tracked)]
    return Measurements(*(torch.cat(tensors) for tensors in zip(*batches, strict=True)))


def _measure_batch(model: TrainedModel, x: Tensor, index: int) -> Measurements:
    predictions = model.predict_batch(x, index, is_calibrated=False)
    return Measurements(
        torch.from_numpy(predictions.probabilities),
        torch.from_numpy(predictions.uncertainty.entropy),
        model.count_codewords(x),
    )


def collect_held_out(models: SiloModels, silos: Sequence[Silo], device: str = "cpu") -> dict[str, HeldOut]:
    """Measure the calibration examples of all silos that have some, each with the model of its silo."""
    held_out = {}
    for silo in silos:
        if silo.calibration is not None and len(silo.calibration.y):
            with suppress(InputError):  # a silo without a model of its own; a finished run must not be lost for it
                held_out[silo.name] = hold_out(models.build(silo.name, device), silo)
    return held_out


def hold_out(model: TrainedModel, silo: Silo) -> HeldOut:
    """Measure the calibration examples of a silo, and fit the temperature if it has enough validation examples."""
    assert silo.calibration is not None
    temperature = 1.0
    if len(silo.validation.y) >= MIN_TEMPERATURE_EXAMPLES:
        validation = measure_examples(model, silo.validation.x.cpu())
        temperature = fit_temperature(validation.probabilities, silo.validation.y.cpu())
    return HeldOut(silo.calibration.y.cpu(), measure_examples(model, silo.calibration.x.cpu()), temperature)


def save_held_out(path: Path, models: SiloModels, held_out: Mapping[str, HeldOut]) -> None:
    """Write the held-out examples of some silos, and by which models they were measured, in one step."""
    tensors = {
        f"{silo_name}/{name}": tensor
        for silo_name, own in held_out.items()
        for name, tensor in zip(_TENSORS, (own.labels, *own.measurements), strict=True)
    }
    values = {name: {"temperature": own.temperature, "source": own.source} for name, own in held_out.items()}
    save_tensors(path, tensors, {"model": compute_model_checksum(models), "silos": values})


def read_held_out(path: Path, models: SiloModels) -> dict[str, HeldOut]:
    """Read what these models gave; without a file, nothing. A damaged file, or one of others, is an `InputError`."""
    if not path.exists():
        return {}
    try:
        tensors, metadata = load_tensors(path)
        if metadata["model"] != compute_model_checksum(models):
            raise InputError(f"{path} was measured with another model than the one beside it")
        return {
            silo_name: HeldOut(own[0], Measurements(*own[1:]), float(values["temperature"]), str(values["source"]))
            for silo_name, values in metadata["silos"].items()
            for own in [[tensors[f"{silo_name}/{name}"] for name in _TENSORS]]
        }
    except (InputError, KeyError, TypeError, ValueError, AttributeError) as e:
        reason = str(e) if isinstance(e, InputError) else f"{path} is damaged ({type(e).__name__}: {e})"
        raise InputError(f"{reason}; move it away to predict; a new calibration then needs labeled files") from None
