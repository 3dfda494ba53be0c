"""Find silos with similar features from the centroids that they send, without their true domains."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from uefl.algorithms.centroids import Centroids

# Two silos of one distribution have centroids close to each other. On the embedded digits in three rotations, silos of
# one domain had ratios of .26 to .45, and others .43 to 1.13 or .37 to .63 (64 or 256 centroids, 1 or 4 segments). With
# 16 centroids all ratios were below .6: too few centroids do not separate domains.
MAX_RATIO = 0.5


def group_alike_silos(centroids: Mapping[str, Centroids]) -> list[tuple[str, ...]]:
    """Return groups of alike silos, in the order of their first names.

    The two groups with the least mean ratio between their silos are joined until that ratio exceeds `MAX_RATIO`.
    """
    names = list(centroids)
    ratios = [[compute_ratio(centroids[one], centroids[other]) for other in names] for one in names]
    groups = [[i] for i in range(len(names))]

    def compute_mean_ratio(pair: tuple[int, int]) -> float:
        one, other = (groups[i] for i in pair)
        return sum(ratios[i][j] for i in one for j in other) / (len(one) * len(other))

    while len(groups) > 1:
        pairs = [(i, j) for j in range(len(groups)) for i in range(j)]
        first, second = min(pairs, key=compute_mean_ratio)
        if not compute_mean_ratio((first, second)) <= MAX_RATIO:
            break
        groups[first] = sorted(groups[first] + groups[second])
        del groups[second]
    return [tuple(names[i] for i in group) for group in groups]


def compute_ratio(one: Centroids, other: Centroids) -> float:
    """Return the mean squared distance between the centroids of two silos, divided by that within each of them.

    Both are distances of a centroid to the nearest one, of the other silo or of its own, weighted by its features.
    """
    between = _compute_mean_distance(one, other) + _compute_mean_distance(other, one)
    within = _compute_mean_distance(one, one) + _compute_mean_distance(other, other)
    if not within:
        return math.inf if between else 0.0
    return between / within


def _compute_mean_distance(one: Centroids, other: Centroids) -> float:
    """Return the mean squared distance of one silo's centroids to the nearest of the other, summed over members."""
    total = 0.0
    for points, targets, counts in zip(one.centroids.double(), other.centroids.double(), one.counts.double()):
        distance = _compute_squared_distances(points, targets)
        if one is other:
            distance.fill_diagonal_(math.inf)
        nearest = distance.min(1).values
        is_used = (counts > 0) & nearest.isfinite()  # a single centroid has no other one beside it
        total += float((nearest * counts)[is_used].sum() / counts.sum().clamp_min(1))
    return total


def _compute_squared_distances(points: Tensor, targets: Tensor) -> Tensor:
    """Return the squared distances [n, m]; those of equal points are zero."""
    return torch.cdist(points, targets, compute_mode="donot_use_mm_for_euclid_dist").square()
