"""Split-conformal prediction sets: from scores of calibration examples to the sets of classes of new ones.

The score of a class is 1 − p, computed as the probability of all other classes, which is exact where p is near 1. A set
has the classes whose score is at most a quantile. With the ⌈(n+1)(1−α)⌉-th smallest score of n calibration examples, it
has the true class with probability at least 1−α, if examples and new inputs are exchangeable (Vovk et al., 2005; LAC of
Sadinle et al., 2019).

Legend for shapes: n examples, C classes.
"""

from __future__ import annotations

import math
from itertools import count

import torch
from torch import Tensor

ALL_CLASSES = 1.0  # a quantile that every score reaches: no score is larger
NUM_BINS, LARGEST_LOGIT = 512, 23.0  # of histograms: scores from 1e-10 to 1 − 1e-10, equally spaced by their logit


def compute_scores(p: Tensor) -> Tensor:
    """Return the score of every class [n, C] for probabilities [n, C]."""
    others = 1 - torch.eye(p.shape[-1], dtype=torch.float64, device=p.device)
    return (p.double() @ others).clamp(0, ALL_CLASSES)


def count_needed(coverage: float) -> int:
    """Return the smallest number of examples with which sets of this coverage are smaller than all classes."""
    start = max(1, int(coverage / (1 - coverage)) - 1)  # one more or less, by rounding
    return next(n for n in count(start) if _find_rank(n, coverage) <= n)


def compute_quantile(scores: Tensor, coverage: float) -> float:
    """Return the ⌈(n+1)(1−α)⌉-th smallest of the scores of true classes [n]; with too few, the one of all classes."""
    rank = _find_rank(len(scores), coverage)
    return float(scores.double().sort().values[rank - 1]) if rank <= len(scores) else ALL_CLASSES


def count_scores_by_bin(scores: Tensor) -> Tensor:
    """Return a histogram of scores [NUM_BINS + 1], which is all that a silo shows of them to others; counts add up."""
    bins = torch.bucketize(scores.double(), _make_edges())  # bin i ends with the i-th edge; the last ends with 1
    return torch.bincount(bins, minlength=NUM_BINS + 1)


def compute_pooled_quantile(scores: Tensor, others: Tensor, coverage: float, pooling: float) -> float:
    """Return the quantile of own scores [n] together with the histogram of other silos, which counts as `pooling` ones.

    Of a bin, its upper end is used. The more own examples there are, the less the others count.
    """
    edges = torch.cat([_make_edges(), torch.tensor([ALL_CLASSES], dtype=torch.float64)])
    weight = min(pooling, float(others.sum()))
    values = torch.cat([scores.double(), edges])
    weights = torch.cat([torch.ones(len(scores), dtype=torch.float64), others * (weight / max(float(others.sum()), 1))])
    order = values.argsort()
    rank = math.ceil((len(scores) + weight + 1) * coverage - 1e-9)
    reached = (weights[order].cumsum(0) >= rank - 1e-9).nonzero()
    return float(values[order][reached[0, 0]]) if len(reached) else ALL_CLASSES


def _find_rank(n: int, coverage: float) -> int:
    return math.ceil((n + 1) * coverage - 1e-9)  # 10 · 0.9 is not always 9 in floating point


def _make_edges() -> Tensor:
    return torch.linspace(-LARGEST_LOGIT, LARGEST_LOGIT, NUM_BINS, dtype=torch.float64).sigmoid()
