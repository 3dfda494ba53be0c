"""The settings of data: what they load, and what they reject."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from file_factories import make_png, write_folder
from synthetic_images import make_synthetic_images

from uefl.core.errors import InputError
from uefl.core.federation import Silo
from uefl.core.registry import Entry
from uefl.data import PARTITIONERS, SOURCES
from uefl.data.config import DataConfig
from uefl.data.defaults import get_default_config
from uefl.data.images import resize_images, select_first_classes
from uefl.data.quality import warn_single_class_silos
from uefl.data.table_config import TableConfig


def are_equal(a: list[Silo], b: list[Silo]) -> bool:
    pairs = [
        (p, q) for s, t in zip(a, b) for p, q in zip((s.train, s.validation, s.test), (t.train, t.validation, t.test))
    ]
    return all(p.x.equal(q.x) and p.y.equal(q.y) for p, q in pairs)


def test_default_is_nine_silos_of_embedded_digits() -> None:
    silos, images = DataConfig().load(0)
    assert [s.name for s in silos] == [f"D{d}-{i}" for d in (1, 2, 3) for i in (1, 2, 3)]
    assert {(len(s.train.y), len(s.validation.y), len(s.test.y)) for s in silos} == {(396, 44, 110)}
    assert silos[0].train.x.dtype == torch.float32
    assert silos[0].train.x.shape[1:] == images.x.shape[1:] == (1, 28, 28)
    # The constants are those of all 60,000 images; a sample of 396 has them nearly.
    assert abs(silos[0].train.x.mean()) < 0.05
    assert abs(silos[0].train.x.std() - 1) < 0.05


def test_seed_determines_the_examples() -> None:
    images = make_synthetic_images(test_fraction=0.2)
    config = DataConfig(shifts=("noise:20", "blur:1", "rotate:120+contrast:0.5"))
    assert are_equal(config.make_silos(images, 1), config.make_silos(images, 1))
    assert not are_equal(config.make_silos(images, 1), config.make_silos(images, 2))


@pytest.mark.parametrize("partitioner", PARTITIONERS)
def test_every_partitioner_gives_silos_with_examples(partitioner: str) -> None:
    images = make_synthetic_images(12000, test_fraction=0.2)
    for silo in get_default_config("mnist5k", partitioner).make_silos(images, 0):
        for examples in (silo.train, silo.validation, silo.test):
            assert examples.x.dtype == torch.float32
            assert examples.x.shape == (len(examples.y), 1, 6, 6)
        assert silo.domain


def test_silos_are_shifted_by_their_domain() -> None:
    images = make_synthetic_images()
    original, rotated = (DataConfig(shifts=(s,) * 3).make_silos(images, 0) for s in ("none", "rotate:90"))
    assert torch.rot90(original[4].train.x, 1, (-2, -1)).equal(rotated[4].train.x)


def test_images_are_resized_after_the_shift() -> None:
    silos = DataConfig(image_size=12).make_silos(make_synthetic_images(), 0)
    assert silos[3].test.x.shape == (110, 1, 12, 12)
    config = replace(get_default_config("mnist5k", "leave-one-domain-out"), image_size=12)
    target = config.make_silos(make_synthetic_images(), 0)[0]
    assert target.test.x.shape[1:] == (1, 12, 12)


def test_num_classes_selects_the_first_classes() -> None:
    images = select_first_classes(make_synthetic_images(test_fraction=0.2), 3)
    assert images.classes == ("0", "1", "2")
    assert images.y.unique().tolist() == [0, 1, 2]
    assert images.silo_ids is not None
    assert len(images.x) == len(images.y) == len(images.is_test) == len(images.silo_ids)
    with pytest.raises(InputError, match="num_classes=11"):
        select_first_classes(images, 11)


def test_path_lazy_and_strict_are_not_part_of_the_run_id() -> None:
    excluded = {f.name for f in fields(DataConfig) if not f.metadata["in_run_id"]}
    assert excluded == {"path", "lazy", "strict"}


def test_settings_have_simple_types_and_help_texts() -> None:
    for settings in (DataConfig(), TableConfig()):
        for f in fields(settings):
            assert f.metadata["help"].endswith(".")
            assert isinstance(getattr(settings, f.name), str | int | float | bool | tuple | TableConfig)


def test_single_class_silos_are_a_warning_that_strict_rejects() -> None:
    config = DataConfig(
        partitioner="pathological",
        classes_per_silo=1,
        shifts=("none",),
        num_silos=(10,),
        train_per_silo=0,
        test_per_silo=0,
    )
    assert warn_single_class_silos(config.make_silos(make_synthetic_images(), 0)) == [
        "10 of 10 silos have training examples of only one class: D1-01, D1-02, D1-03, D1-04, D1-05 and 5 more"
    ]
    assert warn_single_class_silos(DataConfig().make_silos(make_synthetic_images(), 0)) == []
    with pytest.raises(InputError, match="only one class"):
        replace(config, strict=True).load(0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "minst"}, "unknown data set 'minst'; known: mnist5k"),
        ({"partitioner": "slices"}, "unknown partitioner 'slices'; known: domains, quantity"),
        ({"shifts": ("spin:3", "rotate:0", "rotate:1")}, "unknown shift 'spin:3'; known: none, rotate"),
        ({"num_silos": (3, 3)}, "one entry per domain"),
        ({"num_silos": (3, 0, 3)}, "num_silos=(3, 0, 3) must be at least 1"),
        ({"partitioner": "dirichlet-vhl", "shifts": (), "num_silos": (10,)}, "one entry per domain"),
        ({"train_sizes": (10, 20)}, "one entry per silo: 9"),
        ({"partitioner": "dirichlet-vhl", "train_sizes": (10,) * 9}, "needs partitioner=domains"),
        ({"train_per_silo": -1}, "train_per_silo=-1 must be at least 0"),
        ({"validation_fraction": 1.0}, "validation_fraction=1.0 must be at least 0 and less than 1"),
        ({"test_fraction": -0.1}, "test_fraction=-0.1"),
        ({"alpha": 0.0}, "alpha=0.0"),
        ({"alpha": float("nan")}, "alpha=nan"),
        ({"alpha": float("inf")}, "alpha=inf"),
        ({"classes_per_silo": 0}, "classes_per_silo=0"),
        ({"test_label_distribution": "own"}, "unknown test_label_distribution 'own'; known: global, silo"),
        ({"target": "rotate:0"}, "needs partitioner=leave-one-domain-out"),
        ({"partitioner": "leave-one-domain-out-paired", "shifts": (), "num_silos": ()}, "every domain once"),
    ],
)
def test_invalid_settings_are_rejected_in_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        replace(DataConfig(), **change)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_per_silo": 5000}, "the silos need 45990 images, but mnist5k has 6000"),
        ({"shifts": (), "num_silos": (1, 1)}, "each of art, cartoon, photo, sketch"),
        (
            {"partitioner": "quantity", "num_silos": (3, 3, 900), "train_per_silo": 0, "test_per_silo": 0},
            "10 images each",
        ),
        (
            {"partitioner": "pathological", "num_silos": (3, 3, 2000), "train_per_silo": 0, "test_per_silo": 0},
            "images; reduce num_silos or use more images",
        ),
        ({"partitioner": "natural", "shifts": ("none", "hue:3")}, "one for each of anna, bert"),
    ],
)
def test_settings_that_the_images_do_not_allow_are_rejected_in_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        replace(DataConfig(), **change).make_partitions(make_synthetic_images(), 0)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_natural_partition_needs_domains_or_silos_in_the_source() -> None:
    images = replace(make_synthetic_images(), domain_ids=None, domains=(), silo_ids=None, silos=())
    with pytest.raises(InputError, match="mnist5k names none"):
        DataConfig(shifts=(), num_silos=()).make_partitions(images, 0)
    with pytest.raises(InputError, match="names its silos"):
        get_default_config("mnist5k", "natural").make_partitions(images, 0)


def test_default_sizes_are_those_of_the_paper() -> None:
    for name, train_per_silo in (("mnist", 2000), ("cifar100", 4000)):
        config = get_default_config(name)
        assert (config.train_per_silo, config.test_per_silo) == (train_per_silo, 500)
    assert get_default_config("mnist5k") == DataConfig()
    with pytest.raises(InputError, match="unknown partitioner"):
        get_default_config("mnist5k", "slices")


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("partitioner", ["", *PARTITIONERS])
def test_every_data_set_and_partitioner_has_default_settings(name: str, partitioner: str) -> None:
    config = get_default_config(name, partitioner)
    natural = dict.fromkeys(("folder", "tensors", "table", "heart"), "natural")
    expected = {**natural, "pacs": "leave-one-domain-out"}.get(name, "domains")
    assert (config.name, config.partitioner) == (name, partitioner or expected)


def test_natural_domains_hold_out_the_default_target() -> None:
    config = get_default_config("pacs")
    assert (config.shifts, config.num_silos, config.target) == ((), (), "sketch")
    assert get_default_config("pacs", "domains").target == ""


def test_image_size_resizes_images_of_different_sizes_for_any_source_that_declares_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {f"a/{split}/{c}/{i}.png": make_png(n + 4 * i, (8 + i, 9, 3)) for n, (split, c) in enumerate(
        (split, c) for split in ("train", "test") for c in ("x", "y")) for i in range(3)}  # fmt: skip
    monkeypatch.setitem(SOURCES._entries, "scans", Entry("uefl.data.readers.image_folder:FOLDER", "from a plugin"))
    config = replace(get_default_config("scans"), path=str(write_folder(tmp_path, files)), image_size=6)
    silos, images = config.load(0)
    assert images.x.shape[1:] == silos[0].train.x.shape[1:] == (3, 6, 6)
    with pytest.raises(InputError, match="set image_size to resize all images"):
        replace(config, image_size=0).load(0)


def test_images_of_one_size_are_resized_after_the_shift() -> None:
    config = DataConfig(image_size=14)
    assert config.read_images().x.shape[-1] == 28
    assert config.load(0)[0][0].train.x.shape[1:] == (1, 14, 14)


def test_resizing_does_not_depend_on_the_other_images(monkeypatch: pytest.MonkeyPatch) -> None:
    x = make_synthetic_images(50).x
    together = resize_images(x, 4)
    monkeypatch.setattr("uefl.data.images._IMAGES_PER_BLOCK", 7)
    assert resize_images(x, 4).equal(together)
    assert torch.cat([resize_images(image[None], 4) for image in x]).equal(together)
