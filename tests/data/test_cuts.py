"""Laws that every cut keeps: disjoint, seeded, stable."""

from dataclasses import replace
from hashlib import blake2b

import pytest
import torch
from synthetic_images import synthetic

from uefl.data import CUTS, Data, defaults
from uefl.data.share import Share

DISJOINT = sorted(set(CUTS) - {"ghifary"})  # which shows every domain the same digits
WITH_TEST = sorted(set(CUTS) - {"held-out", "ghifary"})


def small(cut: str) -> Data:
    """A cut's usual set-up, for 6000 images."""
    data = defaults("mnist5k", cut)
    return replace(data, silos=(20,)) if data.silos == (100,) else data


def owned(shares: list[Share]) -> torch.Tensor:
    return torch.cat([torch.cat([s.train, s.validation, s.test]) for s in shares])


def digest(shares: list[Share]) -> str:
    state = blake2b(digest_size=8)
    for s in shares:
        state.update(repr([s.owner, s.train.tolist(), s.validation.tolist(), s.test.tolist()]).encode())
    return state.hexdigest()


@pytest.mark.parametrize("test", [0.0, 0.2])
@pytest.mark.parametrize("cut", DISJOINT)
def test_no_image_stands_in_two_silos_or_two_parts(cut: str, test: float) -> None:
    everything = owned(small(cut).shares(synthetic(test=test), 1))
    assert len(everything.unique()) == len(everything)


@pytest.mark.parametrize("cut", CUTS)
def test_validation_never_overlaps_training_or_test(cut: str) -> None:
    for s in small(cut).shares(synthetic(test=0.2), 1):
        assert not torch.isin(s.validation, torch.cat([s.train, s.test])).any()
        if len(s.train):
            assert len(s.validation) == pytest.approx(0.1 * (len(s.train) + len(s.validation)), abs=1)


@pytest.mark.parametrize("cut", WITH_TEST)
def test_every_silo_has_all_three_parts(cut: str) -> None:
    for s in small(cut).shares(synthetic(test=0.2), 1):
        assert min(len(s.train), len(s.validation), len(s.test)) > 0


@pytest.mark.parametrize("cut", WITH_TEST)
def test_test_images_come_from_the_sources_own_split(cut: str) -> None:
    images = synthetic(test=0.2)
    for s in replace(small(cut), merge=False).shares(images, 1):
        assert images.test[s.test].all()
        assert not images.test[torch.cat([s.train, s.validation])].any()


@pytest.mark.parametrize("cut", CUTS)
def test_same_seed_same_silos_other_seed_other_silos(cut: str) -> None:
    images = synthetic(test=0.2)
    assert digest(small(cut).shares(images, 1)) == digest(small(cut).shares(images, 1))
    assert digest(small(cut).shares(images, 1)) != digest(small(cut).shares(images, 2))


@pytest.mark.parametrize("cut", CUTS)
def test_names_are_unique_and_sort_as_they_count(cut: str) -> None:
    names = [s.owner.name for s in small(cut).shares(synthetic(), 1) if len(s.train)]
    assert len(set(names)) == len(names)
    assert names == sorted(names)


GOLDEN = {  # two seeds each; a change here is a change of everybody's results
    "domains": "086f91d18d60a251-911541057e35db4e",
    "quantity": "528766f0d0b041de-eccf1e81f9b824f8",
    "dirichlet": "bba6d7feff54dc83-898218045b9cc0b3",
    "vhl": "e176172c11a8002a-a1f38c3de6f6969b",
    "fedbr": "e7ab4882eee18667-93975636af74fd02",
    "fedcr": "69c203a0e410fcdf-61126ad2f647b9d8",
    "classes": "b5f7d89c1cfbb8e8-ff1023931298ad3c",
    "held-out": "0287e8c97145acb4-845a743be2a91f65",
    "ghifary": "107b6f6e7057fd27-663eb538665e59f9",
    "given": "4948f35a3513e4b4-4b141822840c12cb",
}


@pytest.mark.parametrize("cut", CUTS)
def test_cuts_are_the_same_on_every_machine(cut: str) -> None:
    images = synthetic(test=0.2)
    assert "-".join(digest(small(cut).shares(images, seed)) for seed in (0, 23)) == GOLDEN[cut]


def test_paper_silos_are_three_of_three_domains() -> None:
    shares = Data().shares(synthetic(), 0)
    assert [s.owner.name for s in shares] == [f"D{d}-{i}" for d in (1, 2, 3) for i in (1, 2, 3)]
    assert {s.owner.domain for s in shares} == {"D1 (0°)", "D2 (-50°)", "D3 (120°)"}
    assert {(len(s.train), len(s.validation), len(s.test)) for s in shares} == {(396, 44, 110)}


def test_domains_may_be_imbalanced_and_silos_have_their_own_sizes() -> None:
    data = Data(silos=(3, 1, 1), sizes=(100, 200, 300, 400, 500), test=50)
    shares = data.shares(synthetic(), 0)
    assert [s.owner.name for s in shares] == ["D1-1", "D1-2", "D1-3", "D2-1", "D3-1"]
    assert [len(s.train) + len(s.validation) for s in shares] == [100, 200, 300, 400, 500]
    assert {len(s.test) for s in shares} == {50}


def test_a_source_may_have_domains_of_its_own() -> None:
    images = synthetic()
    assert images.domain is not None
    shares = Data(shifts=(), silos=(2, 1, 1, 1), train=100, test=20).shares(images, 0)
    assert [s.owner.name for s in shares] == ["art-1", "art-2", "cartoon-1", "photo-1", "sketch-1"]
    for s in shares:
        assert {images.domains[d] for d in images.domain[owned([s])]} == {s.owner.domain}


def test_without_sizes_all_images_are_shared_out() -> None:
    shares = Data(train=0, test=0).shares(synthetic(5400), 0)
    assert len(owned(shares)) == 5400
    assert {len(s.test) for s in shares} == {120}
    split = Data(train=0, test=0).shares(synthetic(5400, test=0.2), 0)
    assert len(owned(split)) > 5400 - 18


def test_given_silos_keep_their_own_images() -> None:
    images = synthetic(test=0.2)
    assert images.silo is not None
    shares = small("given").shares(images, 0)
    assert [s.owner.name for s in shares] == list(images.silos)
    for k, s in enumerate(shares):
        assert (images.silo[owned([s])] == k).all()
        assert len(owned([s])) == 1200


def test_quantity_skew_skews_sizes_and_not_labels() -> None:
    images = synthetic(60000)
    sizes, shares = [], replace(small("quantity"), alpha=0.5).shares(images, 3)
    for s in shares:
        mine = torch.cat([s.train, s.validation])
        sizes.append(len(mine))
        if len(mine) > 2000:
            assert torch.bincount(images.y[mine]).float().div(len(mine)).max() < 0.15
    assert max(sizes) > 5 * min(sizes)
    assert min(sizes) >= 10
    assert sum(sizes) == 48000
