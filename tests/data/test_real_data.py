"""Real data in their public layouts, from the folder in UEFL_DATA."""

import os
import time
from pathlib import Path

import pytest
import torch

from uefl.core.fetch import has_digest
from uefl.data import SOURCES
from uefl.data.sources import read_images

pytestmark = pytest.mark.real
FOLDER = os.environ.get("UEFL_DATA", "")
PATHS = {"mnist": "mnist", "gtsrb": "gtsrb.zip", "cifar100": "cifar100.zip", "pacs": "pacs.zip"}


def time_read(name):
    start = time.perf_counter()
    images = read_images(name)
    return images, time.perf_counter() - start


@pytest.fixture(params=PATHS)
def name(request):
    if not FOLDER or not (Path(FOLDER) / PATHS[request.param]).exists():
        pytest.skip(f"UEFL_DATA does not contain {PATHS[request.param]}")
    return request.param


def test_a_cached_read_has_the_images_of_the_first(name, capsys):
    decoded, first_seconds = time_read(name)
    cached, second_seconds = time_read(name)
    line = f"{name}: {tuple(decoded.x.shape)}, first {first_seconds:.2f} s, cached {second_seconds:.2f} s"
    with capsys.disabled():
        print(f"\n{line}, {decoded.warnings}")  # noqa: T201
    assert torch.equal(decoded.x, cached.x)
    assert decoded.num_skipped == 0


def test_standardization_constants_match_the_pixels(name):
    images = read_images(name)
    if name == "pacs":
        pytest.skip("PACS uses the constants of ImageNet")
    train = images.x[~images.is_test].float() / 255
    tolerance = 0.03 if name == "gtsrb" else 0.01  # half of GTSRB is not all of it
    assert train.mean((0, 2, 3)).tolist() == pytest.approx(images.mean, abs=tolerance)
    assert train.std((0, 2, 3)).tolist() == pytest.approx(images.std, abs=tolerance)


def test_classes_and_domains_match_the_publications(name):
    images = read_images(name)
    assert len(images.classes) == {"mnist": 10, "gtsrb": 43, "cifar100": 100, "pacs": 7}[name]
    assert images.domains == (("art_painting", "cartoon", "photo", "sketch") if name == "pacs" else ())
    assert torch.bincount(images.y, minlength=len(images.classes)).min() > 0


def test_files_have_the_published_checksums():
    digests = {Path(FOLDER) / "mnist" / file.file_name: file.digest for file in SOURCES["mnist"].remote_files}
    if not FOLDER or not all(path.exists() for path in digests):
        pytest.skip("UEFL_DATA does not contain mnist")
    assert all(has_digest(path, digest) for path, digest in digests.items())


def test_fashion_mnist_of_debian_is_found_without_settings(monkeypatch):
    if not Path(SOURCES["fmnist"].system_paths[0]).exists():
        pytest.skip("Debian's dataset-fashion-mnist is not installed")
    monkeypatch.delenv("UEFL_DATA", raising=False)
    images = read_images("fmnist")
    train = images.x[~images.is_test].float() / 255
    assert (len(images.y), int(images.is_test.sum())) == (70_000, 10_000)
    assert (train.mean().item(), train.std().item()) == pytest.approx((0.2860, 0.3530), abs=1e-3)
