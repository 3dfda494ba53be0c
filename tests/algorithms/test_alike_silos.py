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
from uefl.algorithms.alike_silos import compute_ratio, group_alike_silos
from uefl.algorithms.centroids import Centroids
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
    assert compute_ratio(one, other) == pytest.approx(((3 * 0.25 + 2.25) / 4 + (0.25 + 12.25) / 2) / (4 + 25))
    assert compute_ratio(one, other) == compute_ratio(other, one)
    assert compute_ratio(make_piece([[1.0]], [4]), make_piece([[1.0]], [4])) == 0
    assert compute_ratio(make_piece([[1.0]], [4]), make_piece([[2.0]], [4])) == float("inf")


@pytest.mark.parametrize("members", [1, 2])
def test_silos_of_two_distributions_are_two_groups(members):
    centers = {"ada": [0.0] * 4, "bob": [6.0] * 4, "cyd": [0.0] * 4, "dan": [6.0] * 4, "eve": [0.0] * 4}
    centroids = {name: make_centroids(i, center, members) for i, (name, center) in enumerate(centers.items())}
    assert group_alike_silos(centroids) == [("ada", "cyd", "eve"), ("bob", "dan")]


def test_one_silo_is_a_group_and_none_are_no_group():
    assert group_alike_silos({"ada": make_centroids(0, [0.0] * 4)}) == [("ada",)]
    assert group_alike_silos({}) == []


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
    monkeypatch.setattr(extensible_codebook, "group_alike_silos", lambda _: groups)
    (_, one), (_, other) = extend("alike"), extend(scope)
    assert have_equal_bits(one.model_state, other.model_state)
    assert torch.equal(one.access, other.access)
    assert len(one.model_state[CODEWORDS]) > 6
