"""Compare two methods on the same seeds or folds: the mean paired difference with its t-interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean, variance
from typing import NamedTuple

from scipy.stats import t


class Difference(NamedTuple):
    """A mean paired difference with its 95 % interval and the one-sided p-value of `no gain`."""

    mean: float
    low: float
    high: float
    p_value: float


def compare_pairs(values: Sequence[float], reference: Sequence[float], test_to_train: float = 0.0) -> Difference:
    """Return values − reference with the t-interval over pairs.

    Folds share training rows, so the variance of the mean is (1/J + n_test/n_train) s² (Nadeau and Bengio, 2003).
    """
    differences = [a - b for a, b in zip(values, reference, strict=True)]
    count = len(differences)
    if count < 2:
        raise ValueError(f"an interval needs at least two pairs, not {count}")
    center, error = mean(differences), math.sqrt((1 / count + test_to_train) * variance(differences))
    if error == 0:
        return Difference(center, center, center, 0.0 if center > 0 else 1.0)
    half = float(t.ppf(0.975, count - 1)) * error
    return Difference(center, center - half, center + half, float(t.sf(center / error, count - 1)))
