"""Uncertainty of predictions, estimated from samples: Monte Carlo dropout passes or members of a deep ensemble.

Gal & Ghahramani, Dropout as a Bayesian approximation (2016); Lakshminarayanan et al., Deep ensembles (2017).
Legend: T samples, B examples, C classes. Natural logarithm throughout (D17).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from uefl.core.errors import InputError

PROBABILITY_TOLERANCE = 1e-2  # of the sum over classes; half precision rounds
CALIBRATION_BINS = 15  # bins of confidence in the calibration histogram


class Uncertainty(NamedTuple):
    """Averaged prediction and uncertainty per example."""

    mean: Tensor  # [B, C] averaged prediction
    predictive_entropy: Tensor  # [B] entropy of the averaged prediction: e in the paper
    expected_entropy: Tensor  # [B] mean entropy of the samples
    mutual_information: Tensor  # [B] between prediction and model: the difference of the two entropies, at least 0


def entropy(p: Tensor) -> Tensor:
    """Return −Σ p log p over the last axis."""
    e: Tensor = -torch.special.xlogy(p, p).sum(-1)
    return e


def estimate_uncertainty(p: Tensor | NDArray[Any]) -> Uncertainty:
    """Estimate the uncertainty from the probabilities p [T, B, C] of sampled predictions."""
    p = torch.as_tensor(p)
    if p.dim() != 3:
        raise InputError(f"p has shape {list(p.shape)}; it must be [samples, examples, classes]")
    sums = p.sum(-1)
    if p.numel() and not (float(p.min()) >= 0 and float((sums - 1).abs().max()) <= PROBABILITY_TOLERANCE):
        wrong = float(p.min()) if float(p.min()) < 0 else float(sums.flatten()[(sums - 1).abs().argmax()])
        kind = "the value" if wrong < 0 else "a sum over classes of"
        raise InputError(
            f"p contains {kind} {wrong:.4g}; it must hold probabilities, not logits: use logits.softmax(-1)"
        )
    return compute_uncertainty(p)


def compute_uncertainty(p: Tensor) -> Uncertainty:
    """Compute the uncertainty of probabilities [T, B, C] that need no check, also under `vmap`."""
    mean = p.mean(0)
    predictive, expected = entropy(mean), entropy(p).mean(0)
    return Uncertainty(mean, predictive, expected, (predictive - expected).clamp_min(0))  # rounding may give −ε


def nll(p: Tensor, y: Tensor) -> Tensor:
    """Return the negative log-likelihood of the label per example."""
    return -p.gather(-1, y[:, None])[:, 0].clamp_min(torch.finfo(p.dtype).tiny).log()


def brier_score(p: Tensor, y: Tensor) -> Tensor:
    """Return the Brier score Σ_c (p_c − [y=c])² per example."""
    return p.square().sum(-1) - 2 * p.gather(-1, y[:, None])[:, 0] + 1


def reliability_sums(p: Tensor, y: Tensor) -> Tensor:
    """Sum examples, confidence and correctness by bin of confidence: [3, CALIBRATION_BINS]; sums of batches add up."""
    confidence, prediction = p.max(-1)
    bins = (confidence * CALIBRATION_BINS).ceil().long().sub(1)  # ]0, 1/15], ]1/15, 2/15], …
    bins = bins.clamp(0, CALIBRATION_BINS - 1)
    values = torch.stack([torch.ones_like(confidence), confidence, (prediction == y).to(confidence.dtype)]).double()
    zeros = torch.zeros(3, CALIBRATION_BINS, dtype=torch.float64, device=p.device)
    return zeros.scatter_add(1, bins.expand(3, -1), values)


def ece(sums: Tensor) -> Tensor:
    """Return the expected calibration error Σ_b n_b/n |accuracy_b − confidence_b| from `reliability_sums`."""
    num_examples, confidence, correct = sums
    error: Tensor = (correct - confidence).abs().sum() / num_examples.sum().clamp_min(1)
    return error
