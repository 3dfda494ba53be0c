"""Prediction sets: the quantile by its definition, MAPIE's sets, coverage in simulations, and pooled histograms."""

import math

import numpy as np
import pytest
import torch
from harness import import_or_skip
from scipy.stats import betabinom

from uefl.core.conformal import (
    ALL_CLASSES,
    compute_pooled_quantile,
    compute_quantile,
    compute_scores,
    count_needed,
    count_scores_by_bin,
)


def draw_probabilities(n, seed, num_classes=4, sharpness=2.0):
    """Return probabilities and labels that follow them."""
    rng = np.random.default_rng(seed)
    logits = sharpness * rng.normal(size=(n, num_classes))
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    y = (rng.random((n, 1)) > p.cumsum(1)).sum(1).clip(max=num_classes - 1)
    return torch.from_numpy(p), torch.from_numpy(y)


def take_label_scores(p, y):
    return compute_scores(p)[torch.arange(len(y)), y]


def test_the_score_is_one_minus_p_and_keeps_its_precision():
    p, _ = draw_probabilities(50, 0)
    assert torch.allclose(compute_scores(p), 1 - p, atol=1e-12)
    tiny = torch.tensor([[1.0, 1e-12, 1e-15]])  # 1 − p is 0 in single precision
    assert compute_scores(tiny)[0, 0].item() == pytest.approx(1e-12 + 1e-15, rel=1e-6)


@pytest.mark.parametrize("n", [9, 10, 19, 57, 199])
@pytest.mark.parametrize("coverage", [0.9, 0.8, 0.95])
def test_the_quantile_is_the_order_statistic_of_its_definition(n, coverage):
    scores = torch.from_numpy(np.random.default_rng(n).permutation(n) / n)
    rank = -(-(n + 1) * round(coverage * 100) // 100)  # ⌈(n+1)(1−α)⌉ in whole numbers
    expected = (rank - 1) / n if rank <= n else ALL_CLASSES
    assert compute_quantile(scores, coverage) == pytest.approx(expected)


def test_with_fewer_than_nine_examples_a_set_has_all_classes():
    assert count_needed(0.9) == 9
    assert count_needed(0.95) == 19
    for coverage in (0.01, 0.5, 0.55, 0.99, 0.999, 0.9999):
        needed = count_needed(coverage)
        assert compute_quantile(torch.zeros(needed), coverage) == 0.0
        assert compute_quantile(torch.zeros(needed - 1), coverage) == ALL_CLASSES
    assert count_needed(1 - 1e-8) == pytest.approx(1e8)
    assert compute_quantile(torch.zeros(8), 0.9) == ALL_CLASSES
    assert compute_quantile(torch.zeros(9), 0.9) == 0.0
    assert compute_quantile(torch.zeros(0), 0.9) == ALL_CLASSES


def test_sets_are_those_of_mapie():
    mapie = import_or_skip("mapie.classification")
    from sklearn.linear_model import LogisticRegression

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(400, 3)), rng.integers(0, 4, 400)
    x[:, 0] += y
    model = LogisticRegression().fit(x[:100], y[:100])
    for coverage in (0.8, 0.9):
        oracle = mapie.SplitConformalClassifier(model, confidence_level=coverage, conformity_score="lac", prefit=True)
        oracle.conformalize(x[100:250], y[100:250])
        expected = oracle.predict_set(x[250:])[1][:, :, 0]
        calibration, new = (
            compute_scores(torch.from_numpy(model.predict_proba(part))) for part in (x[100:250], x[250:])
        )
        quantile = compute_quantile(calibration[torch.arange(150), torch.from_numpy(y[100:250])], coverage)
        assert ((new <= quantile).numpy() == expected).all()


def test_coverage_over_calibrations_follows_the_beta_binomial_law():
    """The number of covered examples of a new set of 50 is beta-binomial with k = ⌈(n+1)(1−α)⌉ and n+1−k."""
    n, m, repeats, rank = 40, 50, 400, math.ceil(41 * 0.9)
    covered = []
    for seed in range(repeats):
        p, y = draw_probabilities(n + m, seed)
        scores = take_label_scores(p, y)
        covered.append(int((scores[n:] <= compute_quantile(scores[:n], 0.9)).sum()))
    law = betabinom(m, rank, n + 1 - rank)
    # Four standard errors of the mean and of the share below the lower 5 % of the law.
    assert abs(np.mean(covered) - law.mean()) < 4 * law.std() / math.sqrt(repeats)
    low = law.ppf(0.05)
    share = law.cdf(low)
    assert abs(np.mean(np.array(covered) <= low) - share) < 4 * math.sqrt(share * (1 - share) / repeats)


def test_histograms_add_up_and_bound_scores_from_above():
    scores = torch.tensor([0.0, 1e-12, 1e-4, 0.3, 0.3, 0.9, 1.0], dtype=torch.float64)
    counts = count_scores_by_bin(scores)
    assert counts.sum() == 7
    assert torch.equal(counts, count_scores_by_bin(scores[:3]) + count_scores_by_bin(scores[3:]))
    # Without own scores, the quantile of the others is at most one bin above their own.
    pooled = compute_pooled_quantile(scores[:0], count_scores_by_bin(scores), 0.5, pooling=7)
    assert 0.3 <= pooled < 0.33


def test_pooling_moves_small_silos_and_leaves_large_ones():
    others = count_scores_by_bin(torch.full((1000,), 0.5))
    small, large = torch.linspace(0, 0.1, 5), torch.linspace(0, 0.1, 2000)
    assert compute_quantile(small, 0.9) == ALL_CLASSES
    assert 0.5 <= compute_pooled_quantile(small, others, 0.9, pooling=50) < 0.55
    assert compute_pooled_quantile(large, others, 0.9, pooling=50) == pytest.approx(0.0925, abs=0.002)
    assert compute_pooled_quantile(large, others, 0.9, pooling=0) == compute_quantile(large, 0.9)
    assert compute_pooled_quantile(small, torch.zeros_like(others), 0.9, pooling=50) == ALL_CLASSES
