"""K-means: as good as scikit-learn's, weighted, bounded in memory, and deterministic for a noise key."""

import pytest
import torch
from sklearn.cluster import KMeans

from uefl.core import kmeans as kmeans_module
from uefl.core.kmeans import assign_points, kmeans
from uefl.data.readers.embedded import read_mnist5k
from uefl.models.residual_encoder import ResidualEncoder


@pytest.fixture(scope="module")
def features():
    """Return segments of real digits: patches, and an encoder's features after layer norm."""
    x = (read_mnist5k().x[::10].float() / 255 - 0.1307) / 0.3081
    patches = torch.nn.functional.unfold(x, 4, stride=4).transpose(1, 2).reshape(-1, 16)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        z = ResidualEncoder(in_channels=1, image_size=28, width=8)(x[:200]).flatten(2).transpose(1, 2)
    z = torch.nn.functional.layer_norm(z, z.shape[-1:])
    return {"patches": patches[:6000], "encoder": z.reshape(-1, z.shape[-1] // 4)[:6000]}


@pytest.fixture
def points():
    torch.manual_seed(0)
    return torch.randn(8, 5).repeat_interleave(40, 0) * 5 + torch.randn(320, 5)


def compute_inertia(points, centroids):
    return torch.cdist(points.double(), centroids.double()).square().min(1).values.sum().item()


@pytest.mark.parametrize("source", ["patches", "encoder"])
@pytest.mark.parametrize("k", [16, 64])
def test_inertia_on_real_features_is_at_most_a_hundredth_above_scikit_learns(features, source, k):
    x = features[source]
    ours = [compute_inertia(x, kmeans(x, k, noise_key=seed).centroids) for seed in range(3)]
    scikit_learns = [KMeans(k, n_init=1, max_iter=20, random_state=seed).fit(x.numpy()).inertia_ for seed in range(3)]
    assert sum(ours) <= 1.01 * sum(scikit_learns)


def test_result_contains_inertia_and_counts(points):
    clusters = kmeans(points, 8, noise_key=1)
    assert clusters.inertia.item() == pytest.approx(compute_inertia(points, clusters.centroids), rel=1e-5)
    label = torch.cdist(points, clusters.centroids).argmin(1)
    assert clusters.counts.tolist() == torch.bincount(label, minlength=8).tolist()


def test_every_centroid_is_the_mean_of_its_points_after_enough_iterations(points):
    clusters = kmeans(points, 8, noise_key=1, max_iterations=100)
    label, _ = assign_points(points, clusters.centroids)
    for j in range(8):
        assert torch.allclose(clusters.centroids[j], points[label == j].mean(0), atol=1e-4)


def test_weighted_points_equal_repeated_points(points):
    weights = torch.arange(320) % 4  # some weights are 0
    weighted = kmeans(points.double(), 8, noise_key=3, sample_weights=weights)
    repeated = kmeans(points.double().repeat_interleave(weights, 0), 8, noise_key=3)
    assert torch.allclose(weighted.centroids, repeated.centroids, atol=1e-9)
    assert torch.equal(weighted.counts, repeated.counts)
    assert weighted.inertia.item() == pytest.approx(repeated.inertia.item())


def test_nested_samples_give_nearly_the_inertia_of_all_points(features, monkeypatch):
    x = features["patches"]
    without_samples = [compute_inertia(x, kmeans(x, 16, noise_key=seed).centroids) for seed in range(3)]
    monkeypatch.setattr(kmeans_module, "MIN_SAMPLE_SIZE", 700)
    with_samples = [compute_inertia(x, kmeans(x, 16, noise_key=seed).centroids) for seed in range(3)]
    assert with_samples != without_samples  # 750, 1500, 3000, 6000 points
    # Over noise keys, inertia has a deviation of 1 % here: the sum of three may differ by 2 % without being worse.
    assert sum(with_samples) <= 1.02 * sum(without_samples)


def test_samples_follow_the_weights(points, monkeypatch):
    monkeypatch.setattr(kmeans_module, "MIN_SAMPLE_SIZE", 40)
    monkeypatch.setattr(kmeans_module, "MIN_SAMPLE_PER_CLUSTER", 1)
    weights = torch.ones(320)
    weights[40:] = 0  # only one of eight clusters has weight
    clusters = kmeans(points, 2, noise_key=1, sample_weights=weights)
    assert torch.cdist(clusters.centroids, points[:40]).min(1).values.max() < 5
    assert clusters.counts.sum() == 40


def test_point_without_weight_attracts_no_centroid(points):
    with_outlier = torch.cat([points, torch.full((1, 5), 1000.0)])
    weights = torch.ones(321)
    weights[-1] = 0
    assert kmeans(with_outlier, 8, noise_key=1, sample_weights=weights).centroids.abs().max() < 100


@pytest.mark.parametrize("width", [1, 5, 64, 512])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_fewer_distinct_points_than_clusters_give_one_centroid_per_point(width, scale):
    torch.manual_seed(width)
    distinct = scale * torch.randn(7, width)
    clusters = kmeans(distinct.repeat(30, 1), 20, noise_key=0)
    assert len(clusters.centroids) == 7
    assert torch.cdist(distinct, clusters.centroids).min(1).values.max() < 1e-4 * scale * width**0.5
    assert clusters.counts.tolist() == [30] * 7


def test_one_point_gives_one_centroid():
    clusters = kmeans(torch.tensor([[2.0, 3.0]]), 5, noise_key=0)
    assert clusters.centroids.tolist() == [[2.0, 3.0]]
    assert clusters.counts.tolist() == [1]


def test_empty_cluster_moves_to_the_point_farthest_from_its_centroid(monkeypatch):
    """The second centroid starts far from all points and would stay there."""
    points = torch.tensor([[0.0], [0.1], [0.2], [10.0], [10.1]])
    monkeypatch.setattr(kmeans_module, "_seed_centroids", lambda *_: torch.tensor([[5.0], [-100.0]]))
    clusters = kmeans(points, 2, noise_key=0)
    assert sorted(clusters.centroids.flatten().tolist()) == pytest.approx([0.1, 10.05])
    assert sorted(clusters.counts.tolist()) == [2, 3]


def test_empty_cluster_moves_to_the_point_with_the_largest_weighted_distance(monkeypatch):
    """From the centroid 5, the weighted squared distances are 5 · 25, 1 · 25 and 0.1 · 81."""
    points, weights = torch.tensor([[0.0], [10.0], [14.0]]), torch.tensor([5.0, 1.0, 0.1])
    monkeypatch.setattr(kmeans_module, "_seed_centroids", lambda *_: torch.tensor([[5.0], [-100.0]]))
    clusters = kmeans(points, 2, noise_key=0, sample_weights=weights, max_iterations=1)
    assert clusters.centroids.flatten().tolist() == pytest.approx([(10 + 1.4) / 6.1, 0.0])


def test_no_cluster_is_empty_on_real_features(features):
    assert kmeans(features["encoder"], 256, noise_key=0).counts.min() >= 1


def test_same_noise_key_gives_the_same_bits_and_another_key_gives_other_bits(features):
    x = features["patches"][:1000]
    one, again, other = (kmeans(x, 20, noise_key=k).centroids for k in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_global_random_generator_has_no_effect(points):
    torch.manual_seed(1)
    one = kmeans(points, 8, noise_key=1)
    torch.manual_seed(2)
    assert torch.equal(one.centroids, kmeans(points, 8, noise_key=1).centroids)


def test_points_stay_unchanged(points):
    before = points.clone()
    kmeans(points, 8, noise_key=1)
    assert torch.equal(points, before)


def test_smaller_blocks_change_nothing(points, monkeypatch):
    whole = kmeans(points.double(), 8, noise_key=1)
    monkeypatch.setattr(kmeans_module, "MAX_DISTANCES", 50)
    in_blocks = kmeans(points.double(), 8, noise_key=1)
    assert torch.allclose(whole.centroids, in_blocks.centroids, atol=1e-12)
    assert torch.equal(whole.counts, in_blocks.counts)


def test_memory_is_bounded_by_the_maximum_number_of_distances(features, monkeypatch):
    monkeypatch.setattr(kmeans_module, "MAX_DISTANCES", 10_000)
    sizes, addmm = [], torch.addmm
    monkeypatch.setattr(torch, "addmm", lambda *a, **k: sizes.append(addmm(*a, **k).numel()) or addmm(*a, **k))
    kmeans(features["patches"], 64, noise_key=0, max_iterations=2)
    assert sizes
    assert max(sizes) <= 10_000


def test_matrix_products_have_full_precision_whatever_the_caller_set(monkeypatch):
    precisions = []
    fit_clusters = kmeans_module._fit_clusters

    def record_precision(*args):
        precisions.append((torch.backends.cuda.matmul.allow_tf32, torch.is_autocast_enabled("cpu")))
        return fit_clusters(*args)

    monkeypatch.setattr(kmeans_module, "_fit_clusters", record_precision)
    allowed_before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        with torch.autocast("cpu", torch.bfloat16):
            kmeans(torch.randn(20, 2), 3, noise_key=0)
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed_before
    assert precisions == [(False, False)]
