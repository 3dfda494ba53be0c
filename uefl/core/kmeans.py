"""Seeded, weighted K-means in plain tensor code: greedy k-means++ seeding, then Lloyd's iterations.

Arthur & Vassilvitskii, k-means++ (SODA 2007); Lloyd, Least squares quantization in PCM (1982). With many
points, seeding and the first iterations use a sample, which doubles until the last iterations use all points.
Legend: n points, D their size, k clusters. Memory is bounded by MAX_DISTANCES, for any number of points.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from uefl.core.noise import derive_key, uniform

MAX_DISTANCES = 1 << 20  # distances computed at once: 4 MB, which fit in a core's cache
MIN_SAMPLE_SIZE = 8192  # minimum number of points in the smallest sample
MIN_SAMPLE_PER_CLUSTER = 32  # minimum number of points per cluster in it


class Clusters(NamedTuple):
    """Centroids, the weight of each one's points, and the weighted sum of squared distances."""

    centroids: Tensor  # [k, D]
    counts: Tensor  # [k] float64
    inertia: Tensor  # [] float64


def kmeans(
    points: Tensor, k: int, *, noise_key: int, sample_weights: Tensor | None = None, max_iterations: int = 20
) -> Clusters:
    """Cluster points [n, D] into k clusters, or fewer if there are fewer distinct points."""
    sample_weights = torch.ones(len(points), device=points.device) if sample_weights is None else sample_weights
    with full_precision_matmul(points.device.type):
        return _fit_clusters(points, k, noise_key, sample_weights.to(torch.float64), max_iterations)


@contextmanager
def full_precision_matmul(device: str) -> Iterator[None]:
    """Compute matrix products in full precision; in TF32, equal points would have distances and yield two centroids."""
    matmul = torch.backends.cuda.matmul
    allowed_before = matmul.allow_tf32
    matmul.allow_tf32 = False
    try:
        with torch.autocast(device, enabled=False):
            yield
    finally:
        matmul.allow_tf32 = allowed_before


def _fit_clusters(points: Tensor, k: int, key: int, weights: Tensor, iterations: int) -> Clusters:
    samples = _draw_nested_samples(points, weights, max(MIN_SAMPLE_SIZE, MIN_SAMPLE_PER_CLUSTER * k), key)
    centroids = _seed_centroids(*samples[0], k, key)
    for sample, sample_weights in samples:
        centroids = _run_lloyd(sample, sample_weights, centroids, math.ceil(iterations / len(samples)))
    label, distance = assign_points(points, centroids)
    counts = torch.zeros(len(centroids), dtype=torch.float64, device=points.device).index_add_(0, label, weights)
    return Clusters(centroids, counts, (distance.double() * weights).sum())


def _draw_nested_samples(points: Tensor, weights: Tensor, min_size: int, key: int) -> list[tuple[Tensor, Tensor]]:
    """Return samples of n/2^j points and, last, all points, each with weights."""
    samples, size = [(points, weights)], len(points) // 2
    while size >= min_size:
        # Systematic sampling: one draw from each of `size` equal shares of the total weight.
        noise = uniform(derive_key(key, size), (size,), points.device).double()
        indices = _draw_indices(weights, (torch.arange(size, device=points.device) + noise) / size)
        samples.insert(0, (points[indices], torch.ones(size, dtype=torch.float64).to(points.device)))
        size //= 2
    return samples


def _run_lloyd(points: Tensor, weights: Tensor, centroids: Tensor, iterations: int) -> Tensor:
    norms = points.square().sum(1)
    for _ in range(iterations):
        label, distance = assign_points(points, centroids, norms)
        moved = compute_cluster_means(points, weights, label, centroids)
        moved = _refill_empty_clusters(points, weights, moved, label, distance)
        if torch.equal(moved, centroids):
            break
        centroids = moved
    return centroids


def assign_points(points: Tensor, centroids: Tensor, squared_norms: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the nearest centroid of every point and the squared distance to it."""
    half, transposed = -0.5 * centroids.square().sum(1), centroids.t().contiguous()
    labels, closeness = [], []
    for block in torch.split(points, _rows_per_block(centroids)):
        best = torch.addmm(half, block, transposed).max(1)  # z·c − |c|²/2 is largest where |z−c|² is smallest
        labels.append(best.indices)
        closeness.append(best.values)
    distance = (points.square().sum(1) if squared_norms is None else squared_norms) - 2 * torch.cat(closeness)
    return torch.cat(labels), distance.clamp_min_(0)


def _rows_per_block(centroids: Tensor) -> int:
    """Return how many points are compared with all centroids at once."""
    return max(1, MAX_DISTANCES // len(centroids))


def _seed_centroids(points: Tensor, weights: Tensor, k: int, key: int) -> Tensor:
    """Seed by greedy k-means++: of a few candidates drawn by the potential, take the one that lowers it most."""
    trials = 2 + int(math.log(k)) if k > 1 else 1
    draws = uniform(key, (k, trials)).to(points.device, torch.float64)
    norms, transposed = points.square().sum(1), points.t().contiguous()
    first = _draw_indices(weights, draws[0, :1])
    seeds = [first]
    closest, point_weights = _squared_distances(transposed, norms, first)[0], weights.to(points.dtype)
    for i in range(1, k):
        potential = closest * weights
        if not bool(potential.sum() > 0):  # fewer distinct points than clusters (D23)
            break
        candidates = _draw_indices(potential, draws[i])
        reached = torch.minimum(closest, _squared_distances(transposed, norms, candidates))  # [trials, n]
        best = (reached @ point_weights).argmin()
        seeds.append(candidates[best : best + 1])
        closest = reached[best]
    return points[torch.cat(seeds)].clone()


def _draw_indices(weight: Tensor, draws: Tensor) -> Tensor:
    """Draw indices with probability proportional to a weight."""
    # Integers: a cumulative sum of floats is not deterministic on a GPU, and differs from the CPU's.
    total = (weight / weight.sum() * 2.0**52).long().cumsum(0)
    return torch.searchsorted(total, (draws * total[-1]).long(), right=True).clamp_max(len(weight) - 1)


def _squared_distances(transposed: Tensor, norms: Tensor, indices: Tensor) -> Tensor:
    """Return squared distances [len(indices), n] to some of the points [D, n]; exactly zero to equal ones."""
    # Rounding gives a point a tiny distance to itself; subtracting that much makes it zero.
    norms = norms * (1 - 4 * torch.finfo(norms.dtype).eps)
    distance = (transposed[:, indices].t() @ transposed).mul_(-2)
    return distance.add_(norms).add_(norms[indices, None]).clamp_min_(0)


def compute_cluster_means(points: Tensor, weights: Tensor, label: Tensor, old: Tensor) -> Tensor:
    """Return the weighted mean of every cluster; an empty cluster keeps its centroid."""
    w, sums = weights.to(points.dtype), torch.zeros_like(old)
    mass = torch.zeros(len(old), dtype=points.dtype, device=points.device).index_add_(0, label, w)
    for block, share, at in zip(*(torch.split(t, _rows_per_block(old)) for t in (points, w, label))):
        sums.index_add_(0, at, block * share[:, None])
    return torch.where(mass[:, None] > 0, sums / mass.clamp_min(torch.finfo(points.dtype).tiny)[:, None], old)


def _refill_empty_clusters(
    points: Tensor, weights: Tensor, centroids: Tensor, label: Tensor, distance: Tensor
) -> Tensor:
    """Move empty clusters to the points that are farthest from their own centroid."""
    mass = torch.zeros(len(centroids), dtype=torch.float64, device=points.device).index_add_(0, label, weights)
    empty = (mass == 0).nonzero()[:, 0]
    if len(empty):
        far = (distance * weights).topk(min(len(empty), len(points))).indices
        centroids[empty[: len(far)]] = points[far]
    return centroids
