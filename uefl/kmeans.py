"""Seeded, weighted K-means in plain tensor code: greedy k-means++ seeding, then Lloyd's iterations.

Arthur & Vassilvitskii, k-means++ (SODA 2007); Lloyd, Least squares quantization in PCM (1982). Many points are climbed
in rungs: seeds and the first iterations see a sample, which doubles until the last ones see every point.
Legend: n points, D width, k clusters. Memory is bounded by CHUNK distances, however many points there are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from uefl.noise import key as _key
from uefl.noise import uniform

CHUNK = 1 << 20  # distances held at once: 4 MB, so that a core's cache holds them
RUNG = 8192  # points of the smallest sample, at least
EACH = 32  # and so many for every cluster


class Clusters(NamedTuple):
    """Centroids, the weight of the points each one stands for, and the weighted sum of squared distances."""

    centroids: Tensor  # [k, D]
    counts: Tensor  # [k] float64
    inertia: Tensor  # [] float64


def kmeans(points: Tensor, k: int, *, key: int, weights: Tensor | None = None, iterations: int = 20) -> Clusters:
    """Cluster points [n, D] into k, or into as many as there are distinct points where those are fewer."""
    weights = torch.ones(len(points), device=points.device) if weights is None else weights
    with exactly(points.device.type):
        return _clusters(points, k, key, weights.to(torch.float64), iterations)


@contextmanager
def exactly(device: str) -> Iterator[None]:
    """Products in full precision: coarse ones find distances between equal points, and so one word twice."""
    matmul = torch.backends.cuda.matmul
    was = matmul.allow_tf32
    matmul.allow_tf32 = False
    try:
        with torch.autocast(device, enabled=False):
            yield
    finally:
        matmul.allow_tf32 = was


def _clusters(points: Tensor, k: int, key: int, weights: Tensor, iterations: int) -> Clusters:
    rungs = _rungs(points, weights, max(RUNG, EACH * k), key)
    centroids = _seed(*rungs[0], k, key)
    for sample, mass in rungs:
        centroids = _lloyd(sample, mass, centroids, math.ceil(iterations / len(rungs)))
    label, distance = assign(points, centroids)
    counts = torch.zeros(len(centroids), dtype=torch.float64, device=points.device).index_add_(0, label, weights)
    return Clusters(centroids, counts, (distance.double() * weights).sum())


def _rungs(points: Tensor, weights: Tensor, least: int, key: int) -> list[tuple[Tensor, Tensor]]:
    """Samples of n/2^j points and, last, all of them; points and weights of each."""
    rungs, size = [(points, weights)], len(points) // 2
    while size >= least:
        # One draw from each of `size` equal shares of the weight: no stretch of the data is over- or under-drawn.
        at = torch.arange(size, device=points.device) + uniform(_key(key, size), (size,), points.device).double()
        rungs.insert(0, (points[_pick(weights, at / size)], torch.ones(size, dtype=torch.float64).to(points.device)))
        size //= 2
    return rungs


def _lloyd(points: Tensor, weights: Tensor, centroids: Tensor, iterations: int) -> Tensor:
    norms = points.square().sum(1)
    for _ in range(iterations):
        label, distance = assign(points, centroids, norms)
        moved = _means(points, weights, label, centroids)
        moved = _refill(points, weights, moved, label, distance)
        if torch.equal(moved, centroids):
            break
        centroids = moved
    return centroids


def assign(points: Tensor, centroids: Tensor, norms: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The nearest centroid of every point, and the squared distance to it; `norms` are the points' squares."""
    half, transposed = -0.5 * centroids.square().sum(1), centroids.t().contiguous()
    labels, closeness = [], []
    for block in torch.split(points, _rows(centroids)):
        best = torch.addmm(half, block, transposed).max(1)  # z·c − |c|²/2 is largest where |z−c|² is smallest
        labels.append(best.indices)
        closeness.append(best.values)
    distance = (points.square().sum(1) if norms is None else norms) - 2 * torch.cat(closeness)
    return torch.cat(labels), distance.clamp_min_(0)


def _rows(centroids: Tensor) -> int:
    """So many points at once."""
    return max(1, CHUNK // len(centroids))


def _seed(points: Tensor, weights: Tensor, k: int, key: int) -> Tensor:
    """Greedy k-means++: of a few candidates drawn in proportion to the potential, keep the one that lowers it most."""
    trials = 2 + int(math.log(k)) if k > 1 else 1
    draws = uniform(key, (k, trials)).to(points.device, torch.float64)
    norms, transposed = points.square().sum(1), points.t().contiguous()
    first = _pick(weights, draws[0, :1])
    chosen = [first]
    closest, mass = _squared(transposed, norms, first)[0], weights.to(points.dtype)
    for i in range(1, k):
        potential = closest * weights
        if not bool(potential.sum() > 0):  # fewer distinct points than words (D23)
            break
        candidates = _pick(potential, draws[i])
        reached = torch.minimum(closest, _squared(transposed, norms, candidates))  # [trials, n]
        best = (reached @ mass).argmin()
        chosen.append(candidates[best : best + 1])
        closest = reached[best]
    return points[torch.cat(chosen)].clone()


def _pick(weight: Tensor, draws: Tensor) -> Tensor:
    """Indices drawn with probability in proportion to a weight."""
    # Whole numbers: a running sum of floats is not the same twice on a GPU, and differs from the CPU's.
    total = (weight / weight.sum() * 2.0**52).long().cumsum(0)
    return torch.searchsorted(total, (draws * total[-1]).long(), right=True).clamp_max(len(weight) - 1)


def _squared(transposed: Tensor, norms: Tensor, chosen: Tensor) -> Tensor:
    """Squared distances [len(chosen), n] to some of the points [D, n]; exactly zero to equal ones."""
    # Rounding leaves specks where a point meets itself; taking that much off makes them zero.
    norms = norms * (1 - 4 * torch.finfo(norms.dtype).eps)
    distance = (transposed[:, chosen].t() @ transposed).mul_(-2)
    return distance.add_(norms).add_(norms[chosen, None]).clamp_min_(0)


def _means(points: Tensor, weights: Tensor, label: Tensor, old: Tensor) -> Tensor:
    """The weighted mean of every cluster; an empty one stays where it was."""
    w, sums = weights.to(points.dtype), torch.zeros_like(old)
    mass = torch.zeros(len(old), dtype=points.dtype, device=points.device).index_add_(0, label, w)
    for block, share, at in zip(*(torch.split(t, _rows(old)) for t in (points, w, label))):
        sums.index_add_(0, at, block * share[:, None])
    return torch.where(mass[:, None] > 0, sums / mass.clamp_min(torch.finfo(points.dtype).tiny)[:, None], old)


def _refill(points: Tensor, weights: Tensor, centroids: Tensor, label: Tensor, distance: Tensor) -> Tensor:
    """Put empty clusters on the points that are farthest from their own centroid."""
    mass = torch.zeros(len(centroids), dtype=torch.float64, device=points.device).index_add_(0, label, weights)
    empty = (mass == 0).nonzero()[:, 0]
    if len(empty):
        far = (distance * weights).topk(min(len(empty), len(points))).indices
        centroids[empty[: len(far)]] = points[far]
    return centroids
