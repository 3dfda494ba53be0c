"""Leave one domain out."""

from dataclasses import replace

import pytest
import torch
from synthetic_images import synthetic

from uefl.data import defaults
from uefl.data.cuts.held_out import allotted
from uefl.errors import InputError

ROTATED = defaults("mnist5k", "held-out")
OWN = replace(ROTATED, shifts=(), target="sketch")


def test_the_target_only_tests_and_the_sources_only_train() -> None:
    for data in (ROTATED, OWN, defaults("mnist5k", "ghifary")):
        target, *sources = data.shares(synthetic(12000, test=0.1), 0)
        assert target.owner.name.endswith("-held-out")
        assert len(target.train) == len(target.validation) == 0 < len(target.test)
        for s in sources:
            assert len(s.test) == 0
            assert s.owner.domain != target.owner.domain
            assert len(s.validation) == round(0.1 * (len(s.train) + len(s.validation)))


def test_rotated_mnist_deals_all_images_to_six_domains() -> None:
    shares = replace(ROTATED, target="rotate:45").shares(synthetic(70000, test=1 / 7), 0)
    sizes = [len(s.train) + len(s.validation) + len(s.test) for s in shares]
    assert sum(sizes) == 70000
    assert set(sizes) == {11666, 11667}
    assert shares[0].owner.shift == "rotate:45"
    assert [s.owner.domain for s in shares[1:]] == [
        f"D{d} ({a}°)" for d, a in ((1, 0), (2, 15), (3, 30), (5, 60), (6, 75))
    ]


def test_ghifary_shows_every_domain_the_same_hundred_images_a_class() -> None:
    images = synthetic(20000, test=0.2)
    target, *sources = defaults("mnist5k", "ghifary").shares(images, 0)
    assert images.y[target.test].bincount().tolist() == [100] * 10
    assert not images.test[target.test].any()
    for s in sources:
        assert torch.cat([s.train, s.validation]).sort().values.equal(target.test.sort().values)


def test_fifty_clients_are_ten_of_each_source_domain() -> None:
    shares = replace(ROTATED, silos=(50,)).shares(synthetic(70000), 0)
    assert len(shares) == 51
    assert [len(s.train) for s in shares[1:11]] == [1050] * 10
    assert {s.owner.domain for s in shares[1:11]} == {"D2 (15°)"}


def test_greedy_allotment_follows_domain_sizes() -> None:
    assert allotted([1843, 2110, 1503], 50) == [17, 19, 14]
    assert allotted([10, 10], 2) == [1, 1]
    assert allotted([100, 1], 5) == [4, 1]
    with pytest.raises(InputError, match="silo each"):
        allotted([10, 10], 1)


def test_the_remainder_goes_to_the_last_silo() -> None:
    shares = replace(OWN, silos=(7,), validation=0.0).shares(synthetic(401), 0)
    sizes = [len(s.train) for s in shares if s.owner.domain == "art"]
    assert sizes == [33, 33, 35]


@pytest.mark.parametrize(
    ("change", "says"),
    [({"target": "rotate:7"}, "rotate:15"), ({"target": ""}, "known: rotate:0"), ({"silos": (1, 1)}, "one number")],
)
def test_bad_targets_are_refused(change: dict[str, object], says: str) -> None:
    with pytest.raises(InputError, match=says):
        replace(ROTATED, **change)


def test_an_unknown_domain_of_the_source_names_the_known_ones() -> None:
    with pytest.raises(InputError, match="unknown target 'clipart'; known: art, cartoon, photo, sketch"):
        replace(OWN, target="clipart").shares(synthetic(), 0)
