"""Properties of every partitioner: disjoint, seeded, stable."""

from dataclasses import replace
from hashlib import blake2b

import pytest
import torch
from synthetic_images import make_synthetic_images

from uefl.core.errors import InputError
from uefl.data import PARTITIONERS
from uefl.data.config import DataConfig
from uefl.data.defaults import get_default_config
from uefl.data.partitioners.partition import Partition

DISJOINT = sorted(set(PARTITIONERS) - {"leave-one-domain-out-paired"})  # which uses the same images in every domain
WITH_TEST = sorted(set(DISJOINT) - {"leave-one-domain-out"})


def make_small_config(partitioner: str) -> DataConfig:
    """Return the default settings of a partitioner, reduced to 6000 images."""
    config = get_default_config("mnist5k", partitioner)
    return replace(config, num_silos=(20,)) if config.num_silos == (100,) else config


def collect_indices(partitions: list[Partition]) -> torch.Tensor:
    return torch.cat([torch.cat([p.train, p.validation, p.test]) for p in partitions])


def compute_digest(partitions: list[Partition]) -> str:
    digest = blake2b(digest_size=8)
    for p in partitions:
        digest.update(repr([tuple(p.silo), p.train.tolist(), p.validation.tolist(), p.test.tolist()]).encode())
    return digest.hexdigest()


@pytest.mark.parametrize("test_fraction", [0.0, 0.2])
@pytest.mark.parametrize("partitioner", DISJOINT)
def test_no_image_is_in_two_silos_or_two_splits(partitioner: str, test_fraction: float) -> None:
    indices = collect_indices(
        make_small_config(partitioner).make_partitions(make_synthetic_images(test_fraction=test_fraction), 1)
    )
    assert len(indices.unique()) == len(indices)


@pytest.mark.parametrize("partitioner", PARTITIONERS)
def test_validation_never_overlaps_training_or_test(partitioner: str) -> None:
    for p in make_small_config(partitioner).make_partitions(make_synthetic_images(test_fraction=0.2), 1):
        assert not torch.isin(p.validation, torch.cat([p.train, p.test])).any()
        if len(p.train):
            assert len(p.validation) == pytest.approx(0.1 * (len(p.train) + len(p.validation)), abs=1)


@pytest.mark.parametrize("partitioner", WITH_TEST)
def test_every_silo_has_all_three_splits(partitioner: str) -> None:
    for p in make_small_config(partitioner).make_partitions(make_synthetic_images(test_fraction=0.2), 1):
        assert min(len(p.train), len(p.validation), len(p.test)) > 0


@pytest.mark.parametrize("partitioner", WITH_TEST)
def test_test_images_come_from_the_test_split_of_the_source(partitioner: str) -> None:
    images = make_synthetic_images(test_fraction=0.2)
    for p in replace(make_small_config(partitioner), pool_splits=False).make_partitions(images, 1):
        assert images.is_test[p.test].all()
        assert not images.is_test[torch.cat([p.train, p.validation])].any()


@pytest.mark.parametrize("partitioner", PARTITIONERS)
def test_seed_determines_the_silos(partitioner: str) -> None:
    images = make_synthetic_images(test_fraction=0.2)
    assert compute_digest(make_small_config(partitioner).make_partitions(images, 1)) == compute_digest(
        make_small_config(partitioner).make_partitions(images, 1)
    )
    assert compute_digest(make_small_config(partitioner).make_partitions(images, 1)) != compute_digest(
        make_small_config(partitioner).make_partitions(images, 2)
    )


@pytest.mark.parametrize("partitioner", PARTITIONERS)
def test_silo_names_are_unique_and_sorted(partitioner: str) -> None:
    names = [
        p.silo.name for p in make_small_config(partitioner).make_partitions(make_synthetic_images(), 1) if len(p.train)
    ]
    assert len(set(names)) == len(names)
    assert names == sorted(names)


GOLDEN = {  # two seeds each; a change here changes all results
    "domains": "522e8d07c62daa62-b181fe59e86d7b40",
    "quantity": "f44d3edccaae4e35-bbb4ce9fb2c37292",
    "dirichlet": "954bd21993f4eafc-6e1d436856928fff",
    "dirichlet-vhl": "bf7d5c7ff804f5d7-aa2e838cece04273",
    "dirichlet-fedbr": "c105f7614f54e262-1ddf0b15f46cf4f3",
    "dirichlet-fedcr": "78a2ebc04f914d0a-f61fd182d9475632",
    "pathological": "4d87e0e4931f1f20-410a64fdae15d906",
    "leave-one-domain-out": "f1ed33e80ef1bbd5-1b3ad60131f60c4f",
    "leave-one-domain-out-paired": "08535edf9ae8afe5-b44f2cfbe05ec14c",
    "natural": "87c72c808ee57bc5-e257191d0690eaa6",
}


@pytest.mark.parametrize("partitioner", PARTITIONERS)
def test_partitions_are_the_same_on_every_machine(partitioner: str) -> None:
    images = make_synthetic_images(test_fraction=0.2)
    assert (
        "-".join(compute_digest(make_small_config(partitioner).make_partitions(images, seed)) for seed in (0, 23))
        == GOLDEN[partitioner]
    )


def test_default_is_three_silos_in_each_of_three_domains() -> None:
    partitions = DataConfig().make_partitions(make_synthetic_images(), 0)
    assert [p.silo.name for p in partitions] == [f"D{d}-{i}" for d in (1, 2, 3) for i in (1, 2, 3)]
    assert {p.silo.domain for p in partitions} == {"D1 (0°)", "D2 (-50°)", "D3 (120°)"}
    assert {(len(p.train), len(p.validation), len(p.test)) for p in partitions} == {(396, 44, 110)}


def test_domains_and_silos_may_differ_in_size() -> None:
    config = DataConfig(num_silos=(3, 1, 1), train_sizes=(100, 200, 300, 400, 500), test_per_silo=50)
    partitions = config.make_partitions(make_synthetic_images(), 0)
    assert [p.silo.name for p in partitions] == ["D1-1", "D1-2", "D1-3", "D2-1", "D3-1"]
    assert [len(p.train) + len(p.validation) for p in partitions] == [100, 200, 300, 400, 500]
    assert {len(p.test) for p in partitions} == {50}


def test_natural_domains_of_the_source_are_used() -> None:
    images = make_synthetic_images()
    assert images.domain_ids is not None
    partitions = DataConfig(shifts=(), num_silos=(2, 1, 1, 1), train_per_silo=100, test_per_silo=20).make_partitions(
        images, 0
    )
    assert [p.silo.name for p in partitions] == ["art-1", "art-2", "cartoon-1", "photo-1", "sketch-1"]
    for p in partitions:
        assert {images.domains[d] for d in images.domain_ids[collect_indices([p])]} == {p.silo.domain}


def test_without_sizes_all_images_are_used() -> None:
    partitions = DataConfig(train_per_silo=0, test_per_silo=0).make_partitions(make_synthetic_images(5400), 0)
    assert len(collect_indices(partitions)) == 5400
    assert {len(p.test) for p in partitions} == {120}
    with_test_split = DataConfig(train_per_silo=0, test_per_silo=0).make_partitions(
        make_synthetic_images(5400, test_fraction=0.2), 0
    )
    assert len(collect_indices(with_test_split)) > 5400 - 18


def test_natural_silos_keep_their_images() -> None:
    images = make_synthetic_images(test_fraction=0.2)
    assert images.silo_ids is not None
    partitions = make_small_config("natural").make_partitions(images, 0)
    assert [p.silo.name for p in partitions] == list(images.silos)
    for k, p in enumerate(partitions):
        assert (images.silo_ids[collect_indices([p])] == k).all()
        assert len(collect_indices([p])) == 1200


def test_folds_test_every_image_of_a_silo_once() -> None:
    images, config = make_synthetic_images(test_fraction=0.2), make_small_config("natural")
    folds = [replace(config, fold=f"{i}/5").make_partitions(images, 7) for i in range(1, 6)]
    for k, _ in enumerate(images.silos):
        tested = torch.cat([partitions[k].test for partitions in folds])
        assert len(tested) == len(tested.unique()) == 1200
        for partitions in folds:
            assert set(collect_indices(partitions[k : k + 1]).tolist()) == set(tested.tolist())
    assert not torch.equal(replace(config, fold="1/5").make_partitions(images, 8)[0].test, folds[0][0].test)


@pytest.mark.parametrize("fold", ["0/5", "6/5", "1/1", "5", "a/b", "1/-2"])
def test_an_impossible_fold_is_an_input_error(fold: str) -> None:
    with pytest.raises(InputError, match=f"fold={fold} must be a number and a count of at least 2, such as 1/5 to 5/5"):
        DataConfig(partitioner="natural", fold=fold)
    with pytest.raises(InputError, match="fold=1/5 needs partitioner=natural, not partitioner=domains"):
        DataConfig(fold="1/5")


def test_quantity_skew_changes_sizes_and_not_labels() -> None:
    images = make_synthetic_images(60000)
    sizes, partitions = [], replace(make_small_config("quantity"), alpha=0.5).make_partitions(images, 3)
    for p in partitions:
        indices = torch.cat([p.train, p.validation])
        sizes.append(len(indices))
        if len(indices) > 2000:
            assert torch.bincount(images.y[indices]).float().div(len(indices)).max() < 0.15  # of 0.1
    assert max(sizes) > 5 * min(sizes)
    assert min(sizes) >= 10
    assert sum(sizes) == 48000
