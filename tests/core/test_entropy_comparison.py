"""The permutation test of silos' entropies: its statistic, its p-values, its rate of false findings and its power."""

import itertools
import math
import time

import numpy as np
import pytest
import torch

from uefl.core.entropy_comparison import (
    ENTROPY_BINS,
    MAX_EXAMPLES,
    compare_entropies,
    count_entropies,
)


def draw_histograms(sizes, generator, shifts=None):
    """Return histograms of entropies as a trained network has them: most near zero, a long tail."""
    shifts = shifts or [0.0] * len(sizes)
    entropies = [(torch.randn(n, generator=generator) * 2 - 4 + s).exp().clamp(max=2.3) for n, s in zip(sizes, shifts)]
    return {f"silo {k}": count_entropies(e, 10) for k, e in enumerate(entropies)}


def test_bins_have_equal_width_in_the_logarithm_of_the_entropy():
    low, high = math.log(0.001), math.log(math.log(10) + 0.001)
    edges = torch.linspace(low, high, ENTROPY_BINS + 1, dtype=torch.float64)
    middle = ((edges[1:] + edges[:-1]) / 2).exp() - 0.001
    assert torch.equal(count_entropies(middle, 10), torch.ones(ENTROPY_BINS, dtype=torch.float64))
    ends = count_entropies(torch.tensor([-1e-9, 0.0, math.log(10) + 1e-6]), 10)
    assert (ends[0], ends[-1], ends.sum()) == (2, 1, 3)


def test_statistic_is_the_largest_welch_statistic_against_another_silo():
    histograms = draw_histograms([30, 50, 40], torch.Generator().manual_seed(0), [0.0, 0.5, 1.0])
    found = compare_entropies(histograms, 1, 9)
    values = [np.repeat(np.arange(ENTROPY_BINS), h.long().numpy()) for h in histograms.values()]
    means, errors = [v.mean() for v in values], [(v.var(ddof=1) + 1 / 12) / len(v) for v in values]
    for k, comparison in enumerate(found.values()):
        expected = max((means[k] - means[j]) / math.sqrt(errors[k] + errors[j]) for j in range(3) if j != k)
        assert comparison.statistic == pytest.approx(expected)


def test_p_values_are_those_of_all_permutations_adjusted_step_by_step():
    """Three silos of two examples: all 720 orders, written out; the draws approach their share."""
    values = [[5, 20], [30, 33], [50, 60]]
    histograms = {
        f"silo {k}": torch.bincount(torch.tensor(v), minlength=ENTROPY_BINS).double() for k, v in enumerate(values)
    }

    def compute_statistics(flat):
        groups = np.array(flat, dtype=float).reshape(3, 2)
        mean, error = groups.mean(1), (groups.var(1, ddof=1) + 1 / 12) / 2
        t = (mean[:, None] - mean) / np.sqrt(error[:, None] + error)
        np.fill_diagonal(t, -np.inf)
        return t.max(1)

    observed = compute_statistics([x for v in values for x in v])
    null = np.array([compute_statistics(order) for order in itertools.permutations(x for v in values for x in v)])
    order = np.argsort(-observed)
    expected, least = {}, 0.0
    for i, k in enumerate(order):
        least = max(least, float((null[:, order[i:]].max(1) >= observed[k] - 1e-9).mean()))
        expected[f"silo {k}"] = least
    found = {name: c.p_value for name, c in compare_entropies(histograms, 3, 4000).items()}
    assert found == pytest.approx(expected, abs=0.03)  # four standard errors of a share of 4000 draws


def test_silos_of_one_distribution_are_found_in_at_most_the_level_of_federations():
    """Level .2, 150 federations of unequal silos: 30 expected, standard error 4.9, bound three of them above."""
    generator, num_found = torch.Generator().manual_seed(0), 0
    for i in range(150):
        comparisons = compare_entropies(draw_histograms([12, 30, 30, 60, 90], generator), i, 99)
        num_found += any(c.p_value <= 0.2 for c in comparisons.values())
    assert 10 <= num_found <= 45


def test_a_silo_of_higher_entropy_is_found_alone():
    histograms = draw_histograms([80] * 5, torch.Generator().manual_seed(1), [0, 0, 0, 0, 1.5])
    p_values = {name: c.p_value for name, c in compare_entropies(histograms, 0).items()}
    assert p_values["silo 4"] <= 0.01
    assert min(p for name, p in p_values.items() if name != "silo 4") > 0.05


def test_result_depends_on_the_key_and_not_on_the_order_of_silos():
    histograms = draw_histograms([30, 30, 30], torch.Generator().manual_seed(2))
    found = compare_entropies(histograms, 1)
    assert compare_entropies(dict(reversed(histograms.items())), 1) == found
    assert compare_entropies(histograms, 2) != found


def test_silos_without_two_examples_are_left_out():
    histograms = draw_histograms([30, 1, 0, 20], torch.Generator().manual_seed(3))
    assert list(compare_entropies(histograms, 0, 9)) == ["silo 0", "silo 3"]
    assert compare_entropies({"silo 0": histograms["silo 0"]}, 0) == {}
    assert compare_entropies({}, 0) == {}


def test_silos_of_one_bin_are_alike():
    counts = torch.zeros(ENTROPY_BINS, dtype=torch.float64)
    counts[3] = 20
    found = compare_entropies({"a": counts, "b": counts}, 0, 99)
    assert {c.p_value for c in found.values()} == {1.0}


def test_time_is_bounded_for_any_number_of_examples():
    """A silo may claim any number of examples; the bound is generous, since test machines are slow."""
    histograms = {f"silo {k}": torch.full((ENTROPY_BINS,), 1e20 * (1 + k), dtype=torch.float64) for k in range(3)}
    started = time.process_time()
    found = compare_entropies(histograms, 0, 99)
    assert time.process_time() - started < 5
    assert {c.p_value for c in found.values()} == {1.0}
    assert MAX_EXAMPLES >= 9 * 500


def test_p_values_never_fall_with_the_statistic():
    """A silo of two examples reaches large statistics by chance, and so does one with a smaller statistic."""
    generator = torch.Generator().manual_seed(5)
    for i in range(20):
        found = sorted(compare_entropies(draw_histograms([2, 3, 40, 60], generator), i, 199).values())
        p_values = [c.p_value for c in found]
        assert p_values == sorted(p_values, reverse=True)
