"""How unsure a prediction is, from samples of it: Monte Carlo dropout passes or the members of a deep ensemble.

Gal & Ghahramani, Dropout as a Bayesian approximation (2016); Lakshminarayanan et al., Deep ensembles (2017).
Legend: T samples, B examples, C classes. Natural logarithm throughout (D17).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BINS = 15  # of the calibration histogram


class Uncertainty(NamedTuple):
    """Per example."""

    mean: Tensor  # [B, C] the averaged prediction
    predictive: Tensor  # [B] entropy of the averaged prediction: e in the paper
    expected: Tensor  # [B] mean entropy of the samples
    information: Tensor  # [B] their difference, the mutual information between prediction and model: never negative


def entropy(p: Tensor) -> Tensor:
    """−Σ p log p over the last axis."""
    e: Tensor = -torch.special.xlogy(p, p).sum(-1)
    return e


def uncertainty(p: Tensor) -> Uncertainty:
    """Of sampled predictions p [T, B, C], probabilities."""
    mean = p.mean(0)
    predictive, expected = entropy(mean), entropy(p).mean(0)
    return Uncertainty(mean, predictive, expected, (predictive - expected).clamp_min(0))  # rounding may go below


def nll(p: Tensor, y: Tensor) -> Tensor:
    """Negative log-likelihood of the labels, per example."""
    return -p.gather(-1, y[:, None])[:, 0].clamp_min(torch.finfo(p.dtype).tiny).log()


def brier(p: Tensor, y: Tensor) -> Tensor:
    """Brier score Σ_c (p_c − [y=c])², per example."""
    return p.square().sum(-1) - 2 * p.gather(-1, y[:, None])[:, 0] + 1


def reliability(p: Tensor, y: Tensor) -> Tensor:
    """Sums [3, BINS] of examples, confidence and correctness by confidence: additive, so silos need send no more."""
    confidence, guess = p.max(-1)
    bin_ = (confidence * BINS).ceil().long().sub(1).clamp(0, BINS - 1)  # ]0, 1/15], ]1/15, 2/15], …
    values = torch.stack([torch.ones_like(confidence), confidence, (guess == y).to(confidence.dtype)]).double()
    return torch.zeros(3, BINS, dtype=torch.float64, device=p.device).scatter_add(1, bin_.expand(3, -1), values)


def ece(sums: Tensor) -> Tensor:
    """Expected calibration error from `reliability` sums: Σ_b n_b/n |accuracy_b − confidence_b|."""
    count, confidence, correct = sums
    error: Tensor = (correct - confidence).abs().sum() / count.sum().clamp_min(1)
    return error
