"""Calibrate the models of a run silo by silo: temperature, quantile of prediction sets, threshold of abstaining.

Each silo uses its own calibration examples. Only with `pooling` does a silo see others: a histogram of their scores.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from uefl.core.abstention import ALL_ANSWERS, NO_ANSWER, choose_threshold, count_needed_answers
from uefl.core.conformal import (
    ALL_CLASSES,
    compute_pooled_quantile,
    compute_quantile,
    compute_scores,
    count_needed,
    count_scores_by_bin,
)
from uefl.core.errors import InputError
from uefl.core.field_rules import check_ranges, setting
from uefl.core.temperature import scale_probabilities
from uefl.experiment.files import write_text
from uefl.experiment.held_out import HeldOut
from uefl.experiment.silo_models import SiloModels, compute_model_checksum


@dataclass(frozen=True, kw_only=True)
class CalibrationSettings:
    """What is asked of prediction sets and answers."""

    coverage: float = setting(
        0.9, "Share of new examples whose prediction set has their class, at least.", above=0, below=1
    )
    risk: float = setting(
        0.05, "Error rate of the answers, at most; 0 answers always.", at_least=0, below=1, zero="no abstaining"
    )
    pooling: int = setting(
        0, "Examples that the scores of other silos count as, for small silos; 0: each silo by itself.", at_least=0
    )

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class SiloCalibration:
    """What a calibration found at one silo; shares are those of its calibration examples."""

    coverage: float
    risk: float
    pooling: int
    source: str  # which examples were used
    num_examples: int
    temperature: float
    set_threshold: float  # classes with a score 1 − p of at most this are in the set
    answer_threshold: float  # an answer is given if its score is below this
    mean_set_size: float
    share_abstained: float
    notes: tuple[str, ...] = ()  # what could not be reached

    @property
    def thresholds(self) -> dict[str, float]:
        """The numbers that a model needs to predict."""
        names = ("coverage", "risk", "set_threshold", "answer_threshold")
        return {name: getattr(self, name) for name in names}


def calibrate_models(models: SiloModels, settings: CalibrationSettings) -> SiloModels:
    """Return models that also give prediction sets and abstain, each by the calibration part of its silo."""
    if not models.held_out:
        raise InputError("no silo has a calibration part; set calibration_fraction=… in Silo.from_tensors")
    num_classes = len(models.description.class_names)
    return apply_calibrations(models, calibrate_silos(models.held_out, settings, num_classes))


def calibrate_silos(
    held_out: Mapping[str, HeldOut], settings: CalibrationSettings, num_classes: int | None = None
) -> dict[str, SiloCalibration]:
    """Calibrate every silo that has held-out examples, by itself or, with `pooling`, beside the others.

    Sets have the first `num_classes` outputs; further ones are classes of virtual images (VHL), which none can have.
    """
    scores = {name: _score_classes(own) for name, own in held_out.items()}
    counts = {name: count_scores_by_bin(_take_labels(scores[name], own)) for name, own in held_out.items()}
    calibrations = {}
    for name, own in held_out.items():
        others = torch.stack([torch.zeros_like(counts[name]), *(c for n, c in counts.items() if n != name)]).sum(0)
        calibrations[name] = _calibrate_silo(own, scores[name], others, settings, num_classes)
    return calibrations


def _calibrate_silo(
    own: HeldOut, scores: Tensor, others: Tensor, settings: CalibrationSettings, num_classes: int | None
) -> SiloCalibration:
    n, label_scores = len(own.labels), _take_labels(scores, own)
    notes = []
    if settings.pooling:
        quantile = compute_pooled_quantile(label_scores, others, settings.coverage, settings.pooling)
    else:
        quantile = compute_quantile(label_scores, settings.coverage)
    if quantile == ALL_CLASSES:
        needed = count_needed(settings.coverage)
        few = f"{n} examples are too few for a coverage of {settings.coverage:g}, {needed} are needed: "
        notes.append(f"{few if n < needed else ''}every set has all classes")
    top, labels = scores.min(-1)
    threshold = ALL_ANSWERS
    if settings.risk:
        abstention = choose_threshold(top, labels != own.labels, settings.risk)
        threshold = abstention.threshold
        if not abstention.is_certified:
            needed = count_needed_answers(settings.risk)
            why = f"{needed} are needed" if n < needed else "too many answers are wrong"
            notes.append(f"{n} examples cannot certify a risk of {settings.risk:g}, {why}: no answer is given")
    return SiloCalibration(
        **asdict(settings),
        source=own.source,
        num_examples=n,
        temperature=own.temperature,
        set_threshold=quantile,
        answer_threshold=threshold,
        mean_set_size=float((scores[:, :num_classes] <= quantile).sum(-1).double().mean()) if n else 0.0,
        share_abstained=float((top >= threshold).double().mean()) if n else 0.0,
        notes=tuple(notes),
    )


def _score_classes(own: HeldOut) -> Tensor:
    return compute_scores(scale_probabilities(own.measurements.probabilities, own.temperature))


def _take_labels(scores: Tensor, own: HeldOut) -> Tensor:
    return scores[torch.arange(len(own.labels)), own.labels]


def apply_calibrations(models: SiloModels, calibrations: Mapping[str, SiloCalibration]) -> SiloModels:
    """Return models that predict with these temperatures and thresholds."""
    silos = dict(models.description.silos)
    for name, found in calibrations.items():
        silos[name] = replace(silos[name], temperature=found.temperature, thresholds=found.thresholds)
    return replace(models, description=replace(models.description, silos=silos))


def write_calibrations(path: Path, models: SiloModels, calibrations: Mapping[str, SiloCalibration]) -> None:
    """Write what was found in one step."""
    values = {"model": compute_model_checksum(models), "silos": {n: asdict(c) for n, c in calibrations.items()}}
    write_text(path, json.dumps(values, indent=1, ensure_ascii=False) + "\n")


def read_calibrations(path: Path, models: SiloModels) -> dict[str, SiloCalibration]:
    """Read what was found for these models; without a file, nothing. A file of another model is an `InputError`."""
    if not path.exists():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        calibrations = {str(name): _read_calibration(found) for name, found in values["silos"].items()}
        checksum = values["model"]
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as e:
        raise InputError(f"{path} is damaged ({type(e).__name__}: {e}); move it away and calibrate again") from None
    if checksum != compute_model_checksum(models):
        raise InputError(f"{path} belongs to another model; move it away and calibrate again")
    for name in calibrations:
        models.check_silo(name)
    return calibrations


def _read_calibration(values: dict[str, Any]) -> SiloCalibration:
    if {f.name for f in fields(SiloCalibration)} != values.keys():
        raise ValueError("other fields")
    numbers = ("coverage", "risk", "temperature", "set_threshold", "answer_threshold")
    found = SiloCalibration(**{**values, "notes": tuple(values["notes"]), **{n: float(values[n]) for n in numbers}})
    if not (found.temperature > 0 and 0 <= found.set_threshold <= ALL_CLASSES and found.answer_threshold >= NO_ANSWER):
        raise ValueError("a number is out of its range")
    return found


def find_changes(old: Mapping[str, SiloCalibration], new: Mapping[str, SiloCalibration]) -> Sequence[str]:
    """Return the silos that were calibrated before with another result."""
    return [name for name in new if name in old and old[name] != new[name]]
