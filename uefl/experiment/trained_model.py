"""A trained model of one silo: arrays in, arrays out, with the same passes as the evaluation of its run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from uefl.core import noise_addresses as addresses
from uefl.core.conformal import compute_scores
from uefl.core.errors import InputError
from uefl.core.federation import iterate_batch_slices
from uefl.core.label_prior import compute_log_prior
from uefl.core.noise import derive_key, salt_noise_layers
from uefl.core.temperature import scale_probabilities
from uefl.core.uncertainty import compute_uncertainty
from uefl.engines.serial import fork_rng, seed_noise, to_channels_last
from uefl.experiment.experiment import DTYPES
from uefl.experiment.files import ensure_writable_folder
from uefl.experiment.run_folder import RunFolder

if TYPE_CHECKING:
    from uefl.algorithms.fedavg import FedAvg
    from uefl.data.input_format import InputFormat
    from uefl.experiment.silo_models import SiloModels

Array = NDArray[Any]


class PredictionUncertainty(NamedTuple):
    """Uncertainty per example, in nats, from Monte Carlo dropout or the members of an ensemble."""

    entropy: Array  # [n] predictive entropy: how uncertain the averaged prediction is
    mutual_information: Array  # [n] how much the sampled predictions disagree


@dataclass(frozen=True)
class Predictions:
    """Predictions for n examples and C classes."""

    labels: Array  # [n] int64, indices of `classes`
    probabilities: Array  # [n, C] of the prediction without dropout, whose largest is the label; scaled if calibrated
    uncertainty: PredictionUncertainty
    classes: tuple[str, ...]
    sets: list[Array] | None = None  # labels of each prediction set; None: the model is not calibrated
    abstain: Array | None = None  # [n] bool; None: the model is not calibrated

    @property
    def names(self) -> list[str]:
        """The names of the predicted classes."""
        return [self.classes[label] for label in self.labels]

    @property
    def confidence(self) -> Array:
        """The probability of each predicted label: [n]."""
        return np.take_along_axis(self.probabilities, self.labels[:, None], 1)[:, 0]

    def __len__(self) -> int:
        return len(self.labels)


class TrainedModel:
    """The model of one silo, or the one that all silos share."""

    def __init__(
        self,
        net: nn.Module,
        input_format: InputFormat,
        classes: Sequence[str],
        method: FedAvg,
        *,
        silo_name: str,
        seed: int,
        round: int,
        precision: str,
        device: str,
        label_counts: Sequence[int],
        models: SiloModels,
        temperature: float | None = None,
        thresholds: Mapping[str, float] | None = None,
    ) -> None:
        self.device, self.dtype = torch.device(device), DTYPES[precision]
        self.net = net.to(self.device, self.dtype).to(memory_format=torch.channels_last).eval()  # type: ignore[call-overload]
        self.input_format, self.classes, self.method = input_format, tuple(classes), method
        self.silo_name, self.seed, self.round = silo_name, seed, round
        self.label_counts, self.num_classes = tuple(label_counts), len(models.description.class_names)
        self.temperature, self.thresholds = temperature, thresholds
        self._log_prior = self._compute_log_prior()
        self._models, self._noise_layers = models, salt_noise_layers(self.net)

    @property
    def is_calibrated(self) -> bool:
        """Whether predictions have sets and abstain."""
        return self.temperature is not None and self.thresholds is not None

    @property
    def label_prior(self) -> Array | None:
        """The silo's share of training examples per class, or None if only the silo knows it."""
        counts = np.array(self.label_counts, dtype=np.float64)
        return counts / counts.sum() if counts.sum() else None

    def _compute_log_prior(self) -> Tensor:
        """Return what is added to logits [C]: the silo's log π_k if the method adjusts logits, else zeros."""
        counts = torch.zeros(len(self.classes), dtype=torch.float64)
        if self.method.uses_label_prior:
            counts[: len(self.label_counts)] = torch.tensor(self.label_counts, dtype=torch.float64)
        return compute_log_prior(counts).to(self.device, self.dtype)

    @property
    def log_prior(self) -> Tensor:
        """What is added to logits [C]."""
        return self._log_prior

    @property
    def method_name(self) -> str:
        """Name of the method in the registry; empty: a method of the user's own."""
        return self._models.description.method_name

    @property
    def batch_size(self) -> int:
        """Examples per pass."""
        return self.method.local.eval_batch_size

    def predict(self, x: Any, *, mc_samples: int | None = None, seed: int | None = None) -> Predictions:
        """Predict labels, probabilities and uncertainty of examples: a tensor, an array or a list.

        Images of uint8 are scaled as in training; floats are used as they are. `mc_samples` is the number of passes
        with dropout, by default that of the training. With the seed of the training, which is the default, a silo's
        test examples give exactly the evaluation of the last round. A calibrated model scales probabilities by its
        temperature, and adds prediction sets and which answers it abstains from.
        """
        inputs = self.input_format.convert(x)
        slices = list(iterate_batch_slices(len(inputs), self.batch_size)) or [slice(0, 0)]
        batches = [self.predict_batch(inputs[s], i, mc_samples, seed) for i, s in enumerate(slices)]
        return join_predictions(batches)

    def predict_batch(
        self,
        inputs: Tensor,
        index: int,
        mc_samples: int | None = None,
        seed: int | None = None,
        *,
        is_calibrated: bool = True,
    ) -> Predictions:
        """Predict one batch of converted inputs; its index addresses the draws.

        Without `is_calibrated`, a calibrated model predicts as before its calibration.
        """
        if mc_samples is not None and mc_samples < 1:
            raise InputError(f"mc_samples={mc_samples} must be at least 1")
        num_samples, classes = mc_samples or self.method.mc_samples, self.classes
        if not len(inputs):
            none, nothing = np.zeros((0,)), np.zeros((0, len(classes)))
            empty = Predictions(none.astype(np.int64), nothing, PredictionUncertainty(none, none), classes)
            is_calibrated = is_calibrated and self.is_calibrated
            return replace(empty, sets=[], abstain=none.astype(bool)) if is_calibrated else empty
        prediction = self._call_network(inputs, index, num_samples, seed)
        p = (prediction.logits + self._log_prior).softmax(-1).mean(0)
        uncertainty = compute_uncertainty((prediction.sampled_logits + self._log_prior).softmax(-1))
        values = PredictionUncertainty(
            uncertainty.predictive_entropy.cpu().numpy(), uncertainty.mutual_information.cpu().numpy()
        )
        predictions = Predictions(p.argmax(-1).cpu().numpy(), p.cpu().numpy(), values, classes)
        return self._calibrate(predictions, p) if is_calibrated else predictions

    def count_codewords(self, inputs: Tensor) -> Tensor:
        """Count for each converted input how many of its features have each codeword [n, V]; V is 0 without codebook.

        The codewords of the members of an ensemble are different ones.
        """
        codebooks = [getattr(member, "codebook", None) for member in getattr(self.net, "members", [self.net])]
        sizes = [0 if codebook is None else len(codebook.codewords) for codebook in codebooks]
        if not len(inputs) or not all(sizes):
            return torch.zeros(len(inputs), sum(sizes), dtype=torch.int32)
        indices = self._call_network(inputs, 0, 1, None).codeword_indices.flatten(2).cpu()  # [M, n, features]
        counts = [F.one_hot(own, size).sum(1) for own, size in zip(indices, sizes, strict=True)]
        return torch.cat(counts, 1).to(torch.int32)

    def _call_network(self, inputs: Tensor, index: int, num_samples: int, seed: int | None) -> Any:
        x = inputs.to(self.device, self.dtype) if inputs.is_floating_point() else inputs.to(self.device)
        key = derive_key(
            self.seed if seed is None else seed,
            self.silo_name,
            self.round,
            index,
            addresses.TASKS["evaluate"],
            "test",
        )
        with fork_rng(self.device), torch.no_grad():
            seed_noise(self._noise_layers, key, self.device)
            return self.net.predict_with_samples(to_channels_last(x), num_samples)

    def _calibrate(self, predictions: Predictions, p: Tensor) -> Predictions:
        """Return predictions with scaled probabilities, sets and abstaining, if this model is calibrated."""
        if self.temperature is None or self.thresholds is None:
            return predictions
        scaled = scale_probabilities(p, self.temperature)
        scores, set_threshold = compute_scores(scaled).cpu(), self.thresholds["set_threshold"]
        return replace(
            predictions,
            probabilities=scaled.cpu().numpy(),
            # Further outputs are classes of virtual images (VHL): no input has one, so no set has one.
            sets=[row.nonzero()[:, 0].numpy() for row in scores[:, : self.num_classes] <= set_threshold],
            abstain=(scores.min(-1).values >= self.thresholds["answer_threshold"]).numpy(),
        )

    def save(self, folder: str | Path) -> Path:
        """Write this silo's copy of the model to a folder; an existing file is never overwritten."""
        models = self._models.select_silo(self.silo_name) if self.silo_name else self._models
        return save_models(models, Path(folder))


def save_models(models: SiloModels, folder: Path) -> Path:
    """Write a model file into a folder; an existing one is never overwritten."""
    path = RunFolder(ensure_writable_folder(folder)).model_path
    if path.exists():
        raise InputError(f"{path} exists; choose another folder")
    models.save(path)
    if models.held_out:
        from uefl.experiment.held_out import save_held_out  # it needs this module

        save_held_out(RunFolder(folder).held_out_path, models, models.held_out)
    return path


def join_predictions(batches: Sequence[Predictions]) -> Predictions:
    """Return the predictions of several batches as one value."""
    labels, probabilities, entropy, information = (
        np.concatenate(arrays)
        for arrays in zip(*((b.labels, b.probabilities, *b.uncertainty) for b in batches), strict=True)
    )
    joined = Predictions(labels, probabilities, PredictionUncertainty(entropy, information), batches[0].classes)
    if batches[0].sets is None:
        return joined
    return replace(
        joined,
        sets=[own for b in batches if b.sets is not None for own in b.sets],
        abstain=np.concatenate([b.abstain for b in batches if b.abstain is not None]),
    )
