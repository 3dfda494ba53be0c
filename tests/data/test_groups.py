"""Images and rows of one group, such as a patient, stay together in every split of every partitioner."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from file_factories import make_gtsrb_files, make_png, write_folder
from synthetic_images import make_synthetic_images

from uefl.core.errors import InputError
from uefl.core.federation import Silo
from uefl.data import PARTITIONERS
from uefl.data.config import DataConfig
from uefl.data.defaults import get_default_config
from uefl.data.images import Images, select_rows
from uefl.data.partitioners.partition import Partition
from uefl.data.sources import read_images
from uefl.data.table_config import TableConfig

# The same images in every domain are the purpose of the paired partitioner.
GROUPING = [name for name in PARTITIONERS if name != "leave-one-domain-out-paired"]


def make_grouped_images(*, test_fraction: float = 0.0) -> Images:
    """Make 6000 images in groups of 1 to 12, within the silos, domains and splits of the source."""
    images = make_synthetic_images(test_fraction=test_fraction)
    assert images.silo_ids is not None
    ends = torch.tensor([20, 100, 240] * 20).cumsum(0)
    number = torch.bucketize(torch.arange(6000), ends, right=True)
    owner = torch.arange(6000) % 20 * 2 + images.is_test.long()  # 4 domains, 5 silos, 2 splits
    return replace(images, group_ids=number * 100 + owner)


def make_config(partitioner: str, **fields: object) -> DataConfig:
    defaults = get_default_config("mnist5k", partitioner)
    return replace(defaults, train_per_silo=0, test_per_silo=0, **fields)  # type: ignore[arg-type]


def list_places(partitions: list[Partition], images: Images) -> dict[int, set[tuple[str, str]]]:
    """Return for every group the silos and splits that have one of its images."""
    assert images.group_ids is not None
    places: dict[int, set[tuple[str, str]]] = {}
    for partition in partitions:
        for split in ("train", "validation", "test"):
            for group in images.group_ids[getattr(partition, split)].tolist():
                places.setdefault(group, set()).add((partition.silo.name, split))
    return places


def test_silos_carry_the_groups_of_their_training_examples() -> None:
    images = make_grouped_images()
    config = make_config("domains")
    partitions, silos = config.make_partitions(images, 0), config.make_silos(images, 0)
    assert images.group_ids is not None
    for partition, silo in zip(partitions, silos, strict=True):
        assert silo.train_groups is not None
        assert torch.equal(silo.train_groups, images.group_ids[partition.train])
    assert make_config("domains").make_silos(replace(images, group_ids=None), 0)[0].train_groups is None


@pytest.mark.parametrize("test_fraction", [0.0, 0.25])
@pytest.mark.parametrize("partitioner", GROUPING)
def test_no_group_is_divided(partitioner: str, test_fraction: float) -> None:
    images = make_grouped_images(test_fraction=test_fraction)
    config = make_config(partitioner)
    partitions = config.make_partitions(images, 0)
    places = list_places(partitions, images)
    assert all(len(found) == 1 for found in places.values())
    indices = torch.cat([torch.cat(list(partition[1:])) for partition in partitions])
    assert len(set(indices.tolist())) == len(indices)
    assert len(indices) > 0.8 * len(images.y)
    without = replace(images, group_ids=None)
    divided = list_places(config.make_partitions(without, 0), images)
    assert any(len(found) > 1 for found in divided.values())  # without groups they are divided


def write_shared_patients(folder: Path) -> str:
    """Write a table of 40 patients with two visits to each of two of three sites."""
    path = folder / "visits.csv"
    visits = [(p, "abc"[(p + k) % 3]) for p in range(40) for k in range(2) for _ in range(2)]
    path.write_text(
        "patient,site,age,ill\n" + "".join(f"{p},{s},{i % 17},{i % 2}\n" for i, (p, s) in enumerate(visits))
    )
    return str(path)


@pytest.mark.parametrize("rows_per_site", [1, 2])
def test_a_group_of_several_silos_is_in_the_same_split_of_all(tmp_path: Path, rows_per_site: int) -> None:
    config = replace(
        get_default_config("table", "natural"), path=write_shared_patients(tmp_path), group="patient",
        table=TableConfig(label="ill", silo="site"),
    )  # fmt: skip
    images = config.read_images()
    images = images if rows_per_site == 2 else select_rows(images, torch.arange(len(images.y)) % 2 == 0)
    for seed in range(5):
        partitions = config.make_partitions(images, seed)
        places = list_places(partitions, images)
        assert len(places) == 40
        assert all(len({silo for silo, _ in found}) == 2 for found in places.values())
        assert all(len({split for _, split in found}) == 1 for found in places.values())
        assert {split for found in places.values() for _, split in found} == {"train", "validation", "test"}
        indices = torch.cat([torch.cat(list(partition[1:])) for partition in partitions])
        assert indices.sort().values.tolist() == list(range(len(images.y)))


def test_a_drawn_split_follows_the_split_of_the_source_in_another_silo(tmp_path: Path) -> None:
    config = replace(
        get_default_config("table", "natural"), path=write_shared_patients(tmp_path), group="patient",
        table=TableConfig(label="ill", silo="site"),
    )  # fmt: skip
    images = config.read_images()
    assert images.silo_ids is not None
    assert images.group_ids is not None
    images = replace(images, is_test=(images.silo_ids == 2) & (images.group_ids % 4 == 0))  # a and b have no test split
    last = config.make_partitions(images, 0)[2]
    assert not images.is_test[torch.cat([last.train, last.validation])].any()
    assert images.is_test[last.test].all()


def test_leave_one_out_does_not_train_with_groups_of_the_target(tmp_path: Path) -> None:
    config = replace(
        get_default_config("table", "leave-one-domain-out"), path=write_shared_patients(tmp_path), group="patient",
        table=TableConfig(label="ill", silo="site"), shifts=(), target="b",
    )  # fmt: skip
    images = config.read_images()
    target, *others = config.make_partitions(images, 0)
    assert images.group_ids is not None
    own = set(images.group_ids[torch.cat([target.validation, target.test])].tolist())
    trained = set(images.group_ids[torch.cat([torch.cat([p.train, p.validation]) for p in others])].tolist())
    assert len(own) == 27
    assert trained == set(range(40)) - own
    assert "54 examples of groups that occur in b are not trained with" in config.load(0)[1].warnings


def test_groups_of_one_image_change_nothing() -> None:
    images = make_synthetic_images()
    single = replace(images, group_ids=torch.arange(6000).flip(0))
    for partitioner in GROUPING:
        config = make_config(partitioner)
        for a, b in zip(config.make_partitions(images, 3), config.make_partitions(single, 3), strict=True):
            assert a.silo == b.silo
            assert all(torch.equal(x, y) for x, y in zip(a[1:], b[1:]))


def test_sizes_of_the_settings_become_numbers_of_groups_by_the_mean_size() -> None:
    images = make_grouped_images()
    assert images.group_ids is not None
    mean_size = 6000 / len(images.group_ids.unique())
    for partition in DataConfig(train_per_silo=300, test_per_silo=100).make_partitions(images, 0):
        train = torch.cat([partition.train, partition.validation])
        assert len(images.group_ids[train].unique()) == int(300 / mean_size)
        assert len(images.group_ids[partition.test].unique()) == int(100 / mean_size)


def test_a_pattern_groups_the_images_of_a_folder(tmp_path: Path) -> None:
    files = {
        f"{silo}/{label}/patient{p}_{i}.png": make_png(hash((silo, label, p, i)) % 999)
        for silo in ("north", "south")
        for label in ("ill", "well")
        for p in range(6)
        for i in range(4)
    }
    path = str(write_folder(tmp_path / "photos", files))
    images = read_images("folder", path, group=r"^[^/]+/.*patient\d+")
    assert images.group_ids is not None
    assert len(images.group_ids.unique()) == 24
    assert read_images("folder", path).group_ids is None  # not from the cache of the grouped images
    with pytest.raises(InputError, match=r"group=scanner\\d matches no part of this path"):
        read_images("folder", path, group=r"scanner\d")
    with pytest.raises(InputError, match=r"group=\( is not a pattern"):
        read_images("folder", path, group="(")
    silos, loaded = replace(get_default_config("folder"), path=path, group=r"^[^/]+/.*patient\d+").load(0)
    assert loaded.group_ids is not None
    assert [len(silo.test.y) % 4 for silo in silos] == [0, 0]


def test_a_column_groups_the_images_of_a_manifest(tmp_path: Path) -> None:
    write_folder(tmp_path, {f"{i}.png": make_png(i) for i in range(6)})
    manifest = tmp_path / "list.csv"
    manifest.write_text("path,label,silo,patient\n" + "".join(f"{i}.png,{i % 2},s,p{i // 3}\n" for i in range(6)))
    images = read_images("folder", str(manifest), group="patient")
    assert images.group_ids is not None
    assert images.group_ids.tolist() == [0, 0, 0, 1, 1, 1]
    with pytest.raises(InputError, match="no column 'person', which group names; it has path, label, silo, patient"):
        read_images("folder", str(manifest), group="person")
    manifest.write_text(manifest.read_text().replace("p1", ""))
    with pytest.raises(InputError, match="row 5: 'patient' is empty"):
        read_images("folder", str(manifest), group="patient")


def test_a_column_groups_the_rows_of_a_table_and_is_no_input(tmp_path: Path) -> None:
    path = tmp_path / "visits.csv"
    path.write_text("patient,age,ill\n" + "".join(f"{i // 4},{i % 17},{i % 2}\n" for i in range(80)))
    config = replace(
        get_default_config("table", "dirichlet"), path=str(path), group="patient", table=TableConfig(label="ill"),
        num_silos=(2,), alpha=100.0,
    )  # fmt: skip
    images = config.read_images()
    assert images.table is not None
    assert [column.name for column in images.table.columns] == ["age"]
    places = list_places(config.make_partitions(images, 0), images)
    assert len(places) == 20
    assert all(len(found) == 1 for found in places.values())


def test_silos_from_tensors_keep_groups_together() -> None:
    x, groups = torch.arange(300.0)[:, None], torch.arange(300) % 40
    silo = Silo.from_tensors("clinic", x, torch.arange(300) % 2, groups=groups)
    found = [set((examples.x[:, 0].long() % 40).tolist()) for examples in (silo.train, silo.validation, silo.test)]
    assert sorted(map(len, found)) == [3, 8, 29]
    assert len(set.union(*found)) == 40


def test_gtsrb_keeps_tracks_together_by_default(tmp_path: Path) -> None:
    assert get_default_config("gtsrb").group == "track"
    path = str(write_folder(tmp_path / "official", make_gtsrb_files()))
    images = read_images("gtsrb", path, group="track")
    assert images.group_ids is not None
    names = sorted(p for p in make_gtsrb_files() if p.endswith(".ppm"))
    tracks = {name.rpartition("_")[0] for name in names if "Training" in name}
    assert len(images.group_ids[~images.is_test].unique()) == len(tracks)
    assert len(images.group_ids[images.is_test].unique()) == int(images.is_test.sum())
    files = {
        f"{s}/{c:02d}/{i:05d}.png": make_png(c + 9 * i + len(s))
        for s in ("train", "test")
        for c in (0, 1)
        for i in (0, 1)
    }
    assert read_images("gtsrb", str(write_folder(tmp_path / "plain", files)), group="track").group_ids is None


def test_groups_that_the_source_itself_separates_are_counted(tmp_path: Path) -> None:
    write_folder(tmp_path, {f"{i}.png": make_png(i) for i in range(8)})
    manifest = tmp_path / "list.csv"
    rows = [f"{i}.png,{i % 2},{'ns'[i // 4]},{'test' if i % 4 == 3 else 'train'},p{i % 3}" for i in range(8)]
    manifest.write_text("\n".join(["path,label,silo,split,patient", *rows]) + "\n")
    images = read_images("folder", str(manifest), group="patient")
    assert images.warnings == (
        "2 groups occur in the training and the test split of the source",
        "3 groups occur in more than one silo of the source",
    )
