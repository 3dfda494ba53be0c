"""A classifier on a Gaussian code: z ~ N(μ(x), σ(x)²), logits = W z + b (FedSR, FedCR)."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from uefl.noise import Dropout, Sample, sampling

LEAST = 1e-6  # σ is strictly positive: logarithms and precisions need it


class Gaussian(NamedTuple):
    """Independent normal distributions."""

    mean: Tensor
    deviation: Tensor


def divergence(p: Gaussian, q: Gaussian) -> Tensor:
    """KL(p ‖ q), summed over the last axis."""
    ratio = (p.deviation.square() + (p.mean - q.mean).square()) / (2 * q.deviation.square())
    return (q.deviation.log() - p.deviation.log() + ratio - 0.5).sum(-1)


class GaussianClassifier(nn.Module):
    """The hidden layer gives μ and σ, the code takes the activation's place, a linear head follows; dropout as in
    `Classifier`. The plain prediction is the mean over `draws` codes."""

    def __init__(
        self,
        inputs: int,
        classes: int,
        dimensions: int,
        draws: int,
        dropout: float,
        dropout_at: Literal["hidden", "logits"],
    ) -> None:
        super().__init__()
        before: list[nn.Module] = [Dropout(dropout)] if dropout_at == "hidden" else []
        after: list[nn.Module] = [Dropout(dropout)] if dropout_at == "logits" else []
        self.draws = draws
        self.body = nn.Sequential(*before, nn.Linear(inputs, 2 * dimensions))
        self.sample = Sample()
        self.head = nn.Sequential(Dropout(dropout), nn.Linear(dimensions, classes), *after)

    def posterior(self, features: Tensor) -> Gaussian:
        mean, raw = self.body(features).chunk(2, -1)
        return Gaussian(mean, F.softplus(raw) + LEAST)

    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.head(self.sample(*self.posterior(features)))
        return logits

    def plain(self, features: Tensor) -> Tensor:
        """Logits [draws, B, C] whose predictions are to be averaged; only z is drawn, dropout is as it was."""
        mean, deviation = self.posterior(features)
        shape = (self.draws, *mean.shape)
        with sampling(self.sample):
            logits: Tensor = self.head(self.sample(mean.expand(shape), deviation.expand(shape)))
        return logits
