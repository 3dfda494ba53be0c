"""Silos of one distribution are found by their centroids, and share new codewords with `extension_scope=alike`."""

from dataclasses import replace

import pytest
import torch
from harness import (
    CODEWORDS,
    SHORT_RUN,
    SMALL_CODEBOOK,
    have_equal_bits,
    make_clients,
    make_pattern_examples,
    run_rounds,
)

from uefl.algorithms import extensible_codebook
from uefl.algorithms.alike_silos import (
    MAX_HALF_RATIO,
    Halves,
    compute_half_ratio,
    compute_spacing_ratio,
    group_by_halves,
    group_by_spacing,
    list_unlike_silos,
)
from uefl.algorithms.centroids import WHOLE, Centroids, select_half
from uefl.algorithms.uefl import UEFL
from uefl.core.federation import Silo
from uefl.core.kmeans import kmeans


def make_piece(rows, counts):
    return Centroids(torch.tensor(rows)[None], torch.tensor(counts, dtype=torch.float64)[None])


def make_centroids(seed, center, members=1):
    """Return centroids of 400 points around a center; members of an ensemble have other draws."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(members, 400, 4, generator=generator) + torch.tensor(center)
    clusters = [kmeans(points[m], 16, noise_key=seed) for m in range(members)]
    return Centroids(torch.stack([c.centroids for c in clusters]), torch.stack([c.counts for c in clusters]))


def test_ratio_is_the_distance_between_silos_over_that_within_them():
    one, other = make_piece([[0.0], [2.0]], [3, 1]), make_piece([[0.5], [5.5]], [1, 1])
    # between: (3 · .5² + 1.5²) / 4 + (.5² + 3.5²) / 2; within: 2² + 5²
    assert compute_spacing_ratio(one, other) == pytest.approx(((3 * 0.25 + 2.25) / 4 + (0.25 + 12.25) / 2) / (4 + 25))
    assert compute_spacing_ratio(one, other) == compute_spacing_ratio(other, one)
    assert compute_spacing_ratio(make_piece([[1.0]], [4]), make_piece([[1.0]], [4])) == 0
    assert compute_spacing_ratio(make_piece([[1.0]], [4]), make_piece([[2.0]], [4])) == float("inf")


@pytest.mark.parametrize("members", [1, 2])
def test_silos_of_two_distributions_are_two_groups(members):
    centers = {"ada": [0.0] * 4, "bob": [6.0] * 4, "cyd": [0.0] * 4, "dan": [6.0] * 4, "eve": [0.0] * 4}
    centroids = {name: make_centroids(i, center, members) for i, (name, center) in enumerate(centers.items())}
    assert group_by_spacing(centroids) == [("ada", "cyd", "eve"), ("bob", "dan")]


def make_halves(seed, center, *, num_points=400, num_centroids=16, scale=1.0, members=1):
    """Return centroids of two halves of points around a center."""
    generator = torch.Generator().manual_seed(seed)
    points = scale * (torch.randn(members, num_points, 4, generator=generator) + torch.tensor(center))
    clusters = [[kmeans(p[half::2], num_centroids, noise_key=seed) for p in points] for half in (0, 1)]
    return Halves(*(Centroids(*(torch.stack([c[i] for c in of_half]) for i in (0, 1))) for of_half in clusters))


@pytest.mark.parametrize("num_centroids", [4, 16, 64])
@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_silos_of_one_distribution_are_as_close_as_halves_of_one_silo(num_centroids, scale):
    sizes = (200, 400, 1000)
    same = [
        make_halves(i, [0.0] * 4, num_points=n, num_centroids=num_centroids, scale=scale) for i, n in enumerate(sizes)
    ]
    other = make_halves(9, [1.5] * 4, num_centroids=num_centroids, scale=scale)
    ratios = [compute_half_ratio(one, two) for i, one in enumerate(same) for two in same[:i]]
    assert max(ratios) < MAX_HALF_RATIO
    assert min(ratios) > 1 / MAX_HALF_RATIO
    assert min(compute_half_ratio(one, other) for one in same) > MAX_HALF_RATIO


def test_a_small_silo_and_a_large_one_of_one_distribution_are_alike():
    """With few examples per half, a silo sends few centroids, which are far from those of a large silo."""
    small = [make_halves(i, [0.0] * 4, num_points=80, num_centroids=4) for i in range(3)]
    large = [make_halves(5 + i, [0.0] * 4, num_points=2000, num_centroids=64) for i in range(3)]
    assert sum(compute_half_ratio(one, two) for one in small for two in large) / 9 < MAX_HALF_RATIO
    other = make_halves(9, [1.5] * 4, num_points=2000, num_centroids=64)
    assert min(compute_half_ratio(one, other) for one in small) > MAX_HALF_RATIO


def test_half_ratio_is_the_distance_between_silos_over_that_between_halves():
    one = Halves(make_piece([[0.0]], [4]), make_piece([[1.0]], [4]))
    other = Halves(make_piece([[4.0]], [2]), make_piece([[6.0]], [2]))
    # between: 2 · (4² + 6² + 3² + 5²) / 4; within: 2 · (1² + 2²) / 2
    assert compute_half_ratio(one, other) == pytest.approx((2 * (16 + 36 + 9 + 25) / 4) / 5)
    assert compute_half_ratio(one, other) == compute_half_ratio(other, one)


@pytest.mark.parametrize("members", [1, 2])
def test_halves_find_the_groups_and_the_silos_that_are_alike_to_no_other(members):
    centers = {"ada": 0.0, "bob": 6.0, "cyd": 0.0, "dan": 6.0, "eve": 3.0, "fay": 0.0, "gus": 9.0}
    halves = {n: make_halves(i, [c] * 4, members=members) for i, (n, c) in enumerate(centers.items())}
    groups = group_by_halves(halves)
    assert groups == [("ada", "cyd", "fay"), ("bob", "dan"), ("eve",), ("gus",)]
    assert list_unlike_silos(groups) == ("eve", "gus")
    assert group_by_halves({}) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_silos_that_answer_from_a_gpu_are_grouped_with_fewer_centroids_of_the_larger_ones():
    sizes = {"ada": (80, 4), "bob": (2000, 64), "cyd": (2000, 64)}
    halves = {
        name: make_halves(i, [0.0] * 4, num_points=n, num_centroids=v) for i, (name, (n, v)) in enumerate(sizes.items())
    }
    on_gpu = {n: Halves(*(Centroids(*(t.cuda() for t in half)) for half in pair)) for n, pair in halves.items()}
    assert group_by_halves(on_gpu) == group_by_halves(halves) == [("ada", "bob", "cyd")]


def test_the_halves_of_a_silo_have_all_examples_and_share_none():
    owners = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])  # two features per example
    encoded = {"features": torch.arange(8.0).reshape(1, 8, 1), "owners": owners}
    halves = [select_half({**encoded, "half": torch.tensor(half)}) for half in (0, 1)]
    assert [half["owners"].tolist() for half in halves] == [[0, 0, 2, 2], [1, 1, 3, 3]]
    assert [half["features"].flatten().tolist() for half in halves] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert select_half({**encoded, "half": torch.tensor(WHOLE)})["owners"] is owners


def test_one_silo_is_a_group_and_none_are_no_group():
    assert group_by_spacing({"ada": make_centroids(0, [0.0] * 4)}) == [("ada",)]
    assert group_by_spacing({}) == []


BRIGHTNESS = {"ada": 0.0, "bob": 0.0, "cyd": 0.0, "dan": 4.0, "eve": 4.0}


def make_silos_of_two_domains():
    """Return silos with dark and with bright images; `domain` is the same for all."""
    return [
        Silo(name, *(make_pattern_examples(n, 10 * i + j, brightness) for j, n in enumerate((60, 9, 9))))
        for i, (name, brightness) in enumerate(BRIGHTNESS.items())
    ]


def extend(scope, **fields):
    """Return the server after one extension of all silos."""
    method = UEFL(**SHORT_RUN, codebook=replace(SMALL_CODEBOOK, extension_scope=scope, segments=1, **fields))
    clients = make_clients(method, make_silos_of_two_domains(), feature_norm="none")
    server, _ = run_rounds(method, clients, 2)
    return server, method.codebook.extend_codebook(method, clients, server, server.silo_names)


@pytest.mark.parametrize("new_codeword_init", ["kmeans", "gaussian"])
def test_alike_silos_share_new_codewords_and_others_do_not(new_codeword_init):
    before, after = extend("alike", new_codeword_init=new_codeword_init, num_codewords=24)
    new = after.access[:, before.access.shape[1] :]
    assert new.shape[1] == 48
    assert torch.equal(new[0], new[1])
    assert torch.equal(new[0], new[2])
    assert torch.equal(new[3], new[4])
    assert not (new[0] & new[3]).any()


@pytest.mark.parametrize(
    ("groups", "scope"),
    [([(name,) for name in BRIGHTNESS], "silo"), ([tuple(BRIGHTNESS)], "group")],
)
def test_groups_of_one_or_all_silos_are_the_other_scopes(groups, scope, monkeypatch):
    monkeypatch.setattr(extensible_codebook, "group_by_halves", lambda _: groups)
    (_, one), (_, other) = extend("alike"), extend(scope)
    assert have_equal_bits(one.model_state, other.model_state)
    assert torch.equal(one.access, other.access)
    assert len(one.model_state[CODEWORDS]) > 6
