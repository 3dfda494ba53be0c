"""Centroids of a silo's features: computed at the silo, checked and merged at the server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from uefl.core import noise_addresses as addresses
from uefl.core.federation import Batch, ClientModel, Tensors
from uefl.core.kmeans import kmeans
from uefl.core.noise import derive_key


class Centroids(NamedTuple):
    """K-means centroids of one silo, per member of an ensemble."""

    centroids: Tensor  # [M, v, D]
    counts: Tensor  # [M, v] features per centroid


def compute_centroids(model: ClientModel, batch: Batch, *, batch_size: int) -> Tensors:
    """Run K-means on the silo's own features, encoded by the broadcast model in evaluation mode (D20)."""
    blocks = torch.split(batch.x, batch_size)
    features = torch.cat([model.call("encode_segments", block) for block in blocks], 1)  # [M, N, D]
    num_codewords = int(model.extras["num_codewords"])
    clusters = [
        kmeans(points, num_codewords, noise_key=derive_key(addresses.SILO_CENTROIDS, i))
        for i, points in enumerate(features)
    ]
    v = min(len(c.centroids) for c in clusters)
    return {
        "centroids": torch.stack([c.centroids[:v] for c in clusters]),
        "counts": torch.stack([c.counts[:v] for c in clusters]),
    }


def has_valid_centroids(answer: Tensors, like: Tensor, v: int) -> bool:
    """Return whether an answer holds finite centroids and counts in the shape of the codewords [M, ·, D]."""
    if set(answer) != {"centroids", "counts"}:
        return False
    centroids, counts = answer["centroids"], answer["counts"]
    fits = counts.dim() == 2 and 0 < counts.shape[1] <= v
    fits = fits and centroids.shape == (len(like), counts.shape[1], like.shape[2]) and len(counts) == len(like)
    return fits and bool(torch.isfinite(centroids).all() and torch.isfinite(counts).all() and (counts >= 0).all())


def merge_centroids(pieces: Sequence[Centroids], v: int, seed: int) -> Tensor:
    """Merge the centroids of several silos by K-means weighted with their counts: [M, v, D]."""
    merged = []
    for m in range(len(pieces[0].centroids)):
        points = torch.cat([piece.centroids[m] for piece in pieces])
        counts = torch.cat([piece.counts[m] for piece in pieces])
        noise_key = derive_key(seed, m, addresses.MERGED_CENTROIDS)
        merged.append(kmeans(points, v, noise_key=noise_key, sample_weights=counts).centroids)
    return torch.stack([centroids[: min(map(len, merged))] for centroids in merged])
