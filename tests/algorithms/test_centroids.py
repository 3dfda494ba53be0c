"""Centroids of silos are merged as if the server had the points behind them."""

import torch

from uefl.algorithms.centroids import Centroids, merge_centroids


def make_piece(rows, counts):
    return Centroids(torch.tensor(rows)[None], torch.tensor(counts, dtype=torch.float64)[None])


def test_merged_centroids_are_means_weighted_by_the_counts():
    """Two pairs of centroids, one pair near 0 and one near 100; within each, the counts differ."""
    pieces = [make_piece([[0.0, 0.0], [100.0, 0.0]], [30, 1]), make_piece([[4.0, 0.0], [104.0, 0.0]], [10, 3])]
    merged = merge_centroids(pieces, 2, seed=0)
    assert merged.shape == (1, 2, 2)
    assert sorted(merged[0, :, 0].tolist()) == [(30 * 0 + 10 * 4) / 40, (1 * 100 + 3 * 104) / 4]


def test_members_of_an_ensemble_are_merged_separately():
    pieces = [
        Centroids(torch.tensor([[[0.0]], [[10.0]]]), torch.tensor([[1.0], [3.0]])),
        Centroids(torch.tensor([[[8.0]], [[20.0]]]), torch.tensor([[3.0], [1.0]])),
    ]
    assert merge_centroids(pieces, 1, seed=0).flatten().tolist() == [6.0, 12.5]


def test_merge_depends_on_the_seed():
    """K-means of many points has many local optima; without the seed, a spread over seeds would leave this out."""
    points = torch.randn(1, 200, 4, generator=torch.Generator().manual_seed(0))
    one, again, other = (merge_centroids([Centroids(points, torch.ones(1, 200))], 20, seed=s) for s in (0, 0, 1))
    assert torch.equal(one, again)
    assert not torch.allclose(one.sort(1).values, other.sort(1).values, atol=1e-3)
