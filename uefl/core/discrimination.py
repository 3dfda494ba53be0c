"""How well scores separate two classes, from histograms of scores that add up over batches and silos.

A histogram counts examples by class and by bin of the probability of the positive class. Two examples in one bin count
as equal, so AUROC differs from that of the exact scores by at most `auroc_resolution`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

SCORE_BINS = 256  # each 1/256 wide
Z_95 = 1.959963984540054  # quantile of the normal distribution, for intervals of 95 %


class Estimate(NamedTuple):
    """A value and its interval of 95 %."""

    value: float
    low: float
    high: float


def count_scores(p: Tensor, y: Tensor) -> Tensor:
    """Count examples by class and by bin of the positive probability p[:, 1]: [2, SCORE_BINS]; row 1 is positive."""
    bins = (p[:, 1] * SCORE_BINS).long().clamp(0, SCORE_BINS - 1)
    zeros = torch.zeros(2 * SCORE_BINS, dtype=torch.float64, device=p.device)
    ones = torch.ones_like(bins, dtype=torch.float64)
    return zeros.scatter_add(0, y * SCORE_BINS + bins, ones).view(2, SCORE_BINS)


def has_both_classes(counts: Tensor) -> bool:
    """Return whether there are examples of both classes, without which nothing here is defined."""
    return bool((counts.sum(1) > 0).all())


def auroc_resolution(counts: Tensor) -> float:
    """Return by how much AUROC may differ from that of the exact scores: half the pairs that share a bin."""
    negative, positive = counts
    return float((negative * positive).sum() / negative.sum() / positive.sum()) / 2


def auroc(counts: Tensor) -> Estimate:
    """Return the area under the ROC curve with DeLong's variance and an interval on the logit scale.

    DeLong, DeLong and Clarke-Pearson (1988). With perfect separation the variance is 0, and the interval is Wilson's
    for as many trials as the smaller class has examples.
    """
    negative, positive = counts.double()
    num_negative, num_positive = float(negative.sum()), float(positive.sum())
    placements = (negative.cumsum(0) - negative / 2) / num_negative  # of a positive example in each bin
    opposite = (positive.flip(0).cumsum(0).flip(0) - positive / 2) / num_positive  # of a negative example
    area = float((positive * placements).sum()) / num_positive
    if min(num_negative, num_positive) < 2:
        return Estimate(area, 0.0, 1.0)
    variance = _variance_of_mean(placements, positive, area) + _variance_of_mean(opposite, negative, area)
    if variance == 0 or not 0 < area < 1:
        return Estimate(area, *_wilson_interval(area, min(num_negative, num_positive)))
    return Estimate(area, *_logit_interval(area, math.sqrt(variance) / (area * (1 - area))))


def auprc(counts: Tensor) -> Estimate:
    """Return the average precision (area under the precision-recall curve) with the logit interval.

    Boyd, Eng and Page (2013): the standard error on the logit scale is 1/√(n θ (1 − θ)) for n positive examples.
    """
    negative, positive = counts.double().flip(1)
    true_positives, false_positives = positive.cumsum(0), negative.cumsum(0)
    precision = true_positives / (true_positives + false_positives).clamp_min(1)
    num_positive = float(positive.sum())
    area = float((positive * precision).sum()) / num_positive
    if not 0 < area < 1:
        return Estimate(area, *_wilson_interval(area, num_positive))
    return Estimate(area, *_logit_interval(area, 1 / math.sqrt(num_positive * area * (1 - area))))


def sensitivity_at(counts: Tensor, specificity: float) -> Estimate:
    """Return the largest sensitivity of a threshold with at least this specificity, and Wilson's interval.

    The threshold is taken as given, so the interval covers the choice of positive examples only.
    """
    negative, positive = counts.double().flip(1)
    allowed = negative.cumsum(0) / negative.sum() <= 1 - specificity + 1e-12
    num_positive = float(positive.sum())
    sensitivity = float((positive * allowed).sum()) / num_positive
    return Estimate(sensitivity, *_wilson_interval(sensitivity, num_positive))


def _variance_of_mean(values: Tensor, counts: Tensor, mean: float) -> float:
    """Return the variance of the mean of values that occur with these counts."""
    n = float(counts.sum())
    return float((counts * (values - mean).square()).sum()) / (n - 1) / n


def _logit_interval(value: float, standard_error: float) -> tuple[float, float]:
    """Return an interval that is symmetric on the logit scale and stays within 0 and 1."""
    logit = math.log(value / (1 - value))
    low, high = (logit + sign * Z_95 * standard_error for sign in (-1, 1))
    return _sigmoid(low), _sigmoid(high)


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def _wilson_interval(value: float, n: float) -> tuple[float, float]:
    """Return Wilson's score interval of a proportion of n trials."""
    center = (value + Z_95**2 / (2 * n)) / (1 + Z_95**2 / n)
    half = Z_95 / (1 + Z_95**2 / n) * math.sqrt(value * (1 - value) / n + Z_95**2 / (4 * n * n))
    return max(center - half, 0.0), min(center + half, 1.0)
