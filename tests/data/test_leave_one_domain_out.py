"""Leave one domain out for testing."""

from dataclasses import replace

import pytest
import torch
from harness import list_photo_names, write_photos
from synthetic_images import make_synthetic_images

from uefl.core.errors import InputError
from uefl.data.defaults import get_default_config
from uefl.data.partitioners.leave_one_domain_out import allocate_silos

ROTATED = get_default_config("mnist5k", "leave-one-domain-out")
NATURAL_DOMAINS = replace(ROTATED, shifts=(), target="sketch")


def test_target_domain_only_tests_and_other_domains_only_train() -> None:
    for config in (ROTATED, NATURAL_DOMAINS, get_default_config("mnist5k", "leave-one-domain-out-paired")):
        target, *others = config.make_partitions(make_synthetic_images(12000, test_fraction=0.1), 0)
        assert target.silo.name.endswith("-held-out")
        assert len(target.train) == 0 < len(target.test)
        assert len(target.validation) == round(0.1 * (len(target.validation) + len(target.test)))  # to choose codewords
        assert not set(target.validation.tolist()) & set(target.test.tolist())
        for p in others:
            assert len(p.test) == 0
            assert p.silo.domain != target.silo.domain
            assert len(p.validation) == round(0.1 * (len(p.train) + len(p.validation)))


def test_test_per_silo_limits_the_images_of_the_target() -> None:
    target, *_ = replace(ROTATED, test_per_silo=30).make_partitions(make_synthetic_images(1200), 0)
    assert len(target.test) == 30


def test_rotated_mnist_divides_all_images_among_six_domains() -> None:
    partitions = replace(ROTATED, target="rotate:45").make_partitions(
        make_synthetic_images(70000, test_fraction=1 / 7), 0
    )
    sizes = [len(p.train) + len(p.validation) + len(p.test) for p in partitions]
    assert sum(sizes) == 70000
    assert set(sizes) == {11666, 11667}
    assert partitions[0].silo.shift == "rotate:45"
    assert [p.silo.domain for p in partitions[1:]] == [
        f"D{d} ({a}°)" for d, a in ((1, 0), (2, 15), (3, 30), (5, 60), (6, 75))
    ]


def test_paired_domains_have_the_same_hundred_images_per_class() -> None:
    images = make_synthetic_images(20000, test_fraction=0.2)
    target, *others = get_default_config("mnist5k", "leave-one-domain-out-paired").make_partitions(images, 0)
    shown = torch.cat([target.validation, target.test])
    assert images.y[shown].bincount().tolist() == [100] * 10
    assert len(images.y[target.validation].unique()) == 10  # drawn, not the first classes
    assert not images.is_test[shown].any()
    for p in others:
        assert torch.cat([p.train, p.validation]).sort().values.equal(shown.sort().values)


def test_fifty_silos_are_ten_per_training_domain() -> None:
    partitions = replace(ROTATED, num_silos=(50,)).make_partitions(make_synthetic_images(70000), 0)
    assert len(partitions) == 51
    assert [len(p.train) for p in partitions[1:11]] == [1050] * 10
    assert {p.silo.domain for p in partitions[1:11]} == {"D2 (15°)"}


def test_silos_are_allocated_by_domain_size() -> None:
    assert allocate_silos([1843, 2110, 1503], 50) == [17, 19, 14]
    assert allocate_silos([10, 10], 2) == [1, 1]
    assert allocate_silos([100, 1], 5) == [4, 1]
    with pytest.raises(InputError, match="each domain except the target needs a silo"):
        allocate_silos([10, 10], 1)


def test_remainder_goes_to_the_last_silo() -> None:
    partitions = replace(NATURAL_DOMAINS, num_silos=(7,), validation_fraction=0.0).make_partitions(
        make_synthetic_images(401), 0
    )
    sizes = [len(p.train) for p in partitions if p.silo.domain == "art"]
    assert sizes == [33, 33, 35]


@pytest.mark.parametrize(
    ("change", "message"),
    [({"target": "rotate:7"}, "rotate:15"), ({"target": ""}, "known: rotate:0"), ({"num_silos": (1, 1)}, "one number")],
)
def test_invalid_target_is_rejected(change: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(ROTATED, **change)


def test_a_folder_with_silos_leaves_one_of_them_out(tmp_path) -> None:
    sites = ("site-a", "site-b", "site-c")
    path = write_photos(tmp_path, list_photo_names(sites, count=10))
    config = replace(get_default_config("folder", "leave-one-domain-out"), path=str(path))
    assert config.list_targets() == list(sites)
    silos, _ = replace(config, target="site-c").load(0)
    assert [(s.name, len(s.train.y), len(s.validation.y), len(s.test.y)) for s in silos] == [
        ("site-c-held-out", 0, 2, 18),
        ("site-a-1", 18, 2, 0),
        ("site-b-1", 18, 2, 0),
    ]
    with pytest.raises(InputError, match="unknown target ''; known: site-a, site-b, site-c, all"):
        config.load(0)


def test_a_source_without_silos_and_domains_leaves_none_out(tmp_path) -> None:
    path = write_photos(tmp_path, [f"{label}/{i}.png" for label in "xy" for i in range(5)])
    config = replace(get_default_config("folder", "leave-one-domain-out"), path=str(path), target="x")
    message = r"shifts=\(\) uses the domains or silos of the source, but folder names none; set shifts"
    with pytest.raises(InputError, match=message):
        config.load(0)


def test_unknown_domain_error_names_the_known_domains() -> None:
    with pytest.raises(InputError, match="unknown target 'clipart'; known: art, cartoon, photo, sketch, all"):
        replace(NATURAL_DOMAINS, target="clipart").make_partitions(make_synthetic_images(), 0)
