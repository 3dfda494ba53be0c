"""Paired comparisons: t-intervals over seeds, the corrected interval of repeated folds, Holm's step-down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from uefl.core.paired_difference import Difference, compare_pairs


def compare_seeds(values: Sequence[float], reference: Sequence[float]) -> Difference:
    """Compare two methods on the same seeds; a positive difference is a gain."""
    return compare_pairs(values, reference)


def compare_folds(values: Sequence[float], reference: Sequence[float], test_to_train: float) -> Difference:
    """Compare two methods on the same folds of a repeated cross-validation.

    Folds share training rows, so the variance of the mean is (1/J + n_test/n_train) s² (Nadeau and Bengio, 2003).
    """
    return compare_pairs(values, reference, test_to_train)


def adjust_holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Return the p-values adjusted by Holm's step-down, so that the level holds for all comparisons together."""
    adjusted, largest = {}, 0.0
    for rank, name in enumerate(sorted(p_values, key=lambda n: p_values[n])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[name]))
        adjusted[name] = largest
    return {name: adjusted[name] for name in p_values}
