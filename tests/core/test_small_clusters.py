"""Clusters are merged until each has points of enough distinct examples."""

import pytest
import torch

from uefl.core import small_clusters
from uefl.core.kmeans import Clusters, kmeans
from uefl.core.small_clusters import list_owners, merge_small_clusters


def make_clusters(centroids):
    centroids = torch.tensor(centroids)
    return Clusters(centroids, torch.ones(len(centroids), dtype=torch.float64), torch.zeros((), dtype=torch.float64))


def test_cluster_with_too_few_owners_joins_the_nearest_one_as_a_weighted_mean():
    """Clusters near 0 (points of three examples), near 10 (one point) and near 100."""
    points = torch.tensor([[-1.0], [0.0], [1.0], [10.0], [99.0], [100.0], [101.0]])
    owners = torch.tensor([0, 1, 2, 3, 0, 1, 3])
    merged = merge_small_clusters(points, make_clusters([[0.0], [10.0], [100.0]]), owners, 2)
    assert merged.centroids.tolist() == [[(0 * 3 + 10 * 1) / 4], [100.0]]
    assert merged.counts.tolist() == [4, 3]


def test_owners_are_counted_once_and_not_by_their_points():
    points = torch.tensor([[0.0]] * 5 + [[10.0]] * 3)
    owners = torch.tensor([0] * 5 + [1, 2, 3])
    two = make_clusters([[0.0], [10.0]])
    assert len(merge_small_clusters(points, two, owners, 1).centroids) == 2
    assert len(merge_small_clusters(points, two, owners, 2).centroids) == 1


def test_owners_that_merged_clusters_share_are_counted_once():
    """Points of the examples 0 and 1 near 0, of 1 and 2 near 10 (three examples together), of four others near 100."""
    points = torch.tensor([[0.0], [0.0], [10.0], [10.0], [100.0], [100.0], [100.0], [100.0]])
    owners = torch.tensor([0, 1, 1, 2, 3, 4, 5, 6])
    three = make_clusters([[0.0], [10.0], [100.0]])
    assert len(merge_small_clusters(points, three, owners, 3).centroids) == 2
    assert len(merge_small_clusters(points, three, owners, 4).centroids) == 1


def test_last_cluster_stays_although_it_has_too_few_owners():
    points = torch.arange(6.0)[:, None]
    merged = merge_small_clusters(points, make_clusters([[1.0], [4.0]]), torch.arange(6), 50)
    assert merged.centroids.tolist() == [[2.5]]
    assert merged.counts.tolist() == [6]


def test_clusters_with_enough_owners_are_merged_only_down_to_the_given_number():
    points = torch.tensor([[0.0], [0.0], [1.0], [1.0], [1.0], [50.0], [50.0], [50.0]])
    clusters, owners = make_clusters([[0.0], [1.0], [50.0]]), torch.arange(8)
    assert len(merge_small_clusters(points, clusters, owners, 2).centroids) == 3
    merged = merge_small_clusters(points, clusters, owners, 2, max_clusters=2)
    assert merged.centroids.flatten().tolist() == [pytest.approx(0.6), 50.0]


@pytest.mark.parametrize("seed", range(4))
def test_every_centroid_of_kmeans_is_the_mean_of_enough_examples(seed):
    """Far outliers, on which K-means puts centroids of single points, and many clusters for few examples."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(120, 3, generator=generator)
    points[::17] *= 40
    owners = torch.arange(60).repeat_interleave(2)
    found = kmeans(points, 30, noise_key=seed)
    assert int(found.counts.min()) == 1  # an outlier alone
    assert any((points == c).all(1).any() for c in found.centroids)
    merged = merge_small_clusters(points, found, owners, 10)
    assert len(merged.centroids) > 1
    assert int(merged.counts.sum()) == 120
    assert not any((points == c).all(1).any() for c in merged.centroids)
    # The merged clusters are unions of the found ones: some union of them has each merged centroid as its mean.
    label = torch.cdist(points, found.centroids).argmin(1)
    sums = torch.stack([points[label == j].sum(0) for j in range(len(found.centroids))])
    assert torch.allclose((merged.centroids * merged.counts[:, None]).sum(0).float(), sums.sum(0), atol=1e-2)
    assert int(merged.counts.min()) >= 10


def test_centroid_that_kmeans_left_on_one_point_becomes_the_mean_of_its_points():
    """A refill in the last iteration puts a centroid on a point; other points are then nearest to it."""
    points = torch.tensor([[0.0], [1.0], [2.0], [10.0], [11.0], [15.0]])
    merged = merge_small_clusters(points, make_clusters([[1.0], [15.0]]), torch.arange(6), 3)
    assert merged.centroids.tolist() == [[1.0], [12.0]]


def test_owners_are_listed_in_blocks(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    label, owners = torch.randint(7, (500,), generator=generator), torch.randint(40, (500,), generator=generator)
    expected = [sorted(set(owners[label == k].tolist())) for k in range(8)]
    for block_size in (500, 13):
        monkeypatch.setattr(small_clusters, "BLOCK_SIZE", block_size)
        assert [owned.tolist() for owned in list_owners(label, owners, 8)] == expected
