"""A classifier on a Gaussian code: z ~ N(μ(x), σ(x)²), logits = W z + b (FedSR, FedCR)."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from uefl.core.noise import Dropout, GaussianSampler, sampling_mode

MIN_DEVIATION = 1e-6  # keeps σ positive for logarithms and precisions


class Gaussian(NamedTuple):
    """Independent normal distributions."""

    mean: Tensor
    deviation: Tensor


def kl_divergence(p: Gaussian, q: Gaussian) -> Tensor:
    """Return KL(p ‖ q), summed over the last axis."""
    ratio = (p.deviation.square() + (p.mean - q.mean).square()) / (2 * q.deviation.square())
    return (q.deviation.log() - p.deviation.log() + ratio - 0.5).sum(-1)


class GaussianClassifier(nn.Module):
    """A linear layer gives μ and σ, a linear head classifies the sampled code; dropout as in `Classifier`.

    The prediction is the mean over `eval_draws` codes.
    """

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        code_size: int,
        eval_draws: int,
        dropout: float,
        dropout_at: Literal["hidden", "logits"],
    ) -> None:
        super().__init__()
        before: list[nn.Module] = [Dropout(dropout)] if dropout_at == "hidden" else []
        after: list[nn.Module] = [Dropout(dropout)] if dropout_at == "logits" else []
        self.eval_draws = eval_draws
        self.body = nn.Sequential(*before, nn.Linear(in_features, 2 * code_size))
        self.sample = GaussianSampler()
        self.head = nn.Sequential(Dropout(dropout), nn.Linear(code_size, num_classes), *after)

    def posterior(self, features: Tensor) -> Gaussian:
        mean, pre_deviation = self.body(features).chunk(2, -1)
        return Gaussian(mean, F.softplus(pre_deviation) + MIN_DEVIATION)

    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.head(self.sample(*self.posterior(features)))
        return logits

    def predict_logits(self, features: Tensor) -> Tensor:
        """Return logits [eval_draws, B, C] whose predictions are to be averaged; only z is sampled, not dropout."""
        mean, deviation = self.posterior(features)
        shape = (self.eval_draws, *mean.shape)
        with sampling_mode(self.sample):
            logits: Tensor = self.head(self.sample(mean.expand(shape), deviation.expand(shape)))
        return logits
