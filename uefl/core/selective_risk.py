"""Risk of the predictions that a threshold of the entropy accepts, from histograms that add up over batches and silos.

A histogram counts examples by correctness and by bin of the predictive entropy. Bins are equal on the logit scale of
the entropy's share of its maximum log C, so that very certain and very uncertain predictions have bins of their own.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

RISK_BINS = 1024  # with 256, AUGRC of 100 classes would be wrong by 0.001
_SMALLEST_SHARE = 1e-4  # of log C; entropies below it, or as close to log C, share a bin
_LARGEST_LOGIT = math.log((1 + _SMALLEST_SHARE) / _SMALLEST_SHARE)


def count_outcomes(entropy: Tensor, is_correct: Tensor, num_classes: int) -> Tensor:
    """Count examples by correctness and by bin of the entropy: [2, RISK_BINS]; row 1 is correct, bin 0 most certain."""
    share = (entropy.double() / math.log(max(num_classes, 2))).clamp(0, 1)
    logit = (share + _SMALLEST_SHARE).log() - (1 - share + _SMALLEST_SHARE).log()
    bins = ((logit / _LARGEST_LOGIT + 1) / 2 * RISK_BINS).long().clamp(0, RISK_BINS - 1)
    zeros = torch.zeros(2 * RISK_BINS, dtype=torch.float64, device=entropy.device)
    ones = torch.ones_like(bins, dtype=torch.float64)
    return zeros.scatter_add(0, is_correct.long() * RISK_BINS + bins, ones).view(2, RISK_BINS)


def augrc(counts: Tensor) -> float:
    """Return the area under the curve of P(error and accepted) over the coverage; lower is better.

    Traub et al., Overcoming common flaws in the evaluation of selective classification systems (NeurIPS 2024). Examples
    of one bin are accepted together, in random order.
    """
    wrong, accepted = counts[0].double(), counts.double().sum(0)
    mean_wrong = wrong.cumsum(0) - wrong / 2  # accepted errors, on average over a bin
    return float((accepted * mean_wrong).sum() / counts.sum().clamp_min(1).square())


def risk_at_coverage(counts: Tensor, coverage: float) -> float:
    """Return the error rate of the accepted examples if this share of the examples is accepted, most certain first."""
    wrong, accepted = counts[0].double(), counts.double().sum(0)
    num_accepted = coverage * accepted.sum()
    before = accepted.cumsum(0) - accepted  # examples in bins of lower entropy
    share = ((num_accepted - before) / accepted.clamp_min(1)).clamp(0, 1)  # of a bin that is accepted
    return float((wrong * share).sum() / num_accepted.clamp_min(1e-12))
