"""Find silos with similar features from the centroids that they send, without their true domains.

Two rules: `halves` compares the distance between two silos with that between two halves of one silo, which is the same
for silos of one distribution, whatever the data and the number of centroids. `spacing` compares it with the distances
within one set of centroids, which depend on both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from uefl.algorithms.centroids import Centroids
from uefl.core import noise_addresses as addresses
from uefl.core.kmeans import kmeans
from uefl.core.noise import derive_key

Answer = TypeVar("Answer")  # what silos send to be compared

# Ratios of silos of one distribution are near 1: of embedded digits, 95 % were below 1.2 with 60 to 330 examples, and
# below 1.4 for a silo of 60 and one of 800. Ratios of other rotations were above 1.35 with 240 examples or more.
MAX_HALF_RATIO = 1.25
# On the embedded digits in three rotations, silos of one domain had ratios of .26 to .45, and others .43 to 1.13 or .37
# to .63 (64 or 256 centroids, 1 or 4 segments). With 16 centroids all ratios were below .6.
MAX_SPACING_RATIO = 0.5


class Halves(NamedTuple):
    """Centroids of two halves of a silo's examples."""

    first: Centroids
    second: Centroids


def group_by_halves(halves: Mapping[str, Halves]) -> list[tuple[str, ...]]:
    """Return groups of silos as close to each other as halves of one silo, in the order of their first names."""
    on_host = {  # where further K-means runs; silos may answer from a GPU
        name: Halves(*(Centroids(*(t.cpu() for t in half)) for half in of_silo)) for name, of_silo in halves.items()
    }
    return _join_groups(on_host, compute_half_ratio, MAX_HALF_RATIO)


def group_by_spacing(centroids: Mapping[str, Centroids]) -> list[tuple[str, ...]]:
    """Return groups of silos whose centroids are close to each other, in the order of their first names."""
    return _join_groups(centroids, compute_spacing_ratio, MAX_SPACING_RATIO)


def list_unlike_silos(groups: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the silos that are alike to no other.

    Those of group rounds train one model together: training alone lowers the NLL of digits, and raises that of
    hospitals with few patients (docs/log.md).
    """
    return tuple(name for group in groups if len(group) == 1 for name in group)


def _join_groups(
    answers: Mapping[str, Answer], compute_ratio: Callable[[Answer, Answer], float], max_ratio: float
) -> list[tuple[str, ...]]:
    """Join the two groups with the least mean ratio between their silos, until that ratio exceeds a limit."""
    names = list(answers)
    ratios = [[compute_ratio(answers[one], answers[other]) for other in names] for one in names]
    groups = [[i] for i in range(len(names))]

    def compute_mean_ratio(pair: tuple[int, int]) -> float:
        one, other = (groups[i] for i in pair)
        return sum(ratios[i][j] for i in one for j in other) / (len(one) * len(other))

    while len(groups) > 1:
        pairs = [(i, j) for j in range(len(groups)) for i in range(j)]
        first, second = min(pairs, key=compute_mean_ratio)
        if not compute_mean_ratio((first, second)) <= max_ratio:
            break
        groups[first] = sorted(groups[first] + groups[second])
        del groups[second]
    return [tuple(names[i] for i in group) for group in groups]


def compute_half_ratio(one: Halves, other: Halves) -> float:
    """Return the mean squared distance between halves of two silos, divided by that between halves of one silo.

    A small silo has fewer centroids than a large one, so all halves are clustered further, into as few as any has.
    """
    v = min(centroids.counts.shape[1] for centroids in (*one, *other))
    one, other = (Halves(*(coarsen_centroids(half, v) for half in halves)) for halves in (one, other))
    between = sum(_compute_distance(half, other_half) for half in one for other_half in other) / 4
    within = (_compute_distance(*one) + _compute_distance(*other)) / 2
    return _divide(between, within)


def coarsen_centroids(centroids: Centroids, v: int) -> Centroids:
    """Return at most v centroids of centroids, weighted by their features."""
    if centroids.counts.shape[1] <= v:
        return centroids
    clusters = [
        kmeans(points, v, noise_key=derive_key(m, v, addresses.MERGED_CENTROIDS), sample_weights=counts)
        for m, (points, counts) in enumerate(zip(*centroids))
    ]
    v = min(len(c.counts) for c in clusters)  # of several members, one may have fewer distinct centroids
    return Centroids(*(torch.stack(pieces) for pieces in zip(*((c.centroids[:v], c.counts[:v]) for c in clusters))))


def compute_spacing_ratio(one: Centroids, other: Centroids) -> float:
    """Return the mean squared distance between the centroids of two silos, divided by that within each of them.

    Both are distances of a centroid to the nearest one, of the other silo or of its own, weighted by its features.
    """
    within = _compute_mean_distance(one, one) + _compute_mean_distance(other, other)
    return _divide(_compute_distance(one, other), within)


def _divide(between: float, within: float) -> float:
    if not within:
        return math.inf if between else 0.0
    return between / within


def _compute_distance(one: Centroids, other: Centroids) -> float:
    """Return the mean squared distance to the nearest centroid of the other set, in both directions."""
    return _compute_mean_distance(one, other) + _compute_mean_distance(other, one)


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
