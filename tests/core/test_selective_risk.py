"""Risk-coverage: the histogram of entropies beside the exact values, which sort all examples."""

import itertools

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from uefl.core.metrics import (
    ENTROPY_COUNTS,
    METRICS,
    MIN_CALIBRATION_EXAMPLES,
    OUTCOME_COUNTS,
    compute_metrics,
    compute_pooled_metrics,
    find_histogram_error,
)
from uefl.core.selective_risk import RISK_BINS, augrc, count_outcomes, risk_at_coverage
from uefl.core.uncertainty import entropy


def draw_predictions(n, num_classes, strength, seed, dtype=torch.float64):
    """Return entropies and correctness of a classifier whose confidence is related to its errors."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(num_classes, (n,), generator=generator)
    noise = torch.randn(n, num_classes, generator=generator, dtype=torch.float64)
    p = (strength * (torch.nn.functional.one_hot(y, num_classes) + 0.5 * noise)).to(dtype).softmax(-1)
    return entropy(p), p.argmax(-1) == y


def compute_exact_augrc(e, is_correct):
    """Return (1 − AUROC of errors) · accuracy · error rate + half the squared error rate (Traub et al., Eq. 5)."""
    error_rate = 1 - is_correct.double().mean().item()
    separation = roc_auc_score(is_correct.numpy(), -e.numpy())
    return (1 - separation) * error_rate * (1 - error_rate) + error_rate**2 / 2


@pytest.mark.parametrize("n", [200, 1000, 5000])
@pytest.mark.parametrize("num_classes", [2, 10, 100])
@pytest.mark.parametrize("strength", [1, 3, 7, 12, 20, 30, 50, 100])  # from unsure of everything to sure of everything
def test_augrc_from_bins_differs_by_less_than_half_a_thousandth(n, num_classes, strength):
    for seed, dtype in itertools.product(range(3), (torch.float64, torch.float32)):
        e, is_correct = draw_predictions(n, num_classes, strength, seed, dtype)
        assert abs(augrc(count_outcomes(e, is_correct, num_classes)) - compute_exact_augrc(e, is_correct)) < 5e-4


@pytest.mark.parametrize("num_classes", [2, 10, 100])
@pytest.mark.parametrize("strength", [1, 3, 12, 30, 100])
def test_accepted_errors_from_bins_are_those_of_the_most_certain(num_classes, strength):
    """Examples of equal entropy are accepted together, in random order, as those of a bin are."""
    for dtype in (torch.float64, torch.float32):
        e, is_correct = draw_predictions(5000, num_classes, strength, 1, dtype)
        _, tied = torch.unique(e, return_inverse=True)
        exact = torch.zeros(2, int(tied.max()) + 1, dtype=torch.float64)
        exact.index_put_((is_correct.long(), tied), torch.ones(5000, dtype=torch.float64), accumulate=True)
        counts = count_outcomes(e, is_correct, num_classes)
        for coverage in (0.1, 0.2, 0.5, 0.8, 1.0):
            difference = risk_at_coverage(counts, coverage) - risk_at_coverage(exact, coverage)
            assert abs(difference) < 0.005


def test_counts_of_batches_add_up_and_ends_have_a_bin():
    e, is_correct = draw_predictions(300, 10, 5, 0)
    parts = count_outcomes(e[:100], is_correct[:100], 10) + count_outcomes(e[100:], is_correct[100:], 10)
    assert torch.equal(parts, count_outcomes(e, is_correct, 10))
    assert parts[1].sum() == is_correct.sum()
    ends = count_outcomes(torch.tensor([-1e-9, 0.0, np.log(10), np.log(10) + 1e-6]), torch.tensor([0, 1, 0, 1]) > 0, 10)
    assert ends[:, 0].tolist() == ends[:, RISK_BINS - 1].tolist() == [1, 1]


def test_risk_at_a_coverage_is_the_error_rate_of_the_most_certain():
    e, is_correct = draw_predictions(5000, 10, 5, 1)
    counts, order = count_outcomes(e, is_correct, 10), e.argsort()
    for coverage in (0.1, 0.5, 0.8, 1.0):
        accepted = order[: int(5000 * coverage)]
        exact = 1 - is_correct[accepted].double().mean().item()
        assert risk_at_coverage(counts, coverage) == pytest.approx(exact, abs=0.004)  # a bin holds up to 0.5 %
    assert risk_at_coverage(counts, 1.0) == pytest.approx(1 - is_correct.double().mean().item())


def test_a_perfect_order_of_errors_has_the_least_area():
    is_correct = torch.arange(100) < 80  # the 20 errors are the most uncertain
    e = torch.linspace(0.01, 2, 100)
    assert augrc(count_outcomes(e, is_correct, 10)) == pytest.approx(0.2**2 / 2, abs=1e-3)
    assert augrc(count_outcomes(e.flip(0), is_correct, 10)) > 0.17
    assert augrc(count_outcomes(e, torch.ones(100) > 0, 10)) == 0


def make_sums(n, *, is_correct=True):
    """Return metric sums of n examples of entropy .1."""
    outcomes = count_outcomes(torch.full((n,), 0.1), torch.full((n,), is_correct), 10)
    names = {name for metric in METRICS if not metric.num_classes for name in metric.sums}
    sums = {name: torch.tensor(float(n), dtype=torch.float64) for name in names}
    reliability = torch.zeros(3, 15, dtype=torch.float64)
    reliability[:, 14] = torch.tensor([n, 0.9 * n, n * is_correct])
    special = {"reliability": reliability, "codeword_counts": torch.zeros(1, 4), OUTCOME_COUNTS: outcomes}
    return {**sums, "num_examples": torch.tensor(float(n)), ENTROPY_COUNTS: outcomes.sum(0), **special}


def test_a_calibration_error_needs_500_examples_of_a_silo_or_of_all_together():
    few, enough = make_sums(MIN_CALIBRATION_EXAMPLES - 1), make_sums(MIN_CALIBRATION_EXAMPLES)
    assert "ece" not in compute_metrics(few)
    assert compute_metrics(enough)["ece"] == pytest.approx(0.1)
    assert "ece" not in compute_pooled_metrics([few])
    assert compute_pooled_metrics([few, make_sums(499, is_correct=False)])["ece"] == pytest.approx(0.4)
    assert compute_pooled_metrics([few, make_sums(499, is_correct=False)])["risk_at_100"] == pytest.approx(0.5)
    assert compute_pooled_metrics([]) == {}


@pytest.mark.parametrize("name", [ENTROPY_COUNTS, OUTCOME_COUNTS])
def test_a_histogram_that_does_not_count_every_example_once_is_named(name):
    sums = make_sums(10)
    assert find_histogram_error(sums) == ""
    too_many, negative = sums[name].clone(), sums[name].clone()
    too_many.view(-1)[0] += 1
    negative.view(-1)[:2] = torch.tensor([-1.0, 1.0])
    for counts in (too_many, negative):
        assert find_histogram_error({**sums, name: counts}) == f"{name} does not add up to 10 examples"
