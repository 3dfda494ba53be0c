"""Label skew: published rules have their published statistics, as means over 100 seeds."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from numpy.random import PCG64, Generator
from synthetic_images import make_synthetic_images

from uefl.core.errors import InputError
from uefl.core.noise import derive_key
from uefl.data.defaults import get_default_config
from uefl.data.partitioners.class_counts import (
    Counts,
    allocate_proportionally,
    assign_consecutive_classes,
    draw_dirichlet_counts,
    draw_fedbr_counts,
    draw_fedcr_counts,
    draw_vhl_counts,
)

RULES = [draw_vhl_counts, draw_fedbr_counts, draw_dirichlet_counts, draw_fedcr_counts]


def compute_statistics(
    rule: Callable[..., Counts], num_classes: int, images_per_class: int, num_silos: int, alpha: float
) -> tuple[float, float]:
    """Return effective classes (exp of the label entropy) and the largest class fraction, averaged."""
    effective_classes, top_fractions = [], []
    for seed in range(100):
        counts = np.full(num_classes, images_per_class, np.int64)
        assigned = rule(Generator(PCG64(derive_key(seed, "statistics"))), counts, num_silos, alpha=alpha)
        p = assigned / assigned.sum(1, keepdims=True)
        effective_classes.append(np.exp(-(p * np.log(np.where(p > 0, p, 1))).sum(1)).mean())
        top_fractions.append(p.max(1).mean())
    return float(np.mean(effective_classes)), float(np.mean(top_fractions))


@pytest.mark.parametrize(
    ("rule", "num_classes", "images_per_class", "num_silos", "alpha", "effective_classes", "top_fraction"),
    [
        pytest.param(draw_vhl_counts, 10, 5000, 10, 0.1, 2.4, 0.66, id="VHL CIFAR10"),
        pytest.param(draw_vhl_counts, 10, 6000, 10, 0.1, 2.6, 0.63, id="VHL Fashion-MNIST"),
        pytest.param(draw_fedbr_counts, 10, 5000, 10, 0.1, 1.4, 0.88, id="FedBR CIFAR10"),
        pytest.param(draw_dirichlet_counts, 100, 500, 10, 0.1, 19, None, id="FedBR CIFAR100"),
        pytest.param(draw_dirichlet_counts, 10, 5000, 10, 0.1, 2.6, 0.61, id="equal sizes"),
        pytest.param(draw_fedcr_counts, 10, 6000, 100, 0.3, 4.6, 0.43, id="FedCR CIFAR10"),
        pytest.param(draw_fedcr_counts, 100, 600, 100, 0.3, 35, 0.10, id="FedCR CIFAR100"),
    ],
)
def test_rules_have_the_published_statistics(
    rule: Callable[..., Counts],
    num_classes: int,
    images_per_class: int,
    num_silos: int,
    alpha: float,
    effective_classes: float,
    top_fraction: float | None,
) -> None:
    statistics = compute_statistics(rule, num_classes, images_per_class, num_silos, alpha)
    # The expected figures have two digits and come from simulations of their own.
    assert statistics[0] == pytest.approx(effective_classes, rel=0.1)
    if top_fraction is not None:
        assert statistics[1] == pytest.approx(top_fraction, rel=0.1)


def test_vhl_sizes_are_unequal_but_in_the_published_range() -> None:
    sizes = np.stack(
        [draw_vhl_counts(Generator(PCG64(seed)), np.full(10, 5000), 10, alpha=0.1).sum(1) for seed in range(100)]
    )
    assert sizes.sum(1).tolist() == [50000] * 100
    assert 900 < sizes.min(1).mean() < 1500
    assert 7800 < sizes.max(1).mean() < 9600


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("alpha", [1e-3, 0.1, 100.0])
def test_no_rule_assigns_more_images_than_exist(rule: Callable[..., Counts], alpha: float) -> None:
    counts = np.array([70, 300, 5, 0, 1000], np.int64)
    assigned = rule(Generator(PCG64(5)), counts, 4, alpha=alpha)
    assert (assigned >= 0).all()
    assert (assigned.sum(0) <= counts).all()
    if rule is not draw_vhl_counts:
        assert assigned.sum(1).tolist() == [counts.sum() // 4] * 4


def test_vhl_reports_when_no_draw_gives_every_silo_enough() -> None:
    with pytest.raises(InputError, match="increase alpha"):
        draw_vhl_counts(Generator(PCG64(5)), np.full(10, 5), 10, alpha=0.1)


@pytest.mark.parametrize("rule", RULES)
def test_large_alpha_gives_no_skew(rule: Callable[..., Counts]) -> None:
    effective_classes, _ = compute_statistics(partial(rule), 10, 5000, 10, 1e5)
    assert effective_classes == pytest.approx(10, rel=0.01)


def test_pathological_classes_are_consecutive_and_nearly_equal() -> None:
    assigned = assign_consecutive_classes(None, np.full(10, 6000), 100, classes_per_silo=5)
    for k, row in enumerate(assigned):
        assert {int(c) for c in np.flatnonzero(row)} == {(k + i) % 10 for i in range(5)}
    assert assigned.sum() == 60000
    assert assigned[assigned > 0].min() == assigned.max() == 120
    uneven = assign_consecutive_classes(None, np.array([7, 8, 9]), 4, classes_per_silo=2)
    assert uneven.sum(0).tolist() == [7, 8, 9]
    assert np.ptp(uneven[:, 0][uneven[:, 0] > 0]) <= 1


def test_proportional_allocation_loses_no_image() -> None:
    train = np.array([[10, 0, 5], [30, 1, 0], [0, 1, 0]], np.int64)
    test = allocate_proportionally(train, np.array([11, 2, 3], np.int64))
    assert test.sum(0).tolist() == [11, 2, 3]
    assert test.tolist() == [[3, 0, 3], [8, 1, 0], [0, 1, 0]]
    assert allocate_proportionally(np.zeros((2, 1), np.int64), np.array([4], np.int64)).tolist() == [[0], [0]]


LABEL_SKEWS = ["dirichlet-vhl", "dirichlet-fedbr", "dirichlet", "dirichlet-fedcr", "pathological"]


@pytest.mark.parametrize("test_fraction", [0.0, 0.25])
@pytest.mark.parametrize("partitioner", LABEL_SKEWS)
def test_test_labels_follow_the_silo_or_the_global_distribution(partitioner: str, test_fraction: float) -> None:
    images = make_synthetic_images(12000, test_fraction=test_fraction)
    config = replace(get_default_config("mnist5k", partitioner), num_silos=(10,), pool_splits=False)
    for distribution in ("silo", "global"):
        gaps = []
        for p in replace(config, test_label_distribution=distribution).make_partitions(images, 0):
            train, test = (images.y[indices].bincount(minlength=10).float() for indices in (p.train, p.test))
            expected = train / train.sum() if distribution == "silo" else torch.full((10,), 0.1)
            gaps.append((test / test.sum() - expected).abs().max().item())
        assert np.mean(gaps) < 0.06


@pytest.mark.parametrize("distribution", ["silo", "global"])
@pytest.mark.parametrize(("train", "test"), [(90, 30), (90, 0), (0, 30)])
def test_label_skew_gives_the_requested_sizes(train: int, test: int, distribution: str) -> None:
    config = replace(
        get_default_config("mnist5k", "dirichlet"),
        train_per_silo=train,
        test_per_silo=test,
        test_fraction=0.25,
        test_label_distribution=distribution,
    )
    for p in config.make_partitions(make_synthetic_images(1200), 0):
        assert (len(p.train) + len(p.validation), len(p.test)) == (90, 30)
    with pytest.raises(InputError, match="the silos need"):
        replace(config, train_per_silo=train * 2, test_per_silo=test * 4).make_partitions(
            make_synthetic_images(1200), 0
        )


def test_validation_has_the_label_distribution_of_training() -> None:
    images = make_synthetic_images(60000)
    config = replace(get_default_config("mnist5k", "dirichlet-vhl"), num_silos=(10,))
    for p in config.make_partitions(images, 0):
        validation, train = (images.y[i].bincount(minlength=10) / len(i) for i in (p.validation, p.train))
        assert (validation - train).abs().max() < 0.15 if len(p.train) > 500 else True


def test_fedcr_clients_split_their_own_images_70_to_30() -> None:
    images = make_synthetic_images(70000, test_fraction=1 / 7)
    partitions = get_default_config("mnist5k", "dirichlet-fedcr").make_partitions(images, 23)
    assert len(partitions) == 100
    assert {(len(p.train) + len(p.validation), len(p.test)) for p in partitions} == {(490, 210)}
