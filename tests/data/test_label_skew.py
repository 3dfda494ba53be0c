"""Label skew: the statistics of the published rules, as means over 100 seeds."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from numpy.random import PCG64, Generator
from synthetic_images import synthetic

from uefl.data import defaults
from uefl.data.cuts.labels import Counts, alike, consecutive, dirichlet, fedbr, fedcr, vhl
from uefl.errors import InputError
from uefl.noise import key

RULES = [vhl, fedbr, dirichlet, fedcr]


def statistics(rule: Callable[..., Counts], classes: int, each: int, silos: int, alpha: float) -> tuple[float, float]:
    """Effective classes (exp of the label entropy) and part of the largest class, means over silos and seeds."""
    effective, top = [], []
    for seed in range(100):
        counts = np.full(classes, each, np.int64)
        given = rule(Generator(PCG64(key(seed, "statistics"))), counts, silos, alpha=alpha)
        p = given / given.sum(1, keepdims=True)
        effective.append(np.exp(-(p * np.log(np.where(p > 0, p, 1))).sum(1)).mean())
        top.append(p.max(1).mean())
    return float(np.mean(effective)), float(np.mean(top))


@pytest.mark.parametrize(
    ("rule", "classes", "each", "silos", "alpha", "effective", "top"),
    [
        pytest.param(vhl, 10, 5000, 10, 0.1, 2.4, 0.66, id="VHL CIFAR10"),
        pytest.param(vhl, 10, 6000, 10, 0.1, 2.6, 0.63, id="VHL Fashion-MNIST"),
        pytest.param(fedbr, 10, 5000, 10, 0.1, 1.4, 0.88, id="FedBR CIFAR10"),
        pytest.param(dirichlet, 100, 500, 10, 0.1, 19, None, id="FedBR CIFAR100"),
        pytest.param(dirichlet, 10, 5000, 10, 0.1, 2.6, 0.61, id="equal sizes"),
        pytest.param(fedcr, 10, 6000, 100, 0.3, 4.6, 0.43, id="FedCR CIFAR10"),
        pytest.param(fedcr, 100, 600, 100, 0.3, 35, 0.10, id="FedCR CIFAR100"),
    ],
)
def test_published_rules_have_their_statistics(
    rule: Callable[..., Counts],
    classes: int,
    each: int,
    silos: int,
    alpha: float,
    effective: float,
    top: float | None,
) -> None:
    found = statistics(rule, classes, each, silos, alpha)
    assert found[0] == pytest.approx(effective, rel=0.1)
    if top is not None:
        assert found[1] == pytest.approx(top, rel=0.1)


def test_vhl_sizes_are_unequal_but_capped_near_their_published_range() -> None:
    sizes = np.stack([vhl(Generator(PCG64(seed)), np.full(10, 5000), 10, alpha=0.1).sum(1) for seed in range(100)])
    assert sizes.sum(1).tolist() == [50000] * 100
    assert 900 < sizes.min(1).mean() < 1500
    assert 7800 < sizes.max(1).mean() < 9600


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("alpha", [1e-3, 0.1, 100.0])
def test_no_rule_hands_out_what_there_is_not(rule: Callable[..., Counts], alpha: float) -> None:
    counts = np.array([70, 300, 5, 0, 1000], np.int64)
    given = rule(Generator(PCG64(5)), counts, 4, alpha=alpha)
    assert (given >= 0).all()
    assert (given.sum(0) <= counts).all()
    if rule is not vhl:
        assert given.sum(1).tolist() == [counts.sum() // 4] * 4


def test_vhl_says_when_no_draw_gives_every_silo_enough() -> None:
    with pytest.raises(InputError, match="raise alpha"):
        vhl(Generator(PCG64(5)), np.full(10, 5), 10, alpha=0.1)


@pytest.mark.parametrize("rule", RULES)
def test_a_large_alpha_leaves_no_skew(rule: Callable[..., Counts]) -> None:
    effective, _ = statistics(partial(rule), 10, 5000, 10, 1e5)
    assert effective == pytest.approx(10, rel=0.01)


def test_k_classes_are_consecutive_and_nearly_equal() -> None:
    given = consecutive(None, np.full(10, 6000), 100, each=5)
    for k, row in enumerate(given):
        assert {int(c) for c in np.flatnonzero(row)} == {(k + i) % 10 for i in range(5)}
    assert given.sum() == 60000
    assert given[given > 0].min() == given.max() == 120
    uneven = consecutive(None, np.array([7, 8, 9]), 4, each=2)
    assert uneven.sum(0).tolist() == [7, 8, 9]
    assert np.ptp(uneven[:, 0][uneven[:, 0] > 0]) <= 1


def test_test_images_follow_the_training_labels_without_loss() -> None:
    train = np.array([[10, 0, 5], [30, 1, 0], [0, 1, 0]], np.int64)
    test = alike(train, np.array([11, 2, 3], np.int64))
    assert test.sum(0).tolist() == [11, 2, 3]
    assert test.tolist() == [[3, 0, 3], [8, 1, 0], [0, 1, 0]]
    assert alike(np.zeros((2, 1), np.int64), np.array([4], np.int64)).tolist() == [[0], [0]]


@pytest.mark.parametrize("test", [0.0, 0.25])
@pytest.mark.parametrize("cut", ["vhl", "fedbr", "dirichlet", "fedcr", "classes"])
def test_test_labels_are_the_silos_own_or_those_of_all(cut: str, test: float) -> None:
    images = synthetic(12000, test=test)
    data = replace(defaults("mnist5k", cut), silos=(10,), merge=False)
    for whose in ("own", "all"):
        gaps = []
        for s in replace(data, test_labels=whose).shares(images, 0):
            own, seen = (images.y[at].bincount(minlength=10).float() for at in (s.train, s.test))
            like = own / own.sum() if whose == "own" else torch.full((10,), 0.1)
            gaps.append((seen / seen.sum() - like).abs().max().item())
        assert np.mean(gaps) < 0.06


@pytest.mark.parametrize("whose", ["own", "all"])
@pytest.mark.parametrize(("train", "test"), [(90, 30), (90, 0), (0, 30)])
def test_label_skew_keeps_to_the_sizes_asked_for(train: int, test: int, whose: str) -> None:
    data = replace(defaults("mnist5k", "dirichlet"), train=train, test=test, test_part=0.25, test_labels=whose)
    for s in data.shares(synthetic(1200), 0):
        assert (len(s.train) + len(s.validation), len(s.test)) == (90, 30)
    with pytest.raises(InputError, match="these silos need"):
        replace(data, train=train * 2, test=test * 4).shares(synthetic(1200), 0)


def test_validation_has_the_labels_of_training() -> None:
    images = synthetic(60000)
    for s in replace(defaults("mnist5k", "vhl"), silos=(10,)).shares(images, 0):
        held, rest = (images.y[at].bincount(minlength=10) / len(at) for at in (s.validation, s.train))
        assert (held - rest).abs().max() < 0.15 if len(s.train) > 500 else True


def test_a_hundred_clients_split_their_own_images_70_to_30() -> None:
    shares = defaults("mnist5k", "fedcr").shares(synthetic(70000, test=1 / 7), 23)
    assert len(shares) == 100
    assert {(len(s.train) + len(s.validation), len(s.test)) for s in shares} == {(490, 210)}
