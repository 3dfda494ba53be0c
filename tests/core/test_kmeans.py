"""K-means: as good as scikit-learn's, weighted, bounded in memory, and deterministic for a noise key."""

import pytest
import torch
from sklearn.cluster import KMeans

from uefl.core import kmeans as kmeans_module
from uefl.core.kmeans import Problem, assign_points, kmeans, kmeans_batch
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


def start_at_5_and_minus_100(*_):
    """Return centroids as `_seed_centroids` does: no point is near the second one."""
    return torch.tensor([[[5.0], [-100.0]]]), torch.ones(1, 2, dtype=torch.bool)


def test_empty_cluster_moves_to_the_point_farthest_from_its_centroid(monkeypatch):
    """The second centroid starts far from all points and would stay there."""
    points = torch.tensor([[0.0], [0.1], [0.2], [10.0], [10.1]])
    monkeypatch.setattr(kmeans_module, "_seed_centroids", start_at_5_and_minus_100)
    clusters = kmeans(points, 2, noise_key=0)
    assert sorted(clusters.centroids.flatten().tolist()) == pytest.approx([0.1, 10.05])
    assert sorted(clusters.counts.tolist()) == [2, 3]


def test_empty_cluster_moves_to_the_point_with_the_largest_weighted_distance(monkeypatch):
    """From the centroid 5, the weighted squared distances are 5 · 25, 1 · 25 and 0.1 · 81."""
    points, weights = torch.tensor([[0.0], [10.0], [14.0]]), torch.tensor([5.0, 1.0, 0.1])
    monkeypatch.setattr(kmeans_module, "_seed_centroids", start_at_5_and_minus_100)
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


@pytest.fixture
def problems():
    """Return problems of other sizes, weights and distinct points, some of them with samples."""
    torch.manual_seed(1)
    sizes = (30, 200, 250, 250, 850, 900, 800)
    points = [torch.randn(n, 4, dtype=torch.float64) for n in sizes]
    points[3] = points[3][:5].repeat(50, 1)  # fewer distinct points than clusters
    points[1] += 1000  # far from the padding, which is at zero
    weights = [None, None, torch.arange(250) % 3, None, None, torch.rand(900), None]
    return [Problem(p, key, w) for key, (p, w) in enumerate(zip(points, weights))]


@pytest.fixture
def small_samples(monkeypatch):
    monkeypatch.setattr(kmeans_module, "MIN_SAMPLE_SIZE", 100)
    monkeypatch.setattr(kmeans_module, "MIN_SAMPLE_PER_CLUSTER", 1)


def solve_alone(problems, k, **settings):
    return [kmeans(p.points, k, noise_key=p.noise_key, sample_weights=p.sample_weights, **settings) for p in problems]


def assert_same_clusters(batch, alone):
    for one, other in zip(batch, alone, strict=True):
        assert one.centroids.shape == other.centroids.shape
        assert torch.allclose(one.centroids, other.centroids, rtol=0, atol=1e-9)
        assert torch.equal(one.counts, other.counts)
        assert one.inertia.item() == pytest.approx(other.inertia.item(), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("k", [1, 8, 40])
@pytest.mark.usefixtures("small_samples")
def test_a_batch_gives_each_problem_the_clusters_it_has_alone(problems, k):
    batches = kmeans_module._split_problems([p.points for p in problems], 100)
    assert sorted(map(len, batches)) == [1, 3, 3]  # with one, two and four samples; the sizes differ
    assert_same_clusters(kmeans_batch(problems, k), solve_alone(problems, k))


def test_padding_with_weight_zero_changes_nothing(problems):
    padded = [Problem(torch.cat([p.points, p.points.new_zeros(60, 4)]), p.noise_key) for p in problems[:2]]
    weights = [torch.cat([torch.ones(len(p.points)), torch.zeros(60)]) for p in problems[:2]]
    padded = [p._replace(sample_weights=w) for p, w in zip(padded, weights)]
    assert_same_clusters(kmeans_batch(padded, 20), solve_alone(problems[:2], 20))


def test_a_problem_that_has_converged_stays_as_it_is_while_others_move(problems):
    """Five distinct points converge at once; the other problem needs all iterations."""
    easy, hard = problems[3], problems[4]
    (with_hard, _), (alone,) = kmeans_batch([easy, hard], 8, max_iterations=50), solve_alone([easy], 8)
    assert torch.equal(with_hard.centroids, alone.centroids)


def test_empty_clusters_of_a_batch_are_filled_problem_by_problem(monkeypatch):
    """The first problem has an empty cluster, the second none."""
    points = [torch.tensor([[0.0], [0.1], [0.2], [10.0], [10.1]]), torch.tensor([[1.0], [1.2], [-90.0]])]
    start = torch.tensor([[[5.0], [-100.0]]]).repeat(2, 1, 1), torch.ones(2, 2, dtype=torch.bool)
    monkeypatch.setattr(kmeans_module, "_seed_centroids", lambda *_: start)
    first, second = kmeans_batch([Problem(p, 0) for p in points], 2)
    assert sorted(first.centroids.flatten().tolist()) == pytest.approx([0.1, 10.05])
    assert second.centroids.flatten().tolist() == pytest.approx([1.1, -90.0])


def test_a_batch_is_split_where_memory_does_not_allow_more(problems, monkeypatch):
    sizes, fit_clusters = [], kmeans_module._fit_clusters

    def record_size(batch, *settings):
        sizes.append(len(batch) * max(p.points.numel() for p in batch))
        return fit_clusters(batch, *settings)

    monkeypatch.setattr(kmeans_module, "_fit_clusters", record_size)
    alone = solve_alone(problems, 8)
    sizes.clear()
    monkeypatch.setattr(kmeans_module, "MAX_DISTANCES", 8000)
    assert_same_clusters(kmeans_batch(problems, 8), alone)
    assert 1 < len(sizes) < len(problems)
    assert max(sizes) <= 8000


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
