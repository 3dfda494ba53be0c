"""The calibration part: images that no engine reads, drawn without a change of anything if it is not asked for."""

from dataclasses import replace

import pytest
import torch
from harness import make_method
from synthetic_images import make_synthetic_images

from uefl.core.errors import InputError
from uefl.core.federation import SPLITS, Silo, list_parts
from uefl.data import PARTITIONERS
from uefl.data.config import DataConfig
from uefl.data.defaults import get_default_config
from uefl.data.preview import make_count_table
from uefl.engines.serial import SerialEngine
from uefl.experiment.experiment import Experiment, fingerprint_silos


def make_config(partitioner: str, fraction: float = 0.2) -> DataConfig:
    defaults = get_default_config("mnist5k", partitioner)
    return replace(defaults, train_per_silo=0, test_per_silo=0, calibration_fraction=fraction)


@pytest.mark.parametrize("partitioner", list(PARTITIONERS))
def test_every_partitioner_holds_out_a_share_and_changes_no_other_split(partitioner: str) -> None:
    images = make_synthetic_images()
    with_part, without = (make_config(partitioner, f).make_partitions(images, 3) for f in (0.2, 0.0))
    held_out = torch.cat([p.calibration for p in with_part])
    for one, other in zip(with_part, without, strict=True):
        assert torch.equal(one.validation, other.validation)
        assert torch.equal(one.test, other.test)
        assert not len(other.calibration)
        assert not torch.isin(held_out, one.train).any(), "what one silo calibrates with, no silo trains with"
        assert sorted([*one.train.tolist(), *one.calibration.tolist()]) == sorted(other.train.tolist())
        if len(other.train) > 50:
            share = len(one.calibration) / (len(other.train) + len(other.validation))
            # In the paired partitioner, silos of all domains have the same images and hold out the union.
            assert share == pytest.approx(0.2, abs=0.02) or partitioner.endswith("paired")


def test_groups_stay_together_in_all_silos() -> None:
    """Each of 500 groups has images in all five silos of the source."""
    images = make_synthetic_images()
    images = replace(images, group_ids=torch.arange(len(images.y)) // 12)
    for partition in (partitions := make_config("natural").make_partitions(images, 0)):
        assert len(partition.calibration)
    chosen = {int(g) for p in partitions for g in images.group_ids[p.calibration]}  # type: ignore[index]
    trained = {int(g) for p in partitions for g in images.group_ids[p.train]}  # type: ignore[index]
    assert not chosen & trained


def test_a_silo_that_would_not_train_is_an_error() -> None:
    images = make_synthetic_images()
    with pytest.raises(
        InputError, match=r"^silo D1-1: calibration_fraction=0\.95 leaves no training images; reduce it$"
    ):
        make_config("domains", 0.95).make_partitions(images, 0)


def test_the_default_keeps_ids_of_runs_and_hashes_of_data() -> None:
    config = DataConfig(num_silos=(1,), shifts=("none",), train_per_silo=60, test_per_silo=20)
    changed = replace(config, calibration_fraction=0.2)
    (plain,), (calibrated,) = (c.load(0)[0] for c in (config, changed))
    assert plain.calibration is None
    assert len(calibrated.calibration.y) == 12  # type: ignore[union-attr]
    assert fingerprint_silos([plain]) != fingerprint_silos([calibrated])
    assert fingerprint_silos([calibrated]) != fingerprint_silos([replace(calibrated, calibration=None)])
    ids = {Experiment(method=make_method("fedavg"), data=c).run_id("x") for c in (config, changed)}
    assert len(ids) == 2
    from uefl.experiment.settings import to_dict

    assert "calibration_fraction" not in to_dict(config, for_run_id=True)
    assert to_dict(changed, for_run_id=True)["calibration_fraction"] == 0.2


def test_no_engine_has_the_calibration_part() -> None:
    silo = Silo.from_tensors("a", torch.randn(40, 1, 8, 8), torch.arange(40) % 3, calibration_fraction=0.25)
    assert "calibration" not in SPLITS
    net = Experiment().build_network((1, 8, 8), 3)
    assert SerialEngine([silo], net).silos["a"].calibration is None


def test_silos_of_tensors_have_the_part_and_keep_groups_together() -> None:
    x, y = torch.arange(100.0)[:, None], torch.arange(100) % 2
    plain = Silo.from_tensors("a", x, y)
    silo = Silo.from_tensors("a", x, y, calibration_fraction=0.25)
    assert plain.calibration is None
    assert {name: len(part.y) for name, part in list_parts(silo).items()} == {
        "train": 52,
        "validation": 8,
        "test": 20,
        "calibration": 20,
    }
    assert torch.equal(plain.test.x, silo.test.x)
    assert torch.equal(plain.validation.x, silo.validation.x)
    assert sorted(x_ for part in list_parts(silo).values() for x_ in part.x[:, 0].tolist()) == x[:, 0].tolist()
    grouped = Silo.from_tensors("a", x, y, calibration_fraction=0.25, groups=torch.arange(100) // 5)
    owners = [{int(v) // 5 for v in part.x[:, 0]} for part in list_parts(grouped).values()]
    assert sum(map(len, owners)) == 20
    with pytest.raises(InputError, match=r"calibration_fraction"):
        Silo.from_tensors("a", x, y, calibration_fraction=1.5)


def test_the_table_of_silos_shows_the_part_only_if_there_is_one() -> None:
    config = DataConfig(num_silos=(1,), shifts=("none",), train_per_silo=60, test_per_silo=20)
    for fraction, expected in ((0.0, []), (0.2, ["calibration"])):
        silos, images = replace(config, calibration_fraction=fraction).load(0)
        headings = [str(column.header) for column in make_count_table(silos, images).columns]
        assert headings == ["silo", "domain", "train", "validation", "test", *expected, "classes"]
