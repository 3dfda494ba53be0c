"""Encoder → codebook → classifier: z = f_E(x), c = f_D(z), p = f_C(c) (Eq. 1), around any encoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uefl.core import noise_addresses as addresses
from uefl.core.codebook import Codebook, QuantizedFeatures, arrange_features, bypass_quantization, to_tokens
from uefl.core.errors import InputError
from uefl.core.noise import Dropout, derive_key, iterate_passes, salt_noise_layers, sampling_mode
from uefl.models.augmentation import Augmentation
from uefl.models.gaussian import GaussianClassifier


class Prediction(NamedTuple):
    """The network's outputs for a batch. M is 1, or the number of members of an ensemble."""

    logits: Tensor  # [M, B, C]; the prediction is the mean over M
    commitment_loss: Tensor  # ‖sg(c) − z‖², summed over members
    codebook_loss: Tensor  # ‖c − sg(z)‖², summed over members
    codeword_indices: Tensor  # [M, B, l, s]
    sampled_logits: Tensor | None = None  # [T, B, C], of T Monte Carlo samples


class Classifier(nn.Sequential):
    """One hidden layer and two dropout layers: before and after it, or after it and on the logits (D2).

    With `hidden_size=0` the classifier is linear, with dropout before it or on the logits.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        hidden_size: int,
        dropout: float,
        dropout_at: Literal["hidden", "logits"],
    ) -> None:
        before: list[nn.Module] = [Dropout(dropout)] if dropout_at == "hidden" else []
        after: list[nn.Module] = [Dropout(dropout)] if dropout_at == "logits" else []
        hidden = [nn.Linear(in_features, hidden_size), nn.GELU(), Dropout(dropout)] if hidden_size else []
        super().__init__(*before, *hidden, nn.Linear(hidden_size or in_features, num_classes), *after)

    def predict_logits(self, features: Tensor) -> Tensor:
        """Return logits [M, B, C] whose predictions are to be averaged; M is 1."""
        logits: Tensor = self(features)
        return logits.unsqueeze(0)


class Net(nn.Module):
    """The network that every method starts from; FedAvg uses it without a codebook."""

    codebook: Codebook | None
    classifier: Classifier | GaussianClassifier

    def __init__(
        self,
        encoder: nn.Module,
        num_classes: int,
        input_shape: tuple[int, ...],
        *,
        hidden_size: int = 512,
        dropout: float = 0.1,
        dropout_at: Literal["hidden", "logits"] = "hidden",
        feature_norm: Literal["layer", "none"] = "layer",
        augment: str = "",
        pixel_mean: Sequence[float] = (0.5,),
        pixel_std: Sequence[float] = (0.25,),
        input_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.augment = Augmentation.parse(augment, pixel_mean, pixel_std) if augment else None
        if self.augment and self.augment.needs_color and input_shape[0] != 3:
            raise InputError(f"augment={augment} needs images of 3 channels, not {input_shape[0]}")
        self.augment_specification, self.pixel_constants = augment, (tuple(pixel_mean), tuple(pixel_std))
        self.encoder = encoder
        self.feature_norm = feature_norm
        self.codebook = None
        with torch.no_grad():
            training, z = encoder.training, to_tokens(encoder.eval()(torch.zeros(1, *input_shape, dtype=input_dtype)))
            encoder.train(training)
        self.num_features, self.in_features = z.shape[2], z.shape[1] * z.shape[2]
        self.input_shape, self.num_classes, self.hidden_size = input_shape, num_classes, hidden_size
        self.dropout, self.dropout_at, self.input_dtype = dropout, dropout_at, input_dtype
        self.classifier = Classifier(self.in_features, num_classes, hidden_size, dropout, dropout_at)
        salt_noise_layers(self)

    def rebuild(self, *, encoder: nn.Module | None = None, num_classes: int = 0) -> Net:
        """Return a network like this one with another encoder or other classes, and a new classifier."""
        return Net(
            encoder or self.encoder,
            num_classes or self.num_classes,
            self.input_shape,
            hidden_size=self.hidden_size,
            dropout=self.dropout,
            dropout_at=self.dropout_at,
            feature_norm=self.feature_norm,
            augment=self.augment_specification,
            pixel_mean=self.pixel_constants[0],
            pixel_std=self.pixel_constants[1],
            input_dtype=self.input_dtype,
        )

    def use_gaussian_classifier(self, code_size: int, eval_draws: int) -> Net:
        """Replace the classifier's hidden layer by a Gaussian code; size 0 means the size of the hidden layer."""
        code_size = code_size or self.hidden_size
        if not code_size:
            raise InputError("hidden_size=0 leaves no size for the Gaussian code; set code_size or hidden_size")
        self.classifier = GaussianClassifier(
            self.in_features, self.num_classes, code_size, eval_draws, self.dropout, self.dropout_at
        )
        salt_noise_layers(self)
        return self

    def add_codebook(self, segments: int, num_codewords: int, **options: Any) -> Net:
        """Put a codebook with these options between encoder and classifier."""
        self.codebook = Codebook(self.num_features, segments, num_codewords, **options)
        return self

    def encode_features(self, x: Tensor) -> Tensor:
        """Return tokens [B,l,d], or a vector per image [B,d], normalized before they are split into segments (D20)."""
        z = arrange_features(self.encoder(self.augment(x) if self.augment else x))
        return F.layer_norm(z, z.shape[-1:]) if self.feature_norm == "layer" else z

    def encode(self, x: Tensor) -> Tensor:
        """Return features as tokens [B,l,d]; a vector per image is one token."""
        return to_tokens(self.encode_features(x))

    def encode_segments(self, x: Tensor) -> Tensor:
        """Return the segments that the codebook quantizes and K-means clusters: [1, N, D]."""
        if self.codebook is None:
            raise ValueError("this network has no codebook")
        return self.codebook.split_segments(self.encode(x)).unsqueeze(0)

    def quantize(self, z: Tensor) -> QuantizedFeatures:
        quantized: QuantizedFeatures = bypass_quantization(z) if self.codebook is None else self.codebook(z)
        return quantized

    def encode_and_quantize(self, x: Tensor) -> QuantizedFeatures:
        """Return the input of the classifier as tokens [B,l,d], not yet flattened."""
        return self.quantize(self.encode(x))

    def quantize_features(self, x: Tensor) -> QuantizedFeatures:
        """Return the same without an axis of tokens where the encoder has none: fewer operations."""
        return self.quantize(self.encode_features(x))

    def extract_features(self, x: Tensor) -> Tensor:
        """Return the input of the classifier as one vector per image: [B, l·d]."""
        return self.quantize_features(x).z.flatten(1)

    def forward(self, x: Tensor) -> Prediction:
        quantized = self.quantize_features(x)
        return self._make_prediction(quantized, self.classifier(quantized.z.flatten(1)).unsqueeze(0))

    def predict_with_samples(self, x: Tensor, mc_samples: int) -> Prediction:
        """Predict without dropout, and `mc_samples` times with dropout."""
        quantized = self.quantize_features(x)
        features = quantized.z.flatten(1)
        logits = self.classifier.predict_logits(features)
        with sampling_mode(self):
            if any(m.training for m in self.encoder.modules()):  # the encoder also samples: features differ per pass
                samples = torch.stack([self.forward(x).logits[0] for _ in iterate_passes(self, mc_samples)])
            else:
                samples = self.classifier(features.expand(mc_samples, *features.shape))
        return self._make_prediction(quantized, logits, samples)

    def _make_prediction(
        self, quantized: QuantizedFeatures, logits: Tensor, sampled_logits: Tensor | None = None
    ) -> Prediction:
        indices = quantized.codeword_indices.unsqueeze(0)
        return Prediction(logits, quantized.commitment_loss, quantized.codebook_loss, indices, sampled_logits)


class Ensemble(nn.Module):
    """Deep ensemble: members train in lock-step with separate weights and codewords and without dropout (T9)."""

    def __init__(self, build: Callable[[], Net], ensemble_size: int) -> None:
        super().__init__()
        self.members = nn.ModuleList(build() for _ in range(ensemble_size))
        self.num_classes = cast(Net, self.members[0]).num_classes

    def add_codebook(self, segments: int, num_codewords: int, **options: Any) -> Ensemble:
        for member in self.members:
            assert isinstance(member, Net)
            member.add_codebook(segments, num_codewords, **options)
        return self

    def encode_segments(self, x: Tensor) -> Tensor:
        return torch.cat([member.encode_segments(x) for member in self.members])  # type: ignore[operator]

    def forward(self, x: Tensor) -> Prediction:
        predictions = [member(x) for member in self.members]
        return Prediction(
            torch.cat([p.logits for p in predictions]),
            torch.stack([p.commitment_loss for p in predictions]).sum(),
            torch.stack([p.codebook_loss for p in predictions]).sum(),
            torch.cat([p.codeword_indices for p in predictions]),
        )

    def predict_with_samples(self, x: Tensor, mc_samples: int) -> Prediction:
        del mc_samples  # the members are the samples
        prediction = self.forward(x)
        return prediction._replace(sampled_logits=prediction.logits)


def initialize_network(seed: int, build: Callable[[], nn.Module], adapt: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Build a network and adapt it to a method; its initial weights depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_key(seed, addresses.INITIAL_WEIGHTS))
        return adapt(build())
