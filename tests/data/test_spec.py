"""Data as a value: what it loads, what it refuses."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from synthetic_images import synthetic

from uefl.data import CUTS, Data, defaults
from uefl.data.concerns import lonely
from uefl.data.defaults import SETS
from uefl.data.spec import first_classes
from uefl.errors import InputError
from uefl.federation import Silo


def same(a: list[Silo], b: list[Silo]) -> bool:
    pairs = [
        (p, q) for s, t in zip(a, b) for p, q in zip((s.train, s.validation, s.test), (t.train, t.validation, t.test))
    ]
    return all(p.x.equal(q.x) and p.y.equal(q.y) for p, q in pairs)


def test_the_default_is_nine_silos_of_embedded_digits() -> None:
    silos, images = Data().load(0)
    assert [s.name for s in silos] == [f"D{d}-{i}" for d in (1, 2, 3) for i in (1, 2, 3)]
    assert {(len(s.train.y), len(s.validation.y), len(s.test.y)) for s in silos} == {(396, 44, 110)}
    assert silos[0].train.x.dtype == torch.float32
    assert silos[0].train.x.shape[1:] == images.x.shape[1:] == (1, 28, 28)
    assert abs(silos[0].train.x.mean()) < 0.05
    assert abs(silos[0].train.x.std() - 1) < 0.05


def test_same_seed_same_bits_other_seed_other_bits() -> None:
    images = synthetic(test=0.2)
    data = Data(shifts=("noise:20", "blur:1", "rotate:120+contrast:0.5"))
    assert same(data.divide(images, 1), data.divide(images, 1))
    assert not same(data.divide(images, 1), data.divide(images, 2))


@pytest.mark.parametrize("cut", CUTS)
def test_every_cut_fills_silos(cut: str) -> None:
    images = synthetic(12000, test=0.2)
    for silo in defaults("mnist5k", cut).divide(images, 0):
        for part in (silo.train, silo.validation, silo.test):
            assert part.x.dtype == torch.float32
            assert part.x.shape == (len(part.y), 1, 6, 6)
        assert silo.domain


def test_silos_are_shifted_by_their_domain() -> None:
    images = synthetic()
    plain, turned = (Data(shifts=(s,) * 3).divide(images, 0) for s in ("none", "rotate:90"))
    assert torch.rot90(plain[4].train.x, 1, (-2, -1)).equal(turned[4].train.x)


def test_images_are_resized_after_the_shift() -> None:
    silos = Data(size=12).divide(synthetic(), 0)
    assert silos[3].test.x.shape == (110, 1, 12, 12)
    held_out = replace(defaults("mnist5k", "held-out"), size=12).divide(synthetic(), 0)[0]
    assert held_out.test.x.shape[1:] == (1, 12, 12)


def test_only_the_first_classes_are_kept() -> None:
    images = first_classes(synthetic(test=0.2), 3)
    assert images.classes == ("0", "1", "2")
    assert images.y.unique().tolist() == [0, 1, 2]
    assert images.silo is not None
    assert len(images.x) == len(images.y) == len(images.test) == len(images.silo)
    with pytest.raises(InputError, match="only=11"):
        first_classes(images, 11)


def test_where_data_lie_is_no_part_of_a_runs_identity() -> None:
    apart = {f.name for f in fields(Data) if not f.metadata.get("identity", True)}
    assert apart == {"path", "strict"}


def test_fields_are_of_simple_types() -> None:
    for f in fields(Data):
        assert isinstance(getattr(Data(), f.name), str | int | float | bool | tuple)


def test_a_silo_of_one_class_is_a_concern_and_strict_refuses_it() -> None:
    data = Data(cut="classes", labels=1, shifts=("none",), silos=(10,), train=0, test=0)
    assert lonely(data.divide(synthetic(), 0)) == [
        "10 of 10 silos train with one class only: D1-01, D1-02, D1-03, D1-04, D1-05 and 5 more"
    ]
    assert lonely(Data().divide(synthetic(), 0)) == []
    with pytest.raises(InputError, match="one class only"):
        replace(data, strict=True).load(0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"name": "minst"}, "unknown data set 'minst'; known: mnist5k"),
        ({"cut": "slices"}, "unknown cut 'slices'; known: domains, quantity"),
        ({"shifts": ("spin:3", "rotate:0", "rotate:1")}, "unknown shift 'spin:3'; known: none, rotate"),
        ({"silos": (3, 3)}, "one entry per domain"),
        ({"silos": (3, 0, 3)}, "must be 1 or more"),
        ({"cut": "vhl", "shifts": (), "silos": (10,)}, "one entry per domain"),
        ({"sizes": (10, 20)}, "each of 9 silos"),
        ({"cut": "vhl", "sizes": (10,) * 9}, "belongs to cut=domains"),
        ({"train": -1}, "train=-1"),
        ({"validation": 1.0}, "validation=1.0"),
        ({"test_part": -0.1}, "test_part=-0.1"),
        ({"alpha": 0.0}, "alpha=0.0"),
        ({"alpha": float("nan")}, "alpha=nan"),
        ({"alpha": float("inf")}, "alpha=inf"),
        ({"labels": 0}, "labels=0"),
        ({"test_labels": "mine"}, "unknown test_labels 'mine'; known: all, own"),
        ({"target": "rotate:0"}, "needs cut=held-out"),
        ({"cut": "ghifary", "shifts": (), "silos": ()}, "every domain once"),
    ],
)
def test_bad_values_are_refused_in_one_line(change: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as error:
        replace(Data(), **change)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"train": 5000}, "these silos need 45990 images, mnist5k has 6000"),
        ({"shifts": (), "silos": (1, 1)}, "each of art, cartoon, photo, sketch"),
        ({"cut": "quantity", "silos": (3, 3, 900), "train": 0, "test": 0}, "10 images each"),
        ({"cut": "classes", "silos": (3, 3, 2000), "train": 0, "test": 0}, "no "),
        ({"cut": "given", "shifts": ("none", "hue:3")}, "one for each of anna, bert"),
    ],
)
def test_what_the_images_cannot_give_is_refused_in_one_line(change: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as error:
        replace(Data(), **change).shares(synthetic(), 0)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_sources_without_domains_or_silos_say_so() -> None:
    bare = replace(synthetic(), domain=None, domains=(), silo=None, silos=())
    with pytest.raises(InputError, match="mnist5k has none"):
        Data(shifts=(), silos=()).shares(bare, 0)
    with pytest.raises(InputError, match="names its silos"):
        defaults("mnist5k", "given").shares(bare, 0)


def test_the_papers_sizes_are_the_defaults() -> None:
    assert {name: (d.get("train"), d.get("test")) for name, d in SETS.items() if name in ("mnist", "cifar100")} == {
        "mnist": (2000, 500),
        "cifar100": (4000, 500),
    }
    assert defaults("mnist5k") == Data()
    with pytest.raises(InputError, match="unknown cut"):
        defaults("mnist5k", "slices")
