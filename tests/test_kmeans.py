"""K-means: as good as scikit-learn's, weighted, bounded in memory, and the same for the same key."""

import sys

import pytest
import torch
from sklearn.cluster import KMeans

from uefl.data.embedded import mnist5k
from uefl.kmeans import assign, kmeans
from uefl.models.residual import ResidualEncoder

MODULE = sys.modules["uefl.kmeans"]  # `uefl.kmeans` is the function


@pytest.fixture(scope="module")
def features():
    """Segments of real digits as the quantizer sees them: patches, and an encoder's features after layer norm."""
    x = (mnist5k().x[::10].float() / 255 - 0.1307) / 0.3081
    patches = torch.nn.functional.unfold(x, 4, stride=4).transpose(1, 2).reshape(-1, 16)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        z = ResidualEncoder(channels=1, size=28, width=8)(x[:200]).flatten(2).transpose(1, 2)
    z = torch.nn.functional.layer_norm(z, z.shape[-1:])
    return {"patches": patches[:6000], "encoder": z.reshape(-1, z.shape[-1] // 4)[:6000]}


@pytest.fixture
def points():
    torch.manual_seed(0)
    return torch.randn(8, 5).repeat_interleave(40, 0) * 5 + torch.randn(320, 5)


def inertia(points, centroids, weights=None):
    nearest = torch.cdist(points.double(), centroids.double()).square().min(1).values
    return (nearest if weights is None else nearest * weights).sum().item()


@pytest.mark.parametrize("kind", ["patches", "encoder"])
@pytest.mark.parametrize("k", [16, 64])
def test_inertia_on_real_features_is_within_a_hundredth_of_scikit_learns(features, kind, k):
    x = features[kind]
    ours = [inertia(x, kmeans(x, k, key=seed).centroids) for seed in range(3)]
    theirs = [KMeans(k, n_init=1, max_iter=20, random_state=seed).fit(x.numpy()).inertia_ for seed in range(3)]
    assert sum(ours) <= 1.01 * sum(theirs)


def test_it_reports_its_own_inertia_and_counts(points):
    found = kmeans(points, 8, key=1)
    assert found.inertia.item() == pytest.approx(inertia(points, found.centroids), rel=1e-5)
    label = torch.cdist(points, found.centroids).argmin(1)
    assert found.counts.tolist() == torch.bincount(label, minlength=8).tolist()


def test_every_centroid_is_the_mean_of_its_points_in_the_end(points):
    found = kmeans(points, 8, key=1, iterations=100)
    label, _ = assign(points, found.centroids)
    for j in range(8):
        assert torch.allclose(found.centroids[j], points[label == j].mean(0), atol=1e-4)


def test_weighted_points_are_repeated_points(points):
    weights = torch.arange(320) % 4  # some of no weight at all
    once = kmeans(points.double(), 8, key=3, weights=weights)
    often = kmeans(points.double().repeat_interleave(weights, 0), 8, key=3)
    assert torch.allclose(once.centroids, often.centroids, atol=1e-9)
    assert torch.equal(once.counts, often.counts)
    assert once.inertia.item() == pytest.approx(often.inertia.item())


def test_samples_that_double_end_near_what_all_points_give(features, monkeypatch):
    x = features["patches"]
    whole = [inertia(x, kmeans(x, 16, key=seed).centroids) for seed in range(3)]
    monkeypatch.setattr(MODULE, "RUNG", 700)
    climbed = [inertia(x, kmeans(x, 16, key=seed).centroids) for seed in range(3)]
    assert climbed != whole  # 750, 1500, 3000, 6000 points
    assert sum(climbed) <= 1.02 * sum(whole)


def test_samples_follow_the_weights(points, monkeypatch):
    monkeypatch.setattr(MODULE, "RUNG", 40)
    monkeypatch.setattr(MODULE, "EACH", 1)
    weights = torch.ones(320)
    weights[40:] = 0  # one of eight clouds is all there is
    found = kmeans(points, 2, key=1, weights=weights)
    assert torch.cdist(found.centroids, points[:40]).min(1).values.max() < 5
    assert found.counts.sum() == 40


def test_a_point_without_weight_draws_no_centroid(points):
    far = torch.cat([points, torch.full((1, 5), 1000.0)])
    weights = torch.ones(321)
    weights[-1] = 0
    assert kmeans(far, 8, key=1, weights=weights).centroids.abs().max() < 100


@pytest.mark.parametrize("width", [1, 5, 64, 512])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_fewer_distinct_points_than_words_give_as_many_words_as_there_are(width, scale):
    torch.manual_seed(width)
    distinct = scale * torch.randn(7, width)
    found = kmeans(distinct.repeat(30, 1), 20, key=0)
    assert len(found.centroids) == 7
    assert torch.cdist(distinct, found.centroids).min(1).values.max() < 1e-4 * scale * width**0.5
    assert found.counts.tolist() == [30] * 7


def test_one_point_is_one_word():
    found = kmeans(torch.tensor([[2.0, 3.0]]), 5, key=0)
    assert found.centroids.tolist() == [[2.0, 3.0]]
    assert found.counts.tolist() == [1]


def test_an_empty_cluster_is_put_where_points_are_farthest_from_theirs(monkeypatch):
    """The second centroid starts where no point is, and would stay there."""
    points = torch.tensor([[0.0], [0.1], [0.2], [10.0], [10.1]])
    monkeypatch.setattr(MODULE, "_seed", lambda *_: torch.tensor([[5.0], [-100.0]]))
    found = kmeans(points, 2, key=0)
    assert sorted(found.centroids.flatten().tolist()) == pytest.approx([0.1, 10.05])
    assert sorted(found.counts.tolist()) == [2, 3]


def test_no_cluster_is_empty_on_real_features(features):
    assert kmeans(features["encoder"], 256, key=0).counts.min() >= 1


def test_the_same_key_gives_the_same_bits_and_another_gives_others(features):
    x = features["patches"][:1000]
    one, again, other = (kmeans(x, 20, key=k).centroids for k in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_the_global_generator_changes_nothing(points):
    torch.manual_seed(1)
    one = kmeans(points, 8, key=1)
    torch.manual_seed(2)
    assert torch.equal(one.centroids, kmeans(points, 8, key=1).centroids)


def test_points_are_left_as_they_are(points):
    before = points.clone()
    kmeans(points, 8, key=1)
    assert torch.equal(points, before)


def test_cutting_the_work_into_chunks_changes_nothing(points, monkeypatch):
    whole = kmeans(points.double(), 8, key=1)
    monkeypatch.setattr(MODULE, "CHUNK", 50)
    cut = kmeans(points.double(), 8, key=1)
    assert torch.allclose(whole.centroids, cut.centroids, atol=1e-12)
    assert torch.equal(whole.counts, cut.counts)


def test_no_more_distances_than_a_chunk_are_held_at_once(features, monkeypatch):
    monkeypatch.setattr(MODULE, "CHUNK", 10_000)
    largest, real = [], torch.addmm
    monkeypatch.setattr(torch, "addmm", lambda *a, **k: largest.append(real(*a, **k).numel()) or real(*a, **k))
    kmeans(features["patches"], 64, key=0, iterations=2)
    assert largest
    assert max(largest) <= 10_000


def test_products_are_exact_whatever_precision_is_set_around(monkeypatch):
    seen = []
    inner = MODULE._clusters

    def looked(*args):
        seen.append((torch.backends.cuda.matmul.allow_tf32, torch.is_autocast_enabled("cpu")))
        return inner(*args)

    monkeypatch.setattr(MODULE, "_clusters", looked)
    was = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        with torch.autocast("cpu", torch.bfloat16):
            kmeans(torch.randn(20, 2), 3, key=0)
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32 = was
    assert seen == [(False, False)]
