"""Real data in their public layouts, from the folder that UEFL_DATA names."""

import os
import time
from pathlib import Path

import pytest
import torch

from uefl.data.addresses import ADDRESSES
from uefl.data.sources import SOURCES, read
from uefl.download import genuine

pytestmark = pytest.mark.real
FOLDER = os.environ.get("UEFL_DATA", "")
PLACES = {"mnist": "mnist", "gtsrb": "gtsrb.zip", "cifar100": "cifar100.zip", "pacs": "pacs.zip"}


def timed(name):
    start = time.perf_counter()
    images = read(name)
    return images, time.perf_counter() - start


@pytest.fixture(params=PLACES)
def name(request):
    if not FOLDER or not (Path(FOLDER) / PLACES[request.param]).exists():
        pytest.skip(f"UEFL_DATA names no folder with {PLACES[request.param]}")
    return request.param


def test_a_cold_load_takes_seconds_and_a_warm_one_none(name, capsys):
    cold, first = timed(name)
    warm, second = timed(name)
    with capsys.disabled():
        print(f"\n{name}: {tuple(cold.x.shape)}, cold {first:.2f} s, warm {second:.2f} s, {cold.warnings}")  # noqa: T201
    assert torch.equal(cold.x, warm.x)
    assert first < 10
    assert second < 1
    assert cold.skipped == 0


def test_the_constants_fit_the_pixels(name):
    images = read(name)
    if name == "pacs":
        pytest.skip("PACS takes ImageNet's constants")
    train = images.x[~images.test].float() / 255
    tolerance = 0.03 if name == "gtsrb" else 0.01  # half of GTSRB is not all of it
    assert train.mean((0, 2, 3)).tolist() == pytest.approx(images.mean, abs=tolerance)
    assert train.std((0, 2, 3)).tolist() == pytest.approx(images.std, abs=tolerance)


def test_classes_and_domains_are_those_of_the_papers(name):
    images = read(name)
    assert len(images.classes) == {"mnist": 10, "gtsrb": 43, "cifar100": 100, "pacs": 7}[name]
    assert images.domains == (("art_painting", "cartoon", "photo", "sketch") if name == "pacs" else ())
    assert torch.bincount(images.y, minlength=len(images.classes)).min() > 0


def test_the_published_checksums_are_those_of_the_files():
    found = [(a, Path(FOLDER) / "mnist" / a.file) for a in ADDRESSES["mnist"]]
    if not FOLDER or not all(file.exists() for _, file in found):
        pytest.skip("UEFL_DATA names no folder with mnist")
    assert all(genuine(file, a.digest) for a, file in found)


def test_debians_clothes_are_found_without_being_told(monkeypatch):
    if not Path(SOURCES["fmnist"].system[0]).exists():
        pytest.skip("Debian's dataset-fashion-mnist is not installed")
    monkeypatch.delenv("UEFL_DATA", raising=False)
    images = read("fmnist")
    train = images.x[~images.test].float() / 255
    assert (len(images.y), int(images.test.sum())) == (70_000, 10_000)
    assert (train.mean().item(), train.std().item()) == pytest.approx((0.2860, 0.3530), abs=1e-3)
