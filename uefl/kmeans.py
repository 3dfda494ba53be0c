"""Seeded, weighted K-means in plain tensor code: greedy k-means++ seeding, then Lloyd's iterations.

Arthur & Vassilvitskii, k-means++ (SODA 2007); Lloyd, Least squares quantization in PCM (1982).
Legend: n points, D width, k clusters. Memory is bounded by CHUNK distances, however many points there are.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from uefl.noise import uniform

CHUNK = 1 << 22  # distances held at once


class Clusters(NamedTuple):
    """Centroids, the weight of the points each one stands for, and the weighted sum of squared distances."""

    centroids: Tensor  # [k, D]
    counts: Tensor  # [k] float64
    inertia: Tensor  # [] float64


def kmeans(points: Tensor, k: int, *, key: int, weights: Tensor | None = None, iterations: int = 20) -> Clusters:
    """Cluster points [n, D] into k, or into as many as there are distinct points where those are fewer."""
    weights = torch.ones(len(points), device=points.device) if weights is None else weights
    weights = weights.to(torch.float64)
    centroids = _seed(points, weights, k, key)
    for _ in range(iterations):
        label, distance = assign(points, centroids)
        moved = _means(points, weights, label, centroids)
        moved = _refill(points, weights, moved, label, distance)
        if torch.equal(moved, centroids):
            break
        centroids = moved
    label, distance = assign(points, centroids)
    counts = torch.zeros(len(centroids), dtype=torch.float64, device=points.device).index_add_(0, label, weights)
    return Clusters(centroids, counts, (distance.double() * weights).sum())


def assign(points: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest centroid of every point, and the squared distance to it."""
    half, transposed = -0.5 * centroids.square().sum(1), centroids.t().contiguous()
    labels, closeness = [], []
    for block in torch.split(points, max(1, CHUNK // len(centroids))):
        best = torch.addmm(half, block, transposed).max(1)  # z·c − |c|²/2 is largest where |z−c|² is smallest
        labels.append(best.indices)
        closeness.append(best.values)
    distance = points.square().sum(1) - 2 * torch.cat(closeness)
    return torch.cat(labels), distance.clamp_min_(0)


def _seed(points: Tensor, weights: Tensor, k: int, key: int) -> Tensor:
    """Greedy k-means++: of a few candidates drawn in proportion to the potential, keep the one that lowers it most."""
    trials = 2 + int(math.log(k)) if k > 1 else 1
    draws = uniform(key, (k, trials)).to(points.device, torch.float64)
    norms = points.square().sum(1)
    first = _pick(weights, draws[0, :1])
    chosen = [first]
    closest = _squared(points, norms, first)[0]
    for i in range(1, k):
        potential = closest * weights
        if not bool(potential.sum() > 0):  # fewer distinct points than words (D23)
            break
        candidates = _pick(potential, draws[i])
        reached = torch.minimum(closest, _squared(points, norms, candidates))  # [trials, n]
        best = (reached @ weights).argmin()
        chosen.append(candidates[best : best + 1])
        closest = reached[best]
    return points[torch.cat(chosen)].clone()


def _pick(weight: Tensor, draws: Tensor) -> Tensor:
    """Indices drawn with probability in proportion to a weight."""
    # Whole numbers: a running sum of floats is not the same twice on a GPU, and differs from the CPU's.
    total = (weight / weight.sum() * 2.0**52).long().cumsum(0)
    return torch.searchsorted(total, (draws * total[-1]).long(), right=True).clamp_max(len(weight) - 1)


def _squared(points: Tensor, norms: Tensor, chosen: Tensor) -> Tensor:
    """Squared distances [len(chosen), n] to some of the points; exactly zero to equal ones."""
    some = points[chosen]
    distance = norms - 2 * some @ points.t() + norms[chosen, None]
    # Rounding leaves specks where a point meets itself; below this they are not distances.
    speck = 4 * torch.finfo(points.dtype).eps * (norms + norms[chosen, None])
    return torch.where(distance > speck, distance, 0).double()


def _means(points: Tensor, weights: Tensor, label: Tensor, old: Tensor) -> Tensor:
    """The weighted mean of every cluster; an empty one stays where it was."""
    w = weights.to(points.dtype)
    sums = torch.zeros_like(old).index_add_(0, label, points * w[:, None])
    mass = torch.zeros(len(old), dtype=points.dtype, device=points.device).index_add_(0, label, w)
    return torch.where(mass[:, None] > 0, sums / mass.clamp_min(torch.finfo(points.dtype).tiny)[:, None], old)


def _refill(points: Tensor, weights: Tensor, centroids: Tensor, label: Tensor, distance: Tensor) -> Tensor:
    """Put empty clusters on the points that are farthest from their own centroid."""
    mass = torch.zeros(len(centroids), dtype=torch.float64, device=points.device).index_add_(0, label, weights)
    empty = (mass == 0).nonzero()[:, 0]
    if len(empty):
        far = (distance * weights).topk(min(len(empty), len(points))).indices
        centroids[empty[: len(far)]] = points[far]
    return centroids
