"""Centroids of a silo's features: computed at the silo, checked and merged at the server."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from uefl.core import noise_addresses as addresses
from uefl.core.federation import Batch, ClientModel, Tensors
from uefl.core.kmeans import Clusters, Problem, kmeans, kmeans_batch
from uefl.core.noise import derive_key
from uefl.core.small_clusters import merge_small_clusters

MAX_FEATURE = 1e12  # squares of larger features may overflow in K-means
WHOLE = -1  # all examples of a silo, not one of its halves 0 and 1


class Centroids(NamedTuple):
    """K-means centroids of one silo, per member of an ensemble."""

    centroids: Tensor  # [M, v, D]
    counts: Tensor  # [M, v] features per centroid


def compute_centroids(model: ClientModel, batch: Batch, *, batch_size: int, min_examples: int) -> Tensors:
    """Run K-means on the silo's own features, encoded by the broadcast model in evaluation mode (D20).

    Every centroid is the mean of features of at least `min_examples` examples, or groups where the silo has them (D30).
    A silo with fewer of them returns no centroid.
    """
    encoded = [encode_features(model, batch, batch_size=batch_size)]
    return cluster_features(encoded, min_examples=min_examples)[0]


def encode_features(model: ClientModel, batch: Batch, *, batch_size: int) -> Tensors:
    """Return a silo's features [M, N, D], and what K-means needs beside them."""
    blocks = torch.split(batch.x, batch_size)
    features = torch.cat([model.call("encode_segments", block) for block in blocks], 1)
    return {
        "features": features,
        "owners": _find_owners(batch, features.shape[1]),
        "num_codewords": model.extras["num_codewords"],
        "half": model.extras.get("half", torch.tensor(WHOLE)),
        "noise_key": torch.as_tensor(batch.noise_key),
    }


def cluster_features(encoded: Sequence[Tensors], *, min_examples: int) -> list[Tensors]:
    """Run K-means on the features of several silos at once and return the centroids of each."""
    answers: dict[int, Tensors] = {}
    encoded = [select_half(silo) for silo in encoded]
    sizes = [int(silo["num_codewords"]) for silo in encoded]
    for v in sorted(set(sizes)):
        rows = [i for i, size in enumerate(sizes) if size == v]
        problems = [
            Problem(points, derive_key(int(encoded[i]["noise_key"]), m, addresses.SILO_CENTROIDS))
            for i in rows
            for m, points in enumerate(encoded[i]["features"])
        ]
        clusters = iter(kmeans_batch(problems, v))
        for i in rows:
            own_clusters = [next(clusters) for _ in encoded[i]["features"]]
            answers[i] = finish_centroids(encoded[i], own_clusters, min_examples)
    return [answers[i] for i in range(len(encoded))]


def select_half(encoded: Tensors) -> Tensors:
    """Return the features of every other example, or group, of a silo, if one of its halves is asked for."""
    if int(encoded["half"]) == WHOLE:
        return encoded
    is_selected = encoded["owners"] % 2 == encoded["half"]
    return {**encoded, "features": encoded["features"][:, is_selected], "owners": encoded["owners"][is_selected]}


def finish_centroids(encoded: Tensors, clusters: Sequence[Clusters], min_examples: int) -> Tensors:
    """Return a silo's answer from the clusters of each member of an ensemble, equally many of each."""
    features, owners = encoded["features"], encoded["owners"]
    if min_examples > 1 and len(torch.unique(owners)) < min_examples:
        return {"centroids": features[:, :0], "counts": features.new_zeros(len(features), 0, dtype=torch.float64)}
    if min_examples > 1:
        merge = partial(merge_small_clusters, owners=owners, min_owners=min_examples)
        merged = [merge(points, own_clusters) for points, own_clusters in zip(features, clusters)]
        v = min(len(own_clusters.centroids) for own_clusters in merged)
        # Members of an ensemble have equally many codewords: those with more clusters merge further.
        clusters = [
            after if len(after.centroids) == v else merge(points, before, max_clusters=v)
            for points, before, after in zip(features, clusters, merged)
        ]
    v = min(len(c.centroids) for c in clusters)
    return {
        "centroids": torch.stack([c.centroids[:v] for c in clusters]),
        "counts": torch.stack([c.counts[:v] for c in clusters]),
    }


def _find_owners(batch: Batch, num_features: int) -> Tensor:
    """Return for every feature [N] the number of its example, or of the example's group."""
    examples = torch.arange(len(batch.x), device=batch.x.device)
    groups = examples if batch.groups is None else torch.unique(batch.groups, return_inverse=True)[1]
    return groups.repeat_interleave(num_features // len(batch.x))


def find_centroid_error(answer: Tensors, blank_answer: Tensors, num_examples: int, *, num_blank_images: int = 1) -> str:
    """Return why centroids cannot be those of a silo with this number of examples, or an empty string.

    Every image has as many features as each of the `num_blank_images` blank images, so the sum of counts is bounded.
    """
    if set(answer) != set(blank_answer):
        return "an answer with centroids has other tensors than centroids and counts"
    for name, tensor in answer.items():
        expected = blank_answer[name]
        if tensor.dtype != expected.dtype or tensor.dim() != expected.dim() or len(tensor) != len(expected):
            return f"{name} has type {tensor.dtype} and shape {tuple(tensor.shape)}, unlike those of a blank image"
    counts, max_sum = answer["counts"], num_examples * float(blank_answer["counts"].sum(1).max()) / num_blank_images
    if answer["centroids"].numel() and float(answer["centroids"].abs().max()) > MAX_FEATURE:
        return f"a centroid has a value above {MAX_FEATURE:g}"
    if not bool((counts >= 0).all()):
        return "a centroid has a negative count"
    if counts.numel() and float(counts.sum(1).max()) > max_sum:
        return f"the counts of centroids sum to {float(counts.sum(1).max()):g}, but {max_sum:g} features are possible"
    return ""


def has_valid_centroids(answer: Tensors, like: Tensor, v: int) -> bool:
    """Return whether an answer holds finite centroids and counts in the shape of the codewords [M, ·, D]."""
    if set(answer) != {"centroids", "counts"}:
        return False
    centroids, counts = answer["centroids"], answer["counts"]
    fits = counts.dim() == 2 and 0 < counts.shape[1] <= v
    fits = fits and centroids.shape == (len(like), counts.shape[1], like.shape[2]) and len(counts) == len(like)
    return fits and bool(torch.isfinite(centroids).all() and torch.isfinite(counts).all() and (counts >= 0).all())


def merge_centroids(pieces: Sequence[Centroids], v: int, seed: int) -> Tensor:
    """Merge the centroids of several silos by K-means weighted with their counts: [M, v, D].

    The points are few, so a CPU is faster. Also, the threads of several seeds then need no work space on a GPU.
    """
    merged = []
    for m in range(len(pieces[0].centroids)):
        points = torch.cat([piece.centroids[m] for piece in pieces]).cpu()
        counts = torch.cat([piece.counts[m] for piece in pieces]).cpu()
        noise_key = derive_key(seed, m, addresses.MERGED_CENTROIDS)
        merged.append(kmeans(points, v, noise_key=noise_key, sample_weights=counts).centroids)
    return torch.stack([centroids[: min(map(len, merged))] for centroids in merged]).to(pieces[0].centroids.device)
