"""Entropy, mutual information, calibration, likelihood: against scikit-learn, NumPy and closed forms."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss

from uefl.federation import Batch, Model
from uefl.metrics import measure, metrics
from uefl.uncertainty import BINS, brier, ece, entropy, nll, reliability, uncertainty


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
    """Two samples, certain of different classes: as unsure as a coin, and all of it by disagreement."""
    found = uncertainty(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]))
    assert found.mean.tolist() == [[0.5, 0.5]]
    assert found.predictive.item() == pytest.approx(math.log(2))
    assert found.expected.item() == 0
    assert found.information.item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mutual_information_is_never_negative(p, dtype):
    assert bool((uncertainty(p.to(dtype)).information >= 0).all())
    for shift in (0.0, 1e-7, 1e-4):  # nearly equal samples, where rounding decides the sign
        near = (p[:1] * (1 + shift * torch.randn(20, 500, 6, dtype=torch.float64))).to(dtype)
        assert bool((uncertainty(near / near.sum(-1, keepdim=True)).information >= 0).all())


def test_equal_samples_share_no_information(p):
    same = uncertainty(p[:1].expand(20, -1, -1))
    assert torch.allclose(same.information, torch.zeros(500, dtype=torch.float64), atol=1e-14)
    assert same.predictive.min() > 0


def test_likelihood_is_that_of_scikit_learn(p, y):
    assert nll(p[0], y).mean().item() == pytest.approx(log_loss(y, p[0], labels=range(6)))


def test_the_likelihood_of_a_label_held_impossible_is_finite():
    assert math.isfinite(nll(torch.tensor([[1.0, 0.0]]), torch.tensor([1])).item())


def test_brier_score_is_the_squared_distance_to_the_label(p, y):
    onehot = np.eye(6)[y]
    expected = ((p[0].numpy() - onehot) ** 2).sum(1)
    assert np.allclose(brier(p[0], y).numpy(), expected)


def written_out(p, y):
    """Expected calibration error, bin by bin."""
    confidence, correct, total = p.max(1), p.argmax(1) == y, 0.0
    for b in range(BINS):
        inside = (confidence > b / BINS) & (confidence <= (b + 1) / BINS)
        if inside.any():
            total += inside.mean() * abs(correct[inside].mean() - confidence[inside].mean())
    return total


def test_calibration_error_is_the_sum_over_bins_written_out(p, y):
    assert ece(reliability(p[0], y)).item() == pytest.approx(written_out(p[0].numpy(), y.numpy()))


def test_a_confidence_on_the_edge_of_two_bins_belongs_to_the_lower():
    p = torch.tensor([[0.6, 0.4], [0.8, 0.2]], dtype=torch.float64)  # 9/15 and 12/15
    found = reliability(p, torch.tensor([0, 1]))
    assert found[0].nonzero().flatten().tolist() == [8, 11]
    assert found[2].nonzero().flatten().tolist() == [8]


def test_calibration_sums_of_parts_add_up_to_those_of_the_whole(p, y):
    whole = reliability(p[0], y)
    assert torch.allclose(reliability(p[0, :123], y[:123]) + reliability(p[0, 123:], y[123:]), whole)
    assert whole[0].sum() == 500


def test_a_coin_known_to_be_a_coin_is_calibrated():
    p, y = torch.full((10, 2), 0.5), torch.tensor([0, 1] * 5)
    assert ece(reliability(p, y)).item() == pytest.approx(0)


class Fixed(torch.nn.Module):
    """A network that says what it was told, plainly and in samples."""

    def __init__(self, logits, samples):
        super().__init__()
        self.logits, self.samples = logits, samples

    def examine(self, x, passes):
        from uefl.models.net import Prediction

        index = x.long()
        zero, chosen = torch.tensor(0.25), torch.zeros(1, len(x), 1, 1, dtype=torch.int64)
        return Prediction(self.logits[None, index], zero, zero, chosen, self.samples[:passes, index])


def test_metrics_are_those_of_the_whole_part_however_it_is_cut_into_batches(p, y):
    torch.manual_seed(3)
    plain = torch.randn(500, 6, dtype=torch.float64)
    words = {"codebook.words": torch.zeros(4, 2)}
    model, x = Model(Fixed(plain, p.log()), words), torch.arange(500)
    sums = [measure(model, Batch(x[c], y[c]), 20) for c in (slice(0, 37), slice(37, 400), slice(400, 500))]
    found = metrics({n: sum(s[n] for s in sums) for n in sums[0]})
    mean = p.mean(0)
    e = entropy(mean)
    assert found == pytest.approx(
        {
            "count": 500,
            "accuracy": (plain.argmax(1) == y).double().mean().item(),  # plain, dropout off (D17)
            "accuracy_sampled": (mean.argmax(1) == y).double().mean().item(),
            "entropy": e.mean().item(),
            "entropy_variance": e.var(unbiased=False).item(),
            "expected_entropy": entropy(p).mean().item(),
            "mutual_information": (e.mean() - entropy(p).mean()).item(),
            "nll": log_loss(y, mean, labels=range(6)),
            "brier": ((mean.numpy() - np.eye(6)[y]) ** 2).sum(1).mean(),
            "ece": written_out(mean.numpy(), y.numpy()),
            "distance": 0.25,
            "perplexity": 1.0,
        }
    )
