"""Public images: drawn by the seed, disjoint from every silo, in the shape of the silos' images."""

from dataclasses import replace

import pytest
import torch

from uefl.core.errors import InputError
from uefl.data.config import DataConfig
from uefl.data.defaults import get_default_config
from uefl.data.images import standardize_images
from uefl.data.public_images import fit_images, mark_public_images
from uefl.experiment.experiment import fingerprint_silos

SMALL = DataConfig(train_per_silo=40, test_per_silo=20, num_silos=(1, 1, 1))


def to_rows(x: torch.Tensor) -> set[bytes]:
    return {row.numpy().tobytes() for row in x}


@pytest.mark.parametrize("partitioner", ["domains", "dirichlet", "quantity", "leave-one-domain-out"])
def test_public_images_of_the_data_set_itself_are_in_no_silo(partitioner):
    config = replace(get_default_config("mnist5k", partitioner), public_images=50, public_data="mnist5k")
    config = replace(config, train_per_silo=min(config.train_per_silo, 300))
    images = config.read_images()
    is_public = mark_public_images(images, 50, 3)
    used = torch.cat([i for p in config.make_partitions(images, 3) for i in (p.train, p.validation, p.test)])
    assert int(is_public.sum()) == 50
    assert not is_public[used].any()
    public = config.load_public_images(images, 3)
    assert public is not None
    assert torch.equal(public, standardize_images(images.x[is_public], images))


def test_labels_of_silos_still_belong_to_their_images():
    config = replace(SMALL, public_images=500, public_data="mnist5k", shifts=("none",), num_silos=(3,))
    silos, images = config.load(0)
    label_of = {row.numpy().tobytes(): int(y) for row, y in zip(standardize_images(images.x, images), images.y)}
    for silo in silos:
        assert all(label_of[row.numpy().tobytes()] == int(y) for row, y in zip(silo.train.x, silo.train.y))


def test_public_images_of_another_data_set_leave_the_silos_as_they_are():
    (plain, _), (with_public, _) = (replace(SMALL, public_images=n).load(0) for n in (0, 60))
    for one, other in zip(plain, with_public):
        assert all(torch.equal(a, b) for a, b in zip((*one.train, *one.test), (*other.train, *other.test)))
        assert one.public is None
        assert other.public is with_public[0].public
        assert other.public.shape == (60, 1, 28, 28)
    assert fingerprint_silos(plain) != fingerprint_silos(with_public)


def test_public_images_have_the_size_of_the_silos_images_and_depend_on_the_seed():
    (one, *_), (other, *_) = (replace(SMALL, public_images=30, image_size=14).load(seed)[0] for seed in (0, 1))
    assert one.public.shape == (30, 1, 14, 14)
    assert len(to_rows(one.public) & to_rows(other.public)) < 10


def test_gray_images_become_color_images_and_the_reverse():
    x = torch.arange(2 * 3 * 4.0).reshape(2, 3, 2, 2)
    gray = fit_images(x, (1, 2, 2))
    assert torch.allclose(gray, x.mean(1, keepdim=True))
    assert torch.equal(fit_images(gray, (3, 2, 2)), gray.repeat(1, 3, 1, 1))
    assert fit_images(x, (3, 5, 4)).shape == (2, 3, 5, 4)


def test_test_images_of_a_source_are_never_public():
    images = SMALL.read_images()
    images = replace(images, is_test=torch.arange(len(images.y)) % 2 == 0)
    assert not (mark_public_images(images, 2000, 0) & images.is_test).any()


def test_too_many_public_images_and_an_unknown_data_set_are_errors_of_one_line():
    with pytest.raises(InputError, match="public_images=9999 must be at most 1797, the training images of digits"):
        replace(SMALL, public_images=9999).load(0)
    with pytest.raises(InputError, match="unknown data set 'nothing'"):
        replace(SMALL, public_data="nothing")
