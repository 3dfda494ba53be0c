"""Abstaining: the bounds of scipy, the sequence of tests, and its error over many calibrations."""

import numpy as np
import pytest
import torch
from scipy.stats import binom, binomtest

from uefl.core.abstention import (
    ALL_ANSWERS,
    DELTA,
    NO_ANSWER,
    choose_threshold,
    compute_upper_bound,
    count_needed_answers,
    list_steps,
)


@pytest.mark.parametrize(("errors", "n"), [(0, 45), (1, 77), (3, 200), (10, 10), (5, 12)])
def test_the_bound_is_that_of_clopper_and_pearson(errors, n):
    interval = binomtest(errors, n, alternative="less").proportion_ci(1 - DELTA, method="exact")
    assert compute_upper_bound(errors, n) == pytest.approx(interval.high)


def test_the_needed_number_is_the_smallest_that_certifies():
    for risk in (0.01, 0.05, 0.2):
        n = count_needed_answers(risk)
        assert compute_upper_bound(0, n) <= risk < compute_upper_bound(0, n - 1)
    assert count_needed_answers(0.05) == 45


def test_too_few_examples_certify_nothing():
    for n in (0, 1, 44):
        result = choose_threshold(torch.linspace(0, 1, n), torch.zeros(n, dtype=torch.bool), 0.05)
        assert (result.threshold, result.is_certified, result.bound) == (NO_ANSWER, False, 1.0)
    assert choose_threshold(torch.linspace(0, 1, 45), torch.zeros(45, dtype=torch.bool), 0.05).threshold == ALL_ANSWERS


def test_answers_end_where_errors_begin():
    """The 150 most certain of 200 answers are correct, all others wrong."""
    scores = torch.linspace(0, 1, 200)
    is_wrong = torch.arange(200) >= 150
    shuffled = torch.randperm(200, generator=torch.Generator().manual_seed(0))
    result = choose_threshold(scores[shuffled], is_wrong[shuffled], 0.05)
    assert 150 <= result.num_answers <= 155  # some errors fit below the risk
    assert result.num_errors == result.num_answers - 150
    assert result.bound <= 0.05 < compute_upper_bound(result.num_errors + 3, result.num_answers + 3)
    assert int((scores < result.threshold).sum()) == result.num_answers


def test_the_sequence_depends_on_the_number_of_examples_alone_and_ends_with_all():
    for n in (45, 60, 200, 5000):
        steps = list_steps(n, 0.05)
        assert steps[0] == max(45, n // 2)
        assert steps[-1] == n
        assert steps == sorted(set(steps))
        assert len(steps) <= 52


def test_equal_scores_are_answered_or_not_together():
    scores, is_wrong = torch.zeros(100), torch.arange(100) < 30
    assert not choose_threshold(scores, is_wrong, 0.05).is_certified
    result = choose_threshold(scores, torch.zeros(100, dtype=torch.bool), 0.05)
    assert result.threshold == ALL_ANSWERS


@pytest.mark.parametrize("worst", [0.12, 0.3, 0.9])
def test_the_true_error_rate_exceeds_the_risk_in_at_most_a_share_delta_of_calibrations(worst):
    """Errors have the probability worst · score, so that the error rate of the answers below t is worst · t / 2."""
    risk, repeats, failures = 0.05, 400, 0
    for seed in range(repeats):
        rng = np.random.default_rng(seed)
        scores = rng.random(300)
        is_wrong = rng.random(300) < worst * scores
        result = choose_threshold(torch.from_numpy(scores), torch.from_numpy(is_wrong), risk)
        failures += worst * min(result.threshold, 1.0) / 2 > risk
    assert failures <= binom(repeats, DELTA).ppf(0.999)
    if worst == 0.12:
        assert failures > 0, "the bound is used, not far from it"


def test_the_sequence_ends_with_the_first_test_that_fails():
    """Errors among the most certain half fail the first test, although all 400 answers together would pass."""
    is_wrong = torch.zeros(400, dtype=torch.bool)
    is_wrong[:9] = True
    assert compute_upper_bound(9, 200) > 0.05 > compute_upper_bound(9, 400)
    assert not choose_threshold(torch.linspace(0, 1, 400), is_wrong, 0.05).is_certified
