"""Tests for data that change: the statistics of scipy, Holm's rule, the chance of false alarms, and power."""

from itertools import combinations

import numpy as np
import pytest
from scipy.stats import binom, ks_2samp, permutation_test

from uefl.core.drift import (
    CODEWORDS,
    ENTROPY,
    MIN_PERMUTATIONS,
    CodewordDistance,
    EntropyDistance,
    assign_levels,
    compare_examples,
    count_permutations,
    draw_references,
)


def compare(reference, new, reference_counts=None, new_counts=None, **fields):
    empty = (np.zeros((len(reference), 0)), np.zeros((len(new), 0)))
    counts = empty if reference_counts is None else (reference_counts, new_counts)
    return compare_examples(reference, new, *counts, **{"level": 0.05, "looks": 1, "seed": 0, **fields})


@pytest.mark.parametrize("digits", [9, 1])  # one digit: many equal values
def test_the_distance_of_entropies_is_that_of_scipy(digits):
    rng = np.random.default_rng(0)
    a, b = rng.random(40).round(digits), (rng.random(30) ** 2).round(digits)
    mask = np.arange(70)[None] < 40
    assert EntropyDistance(np.concatenate([a, b]), 40)(mask)[0] == pytest.approx(ks_2samp(a, b).statistic)


def test_p_values_are_those_of_scipys_permutation_test():
    rng = np.random.default_rng(1)
    a, b = rng.random(25), rng.random(20) ** 1.5
    (found,) = compare(a, b)
    oracle = permutation_test(
        (a, b), lambda x, y: ks_2samp(x, y).statistic, n_resamples=800, alternative="greater", rng=rng
    )
    assert found.p_value == pytest.approx(oracle.pvalue, abs=0.06)  # four standard errors of 800 draws at p = 0.2


def test_total_variation_is_between_equal_and_disjoint_use():
    rng = np.random.default_rng(2)
    counts = rng.multinomial(16, np.full(5, 0.2), size=12).astype(float)
    mask = np.arange(12)[None] < 7
    use = counts / 16
    expected = np.abs(use[:7].mean(0) - use[7:].mean(0)).sum() / 2
    assert CodewordDistance(counts, 7)(mask)[0] == pytest.approx(expected)
    disjoint = np.repeat(np.eye(2), [7, 5], axis=0)
    assert CodewordDistance(disjoint, 7)(mask)[0] == pytest.approx(1)


def test_permutations_choose_as_many_examples_as_the_reference_has():
    masks = np.concatenate(list(draw_references(7, 12, 500, 3)))
    assert masks.shape == (500, 12)
    assert (masks.sum(1) == 7).all()
    assert np.abs(masks.mean(0) - 7 / 12).max() < 4 * np.sqrt(7 / 12 * 5 / 12 / 500)


def test_holms_rule():
    assert assign_levels({"a": 0.02, "b": 0.04}, 0.05) == {"a": 0.025, "b": 0.05}
    assert assign_levels({"a": 0.04, "b": 0.02}, 0.05) == {"a": 0.05, "b": 0.025}
    assert assign_levels({"a": 0.03, "b": 0.04}, 0.05) == {"a": 0.025, "b": 0.025}, "neither is an alarm"
    assert assign_levels({"a": 0.03}, 0.05) == {"a": 0.05}


def test_looks_share_the_level():
    rng = np.random.default_rng(4)
    a, b = rng.random(60), rng.random(60) + 0.4
    for looks in (1, 10):
        (found,) = compare(a, b, looks=looks)
        assert found.level == pytest.approx(0.05 / looks)
        assert found.is_alarm
    assert count_permutations(0.05) == MIN_PERMUTATIONS
    assert 1 / (1 + count_permutations(0.0005)) == pytest.approx(0.0005 / 20)


def draw_examples(rng, count, shift=0.0):
    """Return entropies, and counts of 16 features whose codewords depend on the image: they are not independent."""
    favorites = rng.dirichlet(np.full(6, 0.3), size=count)
    counts = np.stack([rng.multinomial(16, p) for p in favorites]).astype(float)
    return rng.gamma(2.0, 0.2 * (1 + shift), count), counts


def test_false_alarms_are_as_rare_as_the_level_although_features_of_an_image_depend_on_each_other():
    repeats, alarms = 200, 0
    for seed in range(repeats):
        rng = np.random.default_rng(seed)
        (a, c), (b, d) = draw_examples(rng, 60), draw_examples(rng, 40)
        alarms += any(found.is_alarm for found in compare(a, b, c, d, seed=seed))
    assert alarms <= binom(repeats, 0.05).ppf(0.999)
    assert alarms > 0


@pytest.mark.parametrize("digits", [9, 1], ids=["distinct", "ties"])
def test_no_pool_raises_more_false_alarms_than_the_level_over_all_its_splits(digits):
    """All 126 splits of nine images are equally likely for unchanged data: no chance is left in this count."""
    rng = np.random.default_rng(11)
    entropy, counts = draw_examples(rng, 9)
    entropy = entropy.round(digits)
    splits = [np.isin(np.arange(9), chosen) for chosen in combinations(range(9), 5)]
    smallest = []
    for i, own in enumerate(splits):
        found = compare(entropy[own], entropy[~own], counts[own], counts[~own], seed=i)
        smallest.append(min(comparison.p_value for comparison in found))
    for level in (0.05, 0.1, 0.2, 0.4):  # Holm's rule alarms if the smaller p-value is at most half the level
        alarms = sum(p <= level / 2 for p in smallest)
        assert alarms <= level * len(splits) + 1  # p-values of drawn permutations are off by at most one split
    assert sum(p <= 0.2 for p in smallest) > 0


def test_each_of_the_two_changes_is_found_by_its_own_statistic():
    rng = np.random.default_rng(5)
    (a, c), (b, d) = draw_examples(rng, 100), draw_examples(rng, 100, shift=1.0)
    by_name = {found.name: found for found in compare(a, b, c, d)}
    assert by_name[ENTROPY].is_alarm
    assert not by_name[CODEWORDS].is_alarm
    b, d = draw_examples(rng, 100)
    by_name = {found.name: found for found in compare(a, b, c, np.roll(d, 1, 1) * [1, 0, 1, 1, 1, 1])}
    assert by_name[CODEWORDS].is_alarm
    assert not by_name[ENTROPY].is_alarm
