"""Paired comparisons: t-intervals over seeds, the corrected interval of repeated folds, Holm's step-down."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import mean, variance
from typing import NamedTuple

from scipy.stats import t


class Difference(NamedTuple):
    """A mean paired difference with its 95 % interval and the one-sided p-value of `no gain`."""

    mean: float
    low: float
    high: float
    p_value: float


def compare_seeds(values: Sequence[float], reference: Sequence[float]) -> Difference:
    """Compare two methods on the same seeds; a positive difference is a gain."""
    return _compare([a - b for a, b in zip(values, reference, strict=True)], 0.0)


def compare_folds(values: Sequence[float], reference: Sequence[float], test_to_train: float) -> Difference:
    """Compare two methods on the same folds of a repeated cross-validation.

    Folds share training rows, so the variance of the mean is (1/J + n_test/n_train) s² (Nadeau and Bengio, 2003).
    """
    return _compare([a - b for a, b in zip(values, reference, strict=True)], test_to_train)


def _compare(differences: Sequence[float], test_to_train: float) -> Difference:
    count = len(differences)
    if count < 2:
        raise ValueError(f"an interval needs at least two pairs, not {count}")
    center, error = mean(differences), math.sqrt((1 / count + test_to_train) * variance(differences))
    if error == 0:
        return Difference(center, center, center, 0.0 if center > 0 else 1.0)
    half = float(t.ppf(0.975, count - 1)) * error
    return Difference(center, center - half, center + half, float(t.sf(center / error, count - 1)))


def adjust_holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Return the p-values adjusted by Holm's step-down, so that the level holds for all comparisons together."""
    adjusted, largest = {}, 0.0
    for rank, name in enumerate(sorted(p_values, key=lambda n: p_values[n])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[name]))
        adjusted[name] = largest
    return {name: adjusted[name] for name in p_values}
