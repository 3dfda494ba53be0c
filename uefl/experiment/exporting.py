"""A silo's model as one graph: raw inputs in, logits, probabilities and uncertainty out, without any random draw."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from uefl import __version__
from uefl.core import noise_addresses as addresses
from uefl.core.errors import InputError
from uefl.core.noise import Dropout, NoiseLayer, derive_key, uniform
from uefl.core.uncertainty import compute_uncertainty
from uefl.data.table_format import TableFormat
from uefl.experiment.silo_models import SiloFacts, SiloModels
from uefl.experiment.trained_model import TrainedModel
from uefl.models.network import Classifier, Ensemble, Net

UncertaintyKind = Literal["dropout masks", "ensemble", "softmax"]
OUTPUTS = ("logits", "probabilities", "predictive_entropy", "mutual_information")
METADATA_PREFIX = "uefl."


class ExportInput(NamedTuple):
    """The input of an exported model: as raw as the model file allows."""

    name: str  # pixels, cells, tokens or x
    shape: tuple[int, ...]  # of one example
    dtype: torch.dtype
    meaning: str


class ExportedNetwork(nn.Module):
    """A trained model with its scaling, label prior, temperature and dropout masks as constants.

    Dropout is represented by masks that are drawn once, the same for every example and every call. Each example thus
    has as many samples as in `predict`, but outputs depend neither on the batch nor on a seed.
    """

    log_prior: Tensor
    pixel_mean: Tensor
    pixel_std: Tensor

    def __init__(self, model: TrainedModel, mc_samples: int | None = None) -> None:
        super().__init__()
        net = copy.deepcopy(model.net).to("cpu", memory_format=torch.contiguous_format).eval()
        check_exportable(net, model.method_name)
        self.net, self.input_format = net, model.input_format
        self.kind, self.num_samples = choose_uncertainty(net, mc_samples or model.method.mc_samples)
        self.temperature = model.temperature if model.is_calibrated and model.temperature else 1.0
        self.register_buffer("log_prior", model.log_prior.cpu())
        self.table = TableFormat.from_json(model.input_format.table) if model.input_format.table else None
        mean, std = (
            torch.tensor(v or (0.0,)).view(-1, 1, 1) for v in (model.input_format.mean, model.input_format.std)
        )
        self.register_buffer("pixel_mean", mean)
        self.register_buffer("pixel_std", std)
        self.dtype = model.dtype
        if self.kind == "dropout masks":
            self._draw_masks(derive_key(model.seed, model.silo_name, addresses.EXPORTED_MASKS))
        self.requires_grad_(False)

    def _draw_masks(self, key: int) -> None:
        """Replace the dropout layers of the classifier by masks [T, 1, features], one per sample."""
        size = self.net.in_features
        for i, layer in enumerate(self.net.classifier):
            if isinstance(layer, Dropout):
                kept = uniform(derive_key(key, i), (self.num_samples, 1, size)) >= layer.p
                self.net.classifier[i] = MaskedDropout(kept, layer.p)
            size = getattr(layer, "out_features", size)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        logits, samples = self.predict_logits(self.prepare(x))
        p = (logits + self.log_prior).softmax(-1).mean(0)
        uncertainty = compute_uncertainty((samples + self.log_prior).softmax(-1))
        single = logits[0] + self.log_prior if len(logits) == 1 else p.clamp_min(torch.finfo(p.dtype).tiny).log()
        scaled = single / self.temperature
        return scaled, scaled.softmax(-1), uncertainty.predictive_entropy, uncertainty.mutual_information

    def prepare(self, x: Tensor) -> Tensor:
        """Return raw inputs as the network takes them."""
        if self.table:
            return self.table.encode(x).to(self.dtype)
        if self.input_format.is_image:
            return ((x.float() / 255 - self.pixel_mean) / self.pixel_std).to(self.dtype)
        return x if self.input_format.is_integer else x.to(self.dtype)

    def predict_logits(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [M, B, C] of the prediction, and [T, B, C] of the samples."""
        if self.kind == "ensemble":
            logits = torch.cat([member(x).logits for member in self.net.members])
            return logits, logits
        features = self.net.extract_features(x)
        logits = self.net.classifier(features)[None]
        if self.kind == "softmax":
            return logits, logits
        samples = features.expand(self.num_samples, *features.shape)
        for layer in self.net.classifier:
            samples = layer.apply_masks(samples) if isinstance(layer, MaskedDropout) else layer(samples)
        return logits, samples


class MaskedDropout(nn.Module):
    """Dropout with given masks, which only samples apply."""

    kept: Tensor

    def __init__(self, kept: Tensor, p: float) -> None:
        super().__init__()
        self.register_buffer("kept", kept)
        self.scale = 1 / (1 - p)

    def forward(self, x: Tensor) -> Tensor:
        return x

    def apply_masks(self, x: Tensor) -> Tensor:
        """Return the samples [T, B, F] with their masks."""
        return x * self.kept.to(x.dtype) * self.scale


def check_exportable(net: nn.Module, method_name: str) -> None:
    """Raise an `InputError` for a network whose prediction itself is drawn, or that is not ours."""
    members: Any = getattr(net, "members", [net])
    for member in members:
        if not isinstance(member, Net) or not isinstance(member.classifier, Classifier):
            raise InputError(
                f"{method_name or 'this method'} draws its predictions or has a network of its own, which cannot be "
                "exported; methods with the plain network, such as uefl, fedavg, fedbn and fedper, can"
            )


def choose_uncertainty(net: nn.Module, mc_samples: int) -> tuple[UncertaintyKind, int]:
    """Return what the uncertainty is computed from, and the number of samples."""
    if isinstance(net, Ensemble):
        return "ensemble", len(net.members)
    assert isinstance(net, Net)
    classifier = net.classifier
    assert isinstance(classifier, Classifier)
    encoder_draws = any(
        isinstance(m, NoiseLayer) or (isinstance(m, nn.modules.dropout._DropoutNd) and m.p)
        for m in net.encoder.modules()
    )
    has_dropout = any(isinstance(layer, Dropout) and layer.p for layer in classifier)
    return ("dropout masks", mc_samples) if has_dropout and not encoder_draws else ("softmax", 1)


def describe_input(model: TrainedModel) -> ExportInput:
    """Return name, shape and type of the exported model's input."""
    input_format = model.input_format
    if input_format.table:
        columns = TableFormat.from_json(input_format.table).columns
        meaning = "cells of a row in the order of columns: numbers, 0 or 1, or the index of a level; NaN means missing"
        return ExportInput("cells", (len(columns),), torch.float64, meaning)
    if input_format.is_image:
        meaning = "pixels from 0 to 255, channels first; images must have this size"
        return ExportInput("pixels", input_format.shape, torch.uint8, meaning)
    if input_format.is_integer:
        return ExportInput("tokens", input_format.shape, torch.int64, "integers, as in training")
    return ExportInput("x", input_format.shape, torch.float32, "numbers, as in training")


def describe_export(models: SiloModels, network: ExportedNetwork, silo_name: str, run_name: str) -> dict[str, str]:
    """Return the metadata of an exported file, as texts; of all silos, it names only this one."""
    facts = models.description.silos.get(silo_name, SiloFacts())
    table = network.table
    uncertainty = {
        "dropout masks": f"{network.num_samples} dropout masks, drawn once and the same for every example",
        "ensemble": f"the {network.num_samples} members of the ensemble",
        "softmax": "the softmax of the logits alone; mutual information is 0",
    }[network.kind]
    values: dict[str, Any] = {
        "version": __version__,
        "run": run_name,
        "silo": silo_name,
        "method": models.description.method_name,
        "classes": json.dumps(list(models.description.class_names)),
        "input_shape": json.dumps(list(models.description.input_format.shape)),
        "uncertainty": uncertainty,
    }
    if table:
        values["columns"] = json.dumps([asdict(column) for column in table.columns])
    if facts.temperature is not None:
        values["temperature"] = json.dumps(facts.temperature)
    if facts.thresholds is not None:
        values["thresholds"] = json.dumps(facts.thresholds)
    return {METADATA_PREFIX + name: str(value) for name, value in values.items()}
