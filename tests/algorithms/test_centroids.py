"""Centroids of a silo are means over enough examples; those of several are merged as if the server had their points."""

from dataclasses import replace

import pytest
import torch
from harness import SMALL_CODEBOOK, make_clients, make_method, make_striped_silos

from uefl.algorithms.centroids import Centroids, find_centroid_error, merge_centroids
from uefl.core.federation import Examples
from uefl.engines.stacked.stacked_engine import StackedEngine


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


# --- enough examples behind a centroid ----------------------------------------------------------------------------


def query_centroids(silos, min_examples, num_codewords=40, engine=StackedEngine, **fields):
    """Return by silo the centroids that it sends, and the features of its training examples."""
    codebook = replace(SMALL_CODEBOOK, min_examples=min_examples)
    method = replace(make_method("uefl", codebook=True), codebook=codebook)
    clients = make_clients(method, silos, engine=engine, **fields)
    server = method.initialize_server(clients)
    _, centroids = codebook.query_centroids(method, clients, server, server.silo_names, num_codewords)
    features = {n: clients.net.eval().encode_segments(silo.train.x).detach() for n, silo in clients.silos.items()}
    return centroids, features


def count_owners(features, centroids, num_examples, groups=None):
    """Return how many distinct examples, or groups, have a feature nearest to each centroid."""
    label = torch.cdist(features, centroids).argmin(1).reshape(num_examples, -1)
    groups = torch.arange(num_examples) if groups is None else groups
    return [len(set(groups[(label == j).any(1)].tolist())) for j in range(len(centroids))]


def test_silo_sends_only_centroids_of_enough_examples():
    silos = make_striped_silos()
    few, features = query_centroids(silos, 1)
    many, _ = query_centroids(silos, 10)
    for silo in silos:
        n, name = len(silo.train.y), silo.name
        assert min(count_owners(features[name][0], few[name].centroids[0], n)) < 10
        assert 1 < many[name].centroids.shape[1] < few[name].centroids.shape[1]
        assert float(many[name].counts.sum()) == float(few[name].counts.sum()) == features[name].shape[1]


def test_examples_of_one_group_count_once():
    (silo, *_) = make_striped_silos()
    grouped = replace(silo, train_groups=torch.arange(len(silo.train.y)) // 4 + 100)  # five groups of four examples
    assert query_centroids([silo], 5)[0][silo.name].centroids.shape[1] > 2
    four, one, none = (query_centroids([grouped], count)[0] for count in (4, 5, 6))
    assert four[silo.name].centroids.shape[1] > one[silo.name].centroids.shape[1] >= 1
    assert none == {}


def test_silo_with_too_few_examples_sends_no_centroids_and_the_others_do():
    silos = make_striped_silos()
    small = replace(silos[1], train=Examples(silos[1].train.x[:9], silos[1].train.y[:9]))
    centroids, _ = query_centroids([silos[0], small], 10)
    assert set(centroids) == {"ada"}
    assert set(query_centroids([silos[0], small], 9)[0]) == {"ada", "bob"}


def test_members_of_an_ensemble_send_equally_many_centroids_without_losing_features():
    centroids, features = query_centroids(make_striped_silos(), 10, ensemble_size=3)
    for name, (of_members, counts) in centroids.items():
        assert of_members.shape[:2] == counts.shape
        assert counts.sum(1).tolist() == [features[name].shape[1]] * 3


@pytest.mark.parametrize("num_blank_images", [1, 10])
def test_counts_are_bounded_by_the_features_of_the_blank_images(num_blank_images):
    blank = {"centroids": torch.zeros(1, 2, 4), "counts": torch.tensor([[3.0, 5.0]]) * num_blank_images}
    answer = {"centroids": torch.ones(1, 3, 4), "counts": torch.tensor([[60.0, 60.0, 40.0]])}
    assert find_centroid_error(answer, blank, 20, num_blank_images=num_blank_images) == ""
    assert "sum to 160" in find_centroid_error(answer, blank, 19, num_blank_images=num_blank_images)
