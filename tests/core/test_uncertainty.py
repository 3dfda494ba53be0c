"""Entropy, mutual information, calibration and likelihood, compared with scikit-learn, NumPy and closed forms."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss

from uefl.core.federation import Batch, ClientModel
from uefl.core.metrics import METRICS, RISK_COVERAGES, compute_metric_sums, compute_metrics, describe_means
from uefl.core.selective_risk import augrc, count_outcomes, risk_at_coverage
from uefl.core.uncertainty import (
    CALIBRATION_BINS,
    brier_score,
    ece,
    entropy,
    estimate_uncertainty,
    nll,
    reliability_sums,
)


@pytest.fixture
def p():
    torch.manual_seed(0)
    return (3 * torch.randn(20, 500, 6, dtype=torch.float64)).softmax(-1)


@pytest.fixture
def y():
    torch.manual_seed(1)
    return torch.randint(6, (500,))


@pytest.mark.parametrize("classes", [2, 10, 100])
def test_the_entropy_of_a_uniform_prediction_is_log_c(classes):
    assert entropy(torch.full((3, classes), 1 / classes)).tolist() == pytest.approx([math.log(classes)] * 3)


def test_a_certain_prediction_has_no_entropy():
    assert entropy(torch.tensor([1.0, 0.0, 0.0])) == 0


def test_predictive_entropy_is_that_of_the_mean_and_expected_entropy_the_mean_of_entropies():
    """Two samples, each certain of a different class: all uncertainty comes from their disagreement."""
    found = estimate_uncertainty(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))
    assert found.mean.tolist() == [[0.5, 0.5]]
    assert found.predictive_entropy.item() == pytest.approx(math.log(2))
    assert found.expected_entropy.item() == 0
    assert found.mutual_information.item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mutual_information_is_never_negative(p, dtype):
    assert bool((estimate_uncertainty(p.to(dtype)).mutual_information >= 0).all())
    for shift in (0.0, 1e-7, 1e-4):  # nearly equal samples, where rounding decides the sign
        near = (p[:1] * (1 + shift * torch.randn(20, 500, 6, dtype=torch.float64))).to(dtype)
        assert bool((estimate_uncertainty(near / near.sum(-1, keepdim=True)).mutual_information >= 0).all())


def test_equal_samples_share_no_information(p):
    same = estimate_uncertainty(p[:1].expand(20, -1, -1))
    assert torch.allclose(same.mutual_information, torch.zeros(500, dtype=torch.float64), atol=1e-14)
    assert same.predictive_entropy.min() > 0


def test_likelihood_is_that_of_scikit_learn(p, y):
    assert nll(p[0], y).mean().item() == pytest.approx(log_loss(y, p[0], labels=range(6)))


def test_the_likelihood_of_a_label_with_probability_zero_is_finite():
    assert math.isfinite(nll(torch.tensor([[1.0, 0.0]]), torch.tensor([1])).item())


def test_brier_score_is_the_squared_distance_to_the_label(p, y):
    onehot = np.eye(6)[y]
    expected = ((p[0].numpy() - onehot) ** 2).sum(1)
    assert np.allclose(brier_score(p[0], y).numpy(), expected)


def compute_ece_by_bins(p, y):
    """Compute the expected calibration error bin by bin."""
    confidence, correct, total = p.max(1), p.argmax(1) == y, 0.0
    for b in range(CALIBRATION_BINS):
        inside = (confidence > b / CALIBRATION_BINS) & (confidence <= (b + 1) / CALIBRATION_BINS)
        if inside.any():
            total += inside.mean() * abs(correct[inside].mean() - confidence[inside].mean())
    return total


def test_calibration_error_is_the_sum_over_bins(p, y):
    assert ece(reliability_sums(p[0], y)).item() == pytest.approx(compute_ece_by_bins(p[0].numpy(), y.numpy()))


def test_a_confidence_on_the_edge_of_two_bins_belongs_to_the_lower():
    p = torch.tensor([[0.6, 0.4], [0.8, 0.2]], dtype=torch.float64)  # 9/15 and 12/15
    found = reliability_sums(p, torch.tensor([0, 1]))
    assert found[0].nonzero().flatten().tolist() == [8, 11]
    assert found[2].nonzero().flatten().tolist() == [8]


def test_calibration_sums_of_batches_add_up_to_those_of_all_examples(p, y):
    whole = reliability_sums(p[0], y)
    assert torch.allclose(reliability_sums(p[0, :123], y[:123]) + reliability_sums(p[0, 123:], y[123:]), whole)
    assert whole[0].sum() == 500


def test_a_constant_prediction_with_the_true_frequencies_is_calibrated():
    p, y = torch.full((10, 2), 0.5), torch.tensor([0, 1] * 5)
    assert ece(reliability_sums(p, y)).item() == pytest.approx(0)


class FixedNetwork(torch.nn.Module):
    """A network that returns given logits and sampled logits."""

    def __init__(self, logits, samples):
        super().__init__()
        self.logits, self.samples = logits, samples

    def predict_with_samples(self, x, mc_samples):
        from uefl.models.network import Prediction

        index = x.long()
        loss, indices = torch.tensor(0.25), torch.zeros(1, len(x), 1, 1, dtype=torch.int64)
        return Prediction(self.logits[None, index], loss, loss, indices, self.samples[:mc_samples, index])


def test_metrics_do_not_depend_on_the_division_into_batches(p, y):
    torch.manual_seed(3)
    logits = torch.randn(500, 6, dtype=torch.float64)
    params = {"codebook.codewords": torch.zeros(4, 2)}
    model, x = ClientModel(FixedNetwork(logits, p.log()), params), torch.arange(500)
    sums = [compute_metric_sums(model, Batch(x[c], y[c]), 20) for c in (slice(0, 37), slice(37, 400), slice(400, 500))]
    found = compute_metrics({n: sum(s[n] for s in sums) for n in sums[0]})
    mean = p.mean(0)
    e = entropy(mean)
    outcomes = count_outcomes(e, mean.argmax(1) == y, 6)
    assert found == pytest.approx(
        {
            "num_examples": 500,
            "accuracy": (logits.argmax(1) == y).double().mean().item(),  # without dropout (D17)
            "accuracy_sampled": (mean.argmax(1) == y).double().mean().item(),
            "entropy": e.mean().item(),
            "entropy_variance": e.var(unbiased=False).item(),
            "expected_entropy": entropy(p).mean().item(),
            "mutual_information": (e.mean() - entropy(p).mean()).item(),
            "nll": log_loss(y, mean, labels=range(6)),
            "brier": ((mean.numpy() - np.eye(6)[y]) ** 2).sum(1).mean(),
            "ece": compute_ece_by_bins(mean.numpy(), y.numpy()),
            "augrc": augrc(outcomes),
            **{f"risk_at_{percent}": risk_at_coverage(outcomes, percent / 100) for percent in RISK_COVERAGES},
            "quantization_error": 0.25,
            "perplexity": 1.0,
        }
    )


def test_every_metric_is_computed_from_sums_that_some_metric_declares(p, y):
    model = ClientModel(FixedNetwork(torch.randn(500, 6), p.log()), {"codebook.codewords": torch.zeros(4, 2)})
    sums = compute_metric_sums(model, Batch(torch.arange(500), y), 20)
    assert set(sums) == {"num_examples"}.union(*(metric.sums for metric in METRICS if not metric.num_classes))
    names = [metric.name for metric in METRICS if not metric.num_classes]
    assert set(compute_metrics(sums)) == {"num_examples", *names}


def test_the_labels_of_tables_are_explained_in_one_line():
    assert describe_means(with_codebook=True) == (
        "mA: mean accuracy over silos (higher is better); mE: mean predictive entropy "
        "(lower is more certain, which is good only together with accuracy, NLL and AUGRC); "
        "mP: mean perplexity of codeword use"
    )
    assert "mP" not in describe_means(with_codebook=False)
