"""AUROC, AUPRC and sensitivity from score histograms agree with scikit-learn on predictions for real patients."""

import numpy as np
import pytest
import torch
from scipy.stats import binomtest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from uefl.algorithms.fedavg import FedAvg
from uefl.core.discrimination import SCORE_BINS, auprc, auroc, auroc_resolution, count_scores, sensitivity_at
from uefl.core.local import LocalTraining
from uefl.data.defaults import get_default_config
from uefl.engines.serial import copy_into_network
from uefl.experiment.train import train
from uefl.models.model_config import ModelConfig


@pytest.fixture(scope="module")
def predictions():
    """Return probabilities [n, 2] and labels of the test patients of every hospital."""
    silos, _ = get_default_config("heart").load(0)
    x, y = torch.cat([s.train.x for s in silos]), torch.cat([s.train.y for s in silos])
    model = LogisticRegression(max_iter=1000).fit(x, y)
    return {s.name: (torch.tensor(model.predict_proba(s.test.x)), s.test.y) for s in silos}


@pytest.fixture(scope="module")
def pooled(predictions):
    p, y = zip(*predictions.values())
    return torch.cat(p), torch.cat(y)


def round_down(p):
    return np.minimum(np.floor(p[:, 1].numpy() * SCORE_BINS), SCORE_BINS - 1)


def compute_auprc_bound(counts):
    """Bound the difference to exact scores: within a bin, negatives may stand before or behind every positive."""
    negative, positive = counts.flip(1).numpy()
    bound, above_positive, above_negative = 0.0, 0.0, 0.0
    for n, p in zip(negative, positive):
        binned = (above_positive + p) / max(above_positive + p + above_negative + n, 1)
        for j in range(1, int(p) + 1):
            best = (above_positive + j) / (above_positive + j + above_negative)
            worst = (above_positive + j) / (above_positive + j + above_negative + n)
            bound += max(abs(best - binned), abs(worst - binned)) / positive.sum()
        above_positive, above_negative = above_positive + p, above_negative + n
    return bound


def test_histograms_of_silos_add_up(predictions, pooled):
    assert torch.equal(sum(count_scores(*prediction) for prediction in predictions.values()), count_scores(*pooled))


def test_auroc_is_that_of_binned_scores_and_within_the_bound_of_exact_ones(predictions, pooled):
    for p, y in (*predictions.values(), pooled):
        counts = count_scores(p, y)
        if len(set(y.tolist())) == 2:
            found = auroc(counts).value
            assert found == pytest.approx(roc_auc_score(y, round_down(p)), abs=1e-12)
            assert abs(found - roc_auc_score(y, p[:, 1])) <= auroc_resolution(counts) + 1e-12
    assert auroc_resolution(count_scores(*pooled)) < 0.01  # of 256 bins: narrow beside any interval


def test_auprc_is_that_of_binned_scores_and_within_the_bound_of_exact_ones(predictions, pooled):
    for p, y in (*predictions.values(), pooled):
        counts = count_scores(p, y)
        found = auprc(counts).value
        assert found == pytest.approx(average_precision_score(y, round_down(p)), abs=1e-12)
        assert abs(found - average_precision_score(y, p[:, 1])) <= compute_auprc_bound(counts) + 1e-12


@pytest.mark.parametrize("specificity", [0.5, 0.8, 0.9, 0.99])
def test_sensitivity_is_the_largest_of_all_thresholds_with_the_specificity(pooled, specificity):
    p, y = pooled
    false_positive_rate, true_positive_rate, _ = roc_curve(y, round_down(p), drop_intermediate=False)
    expected = max(t for f, t in zip(false_positive_rate, true_positive_rate) if f <= 1 - specificity + 1e-12)
    found = sensitivity_at(count_scores(p, y), specificity)
    assert found.value == pytest.approx(expected, abs=1e-12)
    n = int(y.sum())
    wilson = binomtest(round(found.value * n), n).proportion_ci(method="wilson")
    assert (found.low, found.high) == pytest.approx((wilson.low, wilson.high), abs=1e-9)


def test_the_interval_of_auroc_has_delongs_variance(pooled):
    p, y = pooled
    scores, y = round_down(p), y.numpy()
    wins = (scores[y == 1][:, None] > scores[y == 0]) + 0.5 * (scores[y == 1][:, None] == scores[y == 0])
    variance = wins.mean(1).var(ddof=1) / len(wins) + wins.mean(0).var(ddof=1) / wins.shape[1]
    area = wins.mean()
    found = auroc(count_scores(*pooled))
    half = 1.959963984540054 * np.sqrt(variance) / (area * (1 - area))
    logit = np.log(area / (1 - area))
    assert (found.low, found.high) == pytest.approx((1 / (1 + np.exp(half - logit)), 1 / (1 + np.exp(-half - logit))))
    assert found.low < area < found.high


def test_perfect_separation_and_single_examples_keep_a_wide_interval():
    counts = torch.zeros(2, SCORE_BINS)
    counts[0, 3] = counts[1, 200] = 8
    assert auroc(counts).value == auprc(counts).value == sensitivity_at(counts, 0.9).value == 1
    for estimate in (auroc(counts), auprc(counts), sensitivity_at(counts, 0.9)):
        assert 0.6 < estimate.low < 0.7
        assert estimate.high == pytest.approx(1)
    counts[1] = 0
    counts[1, 2] = 1
    assert auroc(counts) == (0.0, 0.0, 1.0)


@pytest.mark.parametrize("engine", ["serial", "stacked"])
def test_records_of_a_run_hold_the_metrics_of_every_hospital_and_of_all(engine):
    silos, _ = get_default_config("heart").load(1)
    method = FedAvg(rounds=2, iterations=1, local=LocalTraining(batch_size=16), specificity=0.8, mc_samples=2)
    encoder = ModelConfig(encoder="mlp", width=16)._build_encoder(tuple(silos[0].test.x.shape[1:]))
    result = train(method, silos, encoder, num_classes=2, hidden_size=8, engine=engine)
    net = result.clients.net.eval()
    copy_into_network(net, result.server.model_state)
    counts = 0
    for silo in silos:
        with torch.no_grad():
            p = net(silo.test.x).logits.softmax(-1).mean(0)
        row = result.summary["last"]["silos"][silo.name]
        counts = counts + count_scores(p, silo.test.y)
        if len(silo.test.y.unique()) < 2:
            assert "auroc" not in row
            continue
        bound = auroc_resolution(count_scores(p, silo.test.y)) + 1e-12
        assert abs(row["auroc"] - roc_auc_score(silo.test.y, p[:, 1])) <= bound
        assert row["auroc_low"] <= row["auroc"] <= row["auroc_high"]
    last = result.summary["last"]
    rows = {name: row for name, row in last["silos"].items() if "auroc" in row}
    assert last["mAUROC"] == pytest.approx(np.mean([row["auroc"] for row in rows.values()]))
    assert last["worst_silos"]["auroc"] == min(rows, key=lambda name: rows[name]["auroc"])
    assert last["all_silos"]["sensitivity"] == pytest.approx(sensitivity_at(counts, 0.8).value, abs=0.02)
