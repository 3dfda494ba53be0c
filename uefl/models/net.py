"""Encoder → discretizer → classifier: z = f_E(x), c = f_D(z), p = f_C(c) (Eq. 1), around anyone's encoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from uefl.augment import Augment
from uefl.codebook import Codebook, Coded, tokens, uncoded
from uefl.gaussian import GaussianClassifier
from uefl.noise import Dropout, noises, sampling, turns


class Prediction(NamedTuple):
    """What the network says about a batch. M is 1, or the number of members of an ensemble."""

    logits: Tensor  # [M, B, C]; the plain prediction is the mean over M
    commitment: Tensor  # ‖sg(c) − z‖², summed over members
    codeword: Tensor  # ‖c − sg(z)‖², summed over members
    chosen: Tensor  # [M, B, l, s] which words
    samples: Tensor | None = None  # [T, B, C] logits of sampled predictions


class Classifier(nn.Sequential):
    """One hidden layer and two dropout layers, before and after it, or where the release has them (D2)."""

    def __init__(
        self, inputs: int, classes: int, hidden: int, dropout: float, dropout_at: Literal["hidden", "logits"]
    ) -> None:
        before: list[nn.Module] = [Dropout(dropout)] if dropout_at == "hidden" else []
        after: list[nn.Module] = [Dropout(dropout)] if dropout_at == "logits" else []
        layers = [nn.Linear(inputs, hidden), nn.GELU(), Dropout(dropout), nn.Linear(hidden, classes)]
        super().__init__(*before, *layers, *after)

    def plain(self, features: Tensor) -> Tensor:
        """Logits [M, B, C] whose predictions are to be averaged: here one."""
        logits: Tensor = self(features)
        return logits.unsqueeze(0)


class Net(nn.Module):
    """The model every method starts from; without a codebook it is FedAvg's."""

    codebook: Codebook | None
    classifier: Classifier | GaussianClassifier

    def __init__(
        self,
        encoder: nn.Module,
        classes: int,
        shape: tuple[int, ...],
        *,
        hidden: int = 512,
        dropout: float = 0.1,
        dropout_at: Literal["hidden", "logits"] = "hidden",
        normalise: Literal["layer", "none"] = "layer",
        augment: str = "",
    ) -> None:
        super().__init__()
        self.augment = Augment.spoken(augment) if augment else None
        self.augmented = augment
        self.encoder = encoder
        self.normalise = normalise
        self.codebook = None
        with torch.no_grad():
            was, z = encoder.training, tokens(encoder.eval()(torch.zeros(1, *shape)))
            encoder.train(was)
        self.width, self.inputs = z.shape[2], z.shape[1] * z.shape[2]
        self.shape, self.classes, self.hidden = shape, classes, hidden
        self.dropout, self.dropout_at = dropout, dropout_at
        self.classifier = Classifier(self.inputs, classes, hidden, dropout, dropout_at)
        noises(self)  # every layer that draws learns its name

    def but(self, *, encoder: nn.Module | None = None, classes: int = 0) -> Net:
        """A network like this one with another encoder or other classes; its classifier starts anew."""
        return Net(
            encoder or self.encoder,
            classes or self.classes,
            self.shape,
            hidden=self.hidden,
            dropout=self.dropout,
            dropout_at=self.dropout_at,
            normalise=self.normalise,
            augment=self.augmented,
        )

    def with_gaussian(self, dimensions: int, draws: int) -> Net:
        """Put a Gaussian code in the place of the classifier's hidden layer; 0 dimensions: as wide as that one."""
        dimensions = dimensions or self.hidden
        self.classifier = GaussianClassifier(
            self.inputs, self.classes, dimensions, draws, self.dropout, self.dropout_at
        )
        noises(self)
        return self

    def with_codebook(self, segments: int, words: int, reduction: Literal["mean", "sum"] = "mean") -> Net:
        """Put a discretizer between encoder and classifier."""
        self.codebook = Codebook(self.width, segments, words, reduction)
        return self

    def encode(self, x: Tensor) -> Tensor:
        """Tokens [B,l,d], normalised before they are cut into segments (D20)."""
        z = tokens(self.encoder(self.augment(x) if self.augment else x))
        return F.layer_norm(z, z.shape[-1:]) if self.normalise == "layer" else z

    def segments(self, x: Tensor) -> Tensor:
        """What the quantizer sees, and K-means with it: [1, N, D]."""
        if self.codebook is None:
            raise ValueError("this network has no codebook")
        return self.codebook.split(self.encode(x)).unsqueeze(0)

    def discretize(self, z: Tensor) -> Coded:
        coded: Coded = uncoded(z) if self.codebook is None else self.codebook(z)
        return coded

    def represent(self, x: Tensor) -> Coded:
        """What the classifier is given, not yet flattened."""
        return self.discretize(self.encode(x))

    def features(self, x: Tensor) -> Tensor:
        """The same as one vector an image: [B, l·d]."""
        return self.represent(x).z.flatten(1)

    def forward(self, x: Tensor) -> Prediction:
        coded = self.represent(x)
        logits = self.classifier(coded.z.flatten(1))
        return Prediction(logits.unsqueeze(0), coded.commitment, coded.codeword, coded.chosen.unsqueeze(0))

    def examine(self, x: Tensor, passes: int) -> Prediction:
        """Predict plainly, and `passes` times with dropout on."""
        coded = self.represent(x)
        features = coded.z.flatten(1)
        logits = self.classifier.plain(features)
        with sampling(self):
            if any(m.training for m in self.encoder.modules()):  # the encoder itself draws: nothing to share
                samples = torch.stack([self.forward(x).logits[0] for _ in turns(self, passes)])
            else:
                samples = self.classifier(features.expand(passes, *features.shape))
        return Prediction(logits, coded.commitment, coded.codeword, coded.chosen.unsqueeze(0), samples)


class Ensemble(nn.Module):
    """Deep ensemble: members in lock-step, own weights and words, one shared ledger, dropout off (T9)."""

    def __init__(self, build: Callable[[], Net], members: int) -> None:
        super().__init__()
        self.members = nn.ModuleList(build() for _ in range(members))

    def with_codebook(self, segments: int, words: int, reduction: Literal["mean", "sum"] = "mean") -> Ensemble:
        for member in self.members:
            assert isinstance(member, Net)
            member.with_codebook(segments, words, reduction)
        return self

    def segments(self, x: Tensor) -> Tensor:
        return torch.cat([member.segments(x) for member in self.members])  # type: ignore[operator]

    def forward(self, x: Tensor) -> Prediction:
        each = [member(x) for member in self.members]
        return Prediction(
            torch.cat([p.logits for p in each]),
            torch.stack([p.commitment for p in each]).sum(),
            torch.stack([p.codeword for p in each]).sum(),
            torch.cat([p.chosen for p in each]),
        )

    def examine(self, x: Tensor, passes: int) -> Prediction:
        del passes  # the members are the samples
        seen = self.forward(x)
        return seen._replace(samples=seen.logits)
