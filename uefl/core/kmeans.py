"""Seeded, weighted K-means in plain tensor code: greedy k-means++ seeding, then Lloyd's iterations.

Arthur & Vassilvitskii, k-means++ (SODA 2007); Lloyd, Least squares quantization in PCM (1982). With many
points, seeding and the first iterations use a sample, which doubles until the last iterations use all points.
Several problems run as one batch: seeding is a sequence of small steps, and a GPU takes as long for one as for many.
Legend: S problems, n points, D their size, k clusters. Memory is bounded by MAX_DISTANCES, for any number of points.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from uefl.core.noise import derive_key, uniform

MAX_DISTANCES = 1 << 20  # distances computed at once: 4 MB, which fit in a core's cache
CUDA_FACTOR = 64  # a GPU computes this many times more at once: 256 MB
MIN_SAMPLE_SIZE = 8192  # minimum number of points in the smallest sample
MIN_SAMPLE_PER_CLUSTER = 32  # minimum number of points per cluster in it


class Clusters(NamedTuple):
    """Centroids, the weight of each one's points, and the weighted sum of squared distances."""

    centroids: Tensor  # [k, D]
    counts: Tensor  # [k] float64
    inertia: Tensor  # [] float64


class Problem(NamedTuple):
    """Points to cluster, and the key of the draws."""

    points: Tensor  # [n, D]
    noise_key: int
    sample_weights: Tensor | None = None  # [n]; None: all points have the same weight


class PaddedPoints(NamedTuple):
    """Points of several problems; those with fewer points than others are filled up with points of weight zero."""

    points: Tensor  # [S, n, D]
    weights: Tensor  # [S, n] float64
    sizes: tuple[int, ...]  # points of each problem


def kmeans(
    points: Tensor, k: int, *, noise_key: int, sample_weights: Tensor | None = None, max_iterations: int = 20
) -> Clusters:
    """Cluster points [n, D] into k clusters, or fewer if there are fewer distinct points."""
    return kmeans_batch([Problem(points, noise_key, sample_weights)], k, max_iterations=max_iterations)[0]


def kmeans_batch(problems: Sequence[Problem], k: int, *, max_iterations: int = 20) -> list[Clusters]:
    """Cluster the points of several problems, as many at once as memory allows; each is solved as if alone."""
    results: dict[int, Clusters] = {}
    for batch in _split_problems([problem.points for problem in problems], _get_min_sample_size(k)):
        with full_precision_matmul(problems[0].points.device.type):
            results |= zip(batch, _fit_clusters([problems[i] for i in batch], k, max_iterations))
    return [results[i] for i in range(len(problems))]


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


def _split_problems(points: Sequence[Tensor], min_size: int) -> list[list[int]]:
    """Return batches of problems, by index: of equally many samples, and with as many numbers as memory allows."""
    batches: list[list[int]] = []
    num_samples = [len(_list_sample_sizes(len(p), min_size)) for p in points]
    for i in sorted(range(len(points)), key=lambda i: -len(points[i])):
        first = batches[-1][0] if batches else i  # the largest of its batch
        fits = (len(batches[-1]) + 1) * points[first].numel() <= _get_max_distances(points[i]) if batches else False
        if fits and num_samples[i] == num_samples[first]:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def _get_max_distances(points: Tensor) -> int:
    return MAX_DISTANCES * (CUDA_FACTOR if points.is_cuda else 1)


def _get_min_sample_size(k: int) -> int:
    return max(MIN_SAMPLE_SIZE, MIN_SAMPLE_PER_CLUSTER * k)


def _fit_clusters(problems: Sequence[Problem], k: int, iterations: int) -> list[Clusters]:
    samples = [_draw_nested_samples(problem, _get_min_sample_size(k)) for problem in problems]
    stages = [_pad_points(stage) for stage in zip(*samples)]
    centroids, is_used = _seed_centroids(stages[0], k, [problem.noise_key for problem in problems])
    for stage in stages:
        centroids = _run_lloyd(stage, centroids, is_used, math.ceil(iterations / len(stages)))
    label, distance = _assign_batch(stages[-1].points, centroids, is_used)
    counts = _sum_weights(stages[-1].weights, label, centroids)
    inertia = (distance.double() * stages[-1].weights).sum(1)
    return [Clusters(centroids[i, :num], counts[i, :num], inertia[i]) for i, num in enumerate(is_used.sum(1).tolist())]


def _list_sample_sizes(n: int, min_size: int) -> list[int]:
    """Return the numbers of points n/2^j of the samples, and, last, n."""
    sizes = [n]
    while sizes[0] // 2 >= min_size:
        sizes.insert(0, sizes[0] // 2)
    return sizes


def _draw_nested_samples(problem: Problem, min_size: int) -> list[tuple[Tensor, Tensor]]:
    """Return samples of n/2^j points and, last, all points, each with weights."""
    points, device = problem.points, problem.points.device
    weights = torch.ones(len(points), device=device) if problem.sample_weights is None else problem.sample_weights
    weights, samples = weights.to(torch.float64), []
    for size in _list_sample_sizes(len(points), min_size)[:-1]:
        # Systematic sampling: one draw from each of `size` equal shares of the total weight.
        noise = uniform(derive_key(problem.noise_key, size), (size,), device).double()
        shares = (torch.arange(size, device=device) + noise) / size
        indices = _draw_indices(weights[None], shares[None], torch.tensor(len(points) - 1, device=device))[0]
        samples.append((points[indices], torch.ones(size, dtype=torch.float64).to(device)))
    return [*samples, (points, weights)]


def _pad_points(stage: Sequence[tuple[Tensor, Tensor]]) -> PaddedPoints:
    points, weights = zip(*stage)
    sizes = tuple(map(len, points))
    if len(stage) == 1:
        return PaddedPoints(points[0][None], weights[0][None], sizes)  # without a copy
    padded_points, padded_weights = (pad_sequence(list(t), batch_first=True) for t in (points, weights))
    return PaddedPoints(padded_points, padded_weights, sizes)


def _run_lloyd(stage: PaddedPoints, centroids: Tensor, is_used: Tensor, iterations: int) -> Tensor:
    """Iterate until no centroid of any problem moves; a problem that ends earlier stays as it is, bit for bit."""
    norms = stage.points.square().sum(2)
    for _ in range(iterations):
        label, distance = _assign_batch(stage.points, centroids, is_used, norms)
        moved = _compute_means(stage, label, centroids)
        moved = _refill_empty_clusters(stage, moved, is_used, label, distance)
        if torch.equal(moved, centroids):
            break
        centroids = moved
    return centroids


def assign_points(points: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest centroid of every point and the squared distance to it."""
    is_used = torch.ones(1, len(centroids), dtype=torch.bool, device=points.device)
    label, distance = _assign_batch(points[None], centroids[None], is_used)
    return label[0], distance[0]


def compute_cluster_means(points: Tensor, weights: Tensor, label: Tensor, old: Tensor) -> Tensor:
    """Return the weighted mean of every cluster; an empty cluster keeps its centroid."""
    return _compute_means(PaddedPoints(points[None], weights[None], (len(points),)), label[None], old[None])[0]


def _assign_batch(
    points: Tensor, centroids: Tensor, is_used: Tensor, squared_norms: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    half = (-0.5 * centroids.square().sum(2)).masked_fill_(~is_used, -torch.inf)
    transposed = centroids.transpose(1, 2).contiguous()
    labels, closeness = [], []
    for block in torch.split(points, _rows_per_block(centroids), 1):
        # z·c − |c|²/2 is largest where |z−c|² is smallest
        if len(points) == 1:
            best = torch.addmm(half[0], block[0], transposed[0])[None].max(2)
        else:
            best = torch.baddbmm(half[:, None], block, transposed).max(2)
        labels.append(best.indices)
        closeness.append(best.values)
    distance = (points.square().sum(2) if squared_norms is None else squared_norms) - 2 * torch.cat(closeness, 1)
    return torch.cat(labels, 1), distance.clamp_min_(0)


def _rows_per_block(centroids: Tensor) -> int:
    """Return how many points of each problem are compared with all centroids at once."""
    return max(1, _get_max_distances(centroids) // (len(centroids) * centroids.shape[1]))


def _seed_centroids(stage: PaddedPoints, k: int, noise_keys: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Seed by greedy k-means++: of a few candidates drawn by the potential, take the one that lowers it most.

    Return centroids and which of them are used: a problem has fewer than k if it has fewer distinct points (D23).
    """
    points, weights, sizes = stage
    last = torch.tensor(sizes, device=points.device)[:, None] - 1
    trials = 2 + int(math.log(k)) if k > 1 else 1
    draws = torch.stack([uniform(key, (k, trials)) for key in noise_keys]).to(points.device, torch.float64)
    norms, transposed = points.square().sum(2), points.transpose(1, 2).contiguous()
    first = _draw_indices(weights, draws[:, 0, :1], last)
    seeds, has_seed = [first], [torch.ones_like(first, dtype=torch.bool)]
    closest, point_weights = _squared_distances(transposed, norms, first)[:, 0], weights.to(points.dtype)
    rows = torch.arange(len(points), device=points.device)
    for i in range(1, k):
        potential = closest * weights
        has_seed.append(has_seed[-1] & (potential.sum(1, keepdim=True) > 0))
        if not points.is_cuda and not bool(has_seed[-1].any()):  # a GPU would have to wait for the answer
            break
        candidates = _draw_indices(potential, draws[:, i], last)
        distances = _squared_distances(transposed, norms, candidates)
        reached = torch.minimum(closest[:, None], distances)  # [S, trials, n]
        best = _multiply(reached, point_weights).argmin(1)
        seeds.append(candidates[rows, best][:, None])
        closest = reached[rows, best]
    is_used = torch.cat(has_seed, 1)
    is_used = is_used[:, : int(is_used.sum(1).max())]
    indices = torch.cat(seeds, 1)[:, : is_used.shape[1]]
    return points[rows[:, None], indices].clone(), is_used


def _draw_indices(weight: Tensor, draws: Tensor, last: Tensor) -> Tensor:
    """Draw indices, of each problem up to the last, with probability proportional to a weight [S, n]."""
    # Integers: a cumulative sum of floats is not deterministic on a GPU, and differs from the CPU's.
    share = weight / weight.sum(1, keepdim=True).clamp_min(torch.finfo(weight.dtype).tiny)
    total = (share * 2.0**52).long().cumsum(1)
    indices = torch.searchsorted(total, (draws * total[:, -1:]).long(), right=True)
    return torch.minimum(indices, last)


def _squared_distances(transposed: Tensor, norms: Tensor, indices: Tensor) -> Tensor:
    """Return squared distances [S, t, n] to points of given indices [S, t]; exactly zero to equal ones."""
    # Rounding gives a point a tiny distance to itself; subtracting that much makes it zero.
    norms = norms * (1 - 4 * torch.finfo(norms.dtype).eps)
    candidates = transposed.gather(2, indices[:, None].expand(-1, transposed.shape[1], -1))
    distance = _multiply(candidates.transpose(1, 2), transposed).mul_(-2)
    return distance.add_(norms[:, None]).add_(norms.gather(1, indices)[:, :, None]).clamp_min_(0)


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    """Multiply stacked matrices [S, ·, ·] by stacked matrices or vectors; one product alone is faster as such."""
    if len(a) == 1:
        return (a[0] @ b[0])[None]
    return a @ b if b.dim() == 3 else (a @ b[:, :, None])[:, :, 0]


def _sum_weights(weights: Tensor, label: Tensor, centroids: Tensor) -> Tensor:
    """Return the weight of the points of every cluster [S, k]."""
    sums = torch.zeros(centroids.shape[:2].numel(), dtype=weights.dtype, device=weights.device)
    return sums.index_add_(0, _number_clusters(label, centroids).flatten(), weights.flatten()).view(centroids.shape[:2])


def _number_clusters(label: Tensor, centroids: Tensor) -> Tensor:
    """Return labels [S, n] that differ between problems."""
    return label + torch.arange(len(label), device=label.device)[:, None] * centroids.shape[1]


def _compute_means(stage: PaddedPoints, label: Tensor, old: Tensor) -> Tensor:
    """Return the weighted mean of every cluster; an empty cluster keeps its centroid."""
    w, sums = stage.weights.to(old.dtype), torch.zeros_like(old)
    mass, numbers = _sum_weights(w, label, old)[:, :, None], _number_clusters(label, old)
    for block, share, at in zip(*(torch.split(t, _rows_per_block(old), 1) for t in (stage.points, w, numbers))):
        sums.view(-1, old.shape[2]).index_add_(0, at.flatten(), (block * share[:, :, None]).flatten(0, 1))
    return torch.where(mass > 0, sums / mass.clamp_min(torch.finfo(old.dtype).tiny), old)


def _refill_empty_clusters(
    stage: PaddedPoints, centroids: Tensor, is_used: Tensor, label: Tensor, distance: Tensor
) -> Tensor:
    """Move empty clusters to the points that are farthest from their own centroid."""
    is_empty = (_sum_weights(stage.weights, label, centroids) == 0) & is_used
    for i in is_empty.any(1).nonzero()[:, 0].tolist():
        n, empty = stage.sizes[i], is_empty[i].nonzero()[:, 0]
        far = (distance[i, :n] * stage.weights[i, :n]).topk(min(len(empty), n)).indices
        centroids[i, empty[: len(far)]] = stage.points[i, far]
    return centroids
