"""Merge clusters of a silo until each has points of enough distinct examples, so that no centroid shows a single one.

Legend: n points, D their size, k clusters. A point is a segment of an example's feature; its owner is the example, or
the group (such as a patient) that the example belongs to.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from uefl.core.kmeans import Clusters, assign_points, compute_cluster_means, full_precision_matmul

BLOCK_SIZE = 1 << 20  # points whose owners are listed at once


def merge_small_clusters(
    points: Tensor, clusters: Clusters, owners: Tensor, min_owners: int, max_clusters: float = math.inf
) -> Clusters:
    """Merge each cluster with too few owners into its nearest one, until all have enough or one is left.

    Every centroid is then the mean of its points, also where K-means ended before that, or placed it on one point.
    The clusters with fewest owners are merged further until at most `max_clusters` are left.
    """
    with full_precision_matmul(points.device.type):
        label, _ = assign_points(points, clusters.centroids)
        weights = torch.ones(len(points), dtype=torch.float64, device=points.device)
        means = compute_cluster_means(points, weights, label, clusters.centroids)
    counts = torch.bincount(label, minlength=len(means)).to(torch.float64).cpu()
    centroids, members = means.cpu(), list_owners(label, owners, len(means))
    while len(centroids) > 1:
        sizes = [len(owned) for owned in members]
        smallest = min(range(len(sizes)), key=lambda i: sizes[i])
        if sizes[smallest] >= min_owners and len(centroids) <= max_clusters:
            break
        distance = (centroids - centroids[smallest]).square().sum(1)
        distance[smallest] = math.inf
        nearest = int(distance.argmin())
        centroids[nearest] = _compute_weighted_mean(centroids, counts, smallest, nearest)
        counts[nearest] += counts[smallest]
        members[nearest] = torch.unique(torch.cat([members[smallest], members[nearest]]))
        is_left = torch.arange(len(centroids)) != smallest
        centroids, counts = centroids[is_left], counts[is_left]
        del members[smallest]
    return clusters._replace(centroids=centroids.to(means), counts=counts.to(clusters.counts))


def list_owners(label: Tensor, owners: Tensor, k: int) -> list[Tensor]:
    """Return the distinct owners of each cluster's points, without a tensor of clusters × owners."""
    num_owners = int(owners.max()) + 1
    blocks = zip(torch.split(label, BLOCK_SIZE), torch.split(owners, BLOCK_SIZE))
    pairs = torch.cat([torch.unique(block * num_owners + of_block) for block, of_block in blocks])
    pairs = torch.unique(pairs).cpu()
    sizes = torch.bincount(pairs // num_owners, minlength=k)
    return list(torch.split(pairs % num_owners, sizes.tolist()))


def _compute_weighted_mean(centroids: Tensor, counts: Tensor, i: int, j: int) -> Tensor:
    """Return the mean of two centroids, weighted by their counts; an empty cluster has no weight."""
    total = float(counts[i] + counts[j]) or 1.0
    return (centroids[i] * float(counts[i]) + centroids[j] * float(counts[j])) / total
