import gzip

import numpy as np
import pytest
import torch
from making import as_folder, as_zip, idx, idx_files, pixels

from uefl.data.sources import read
from uefl.errors import InputError


def test_packed_unpacked_and_zipped_files_hold_the_same_images(tmp_path):
    packed = read("mnist", str(as_folder(tmp_path / "gz", idx_files())))
    plain = read("mnist", str(as_folder(tmp_path / "raw", idx_files(packed=False))))
    zipped = read("mnist", str(as_zip(tmp_path / "m.zip", {f"MNIST/raw/{k}": v for k, v in idx_files().items()})))
    for other in (plain, zipped):
        assert torch.equal(packed.x, other.x)
        assert torch.equal(packed.y, other.y)
    assert packed.x.shape == (8, 1, 4, 4)
    assert packed.y.tolist() == [0, 1, 2, 9] * 2
    assert packed.test.tolist() == [False] * 4 + [True] * 4
    assert torch.equal(packed.x[:4, 0], torch.from_numpy(pixels(0, (4, 4, 4))))


def test_letters_count_from_zero_and_stand_upright(tmp_path):
    files = {f"gzip/{k}": v for k, v in idx_files((0, 25), prefix="emnist-letters-", first=1).items()}
    folder = as_folder(tmp_path / "emnist", {})
    folder.mkdir()
    as_zip(folder / "gzip.zip", files)
    images = read("emnist-letters", str(folder))
    assert [images.classes[y] for y in images.y.tolist()] == ["a", "z"] * 2
    assert torch.equal(images.x[0, 0], torch.from_numpy(pixels(0, (2, 4, 4))[0].T.copy()))
    assert torch.equal(read("emnist-letters", str(folder / "gzip.zip")).x, images.x)


def test_letters_of_class_zero_are_outside_the_classes(tmp_path):
    files = idx_files((0, 25), prefix="emnist-letters-", first=0)
    with pytest.raises(InputError, match=r"train-labels.*label 0 of image 0 is outside the classes 1 to 26"):
        read("emnist-letters", str(as_folder(tmp_path, files)))


BROKEN = {
    "wrong magic number 89504e47": lambda _: b"\x89PNG\r\n\x1a\n" + bytes(40),
    "wrong magic number 00000801": lambda _: idx(np.zeros(3, np.uint8)),
    "wrong magic number of an empty file": lambda _: b"",
    "truncated": lambda data: gzip.compress(gzip.decompress(data)[:-1]),
    "longer than it claims": lambda data: gzip.compress(gzip.decompress(data) + b"\0"),
    "truncated or damaged": lambda data: data[:-12],
    "truncated or damaged (Err": lambda data: data[:-20] + bytes(12) + data[-8:],
    "too large": lambda _: bytes((0, 0, 8, 3)) + b"\xff" * 12,
}


@pytest.mark.parametrize("reason", BROKEN)
def test_a_broken_file_is_named_with_its_reason(tmp_path, reason):
    files = idx_files()
    files["t10k-images-idx3-ubyte.gz"] = BROKEN[reason](files["t10k-images-idx3-ubyte.gz"])
    with pytest.raises(InputError, match=r"t10k-images-idx3-ubyte\.gz: ") as e:
        read("mnist", str(as_folder(tmp_path, files)))
    assert reason.split(" (")[0] in str(e.value)


def test_a_missing_file_is_named(tmp_path):
    files = idx_files()
    del files["t10k-labels-idx1-ubyte.gz"]
    with pytest.raises(InputError, match="no file t10k-labels-idx1-ubyte"):
        read("mnist", str(as_folder(tmp_path, files)))


def test_labels_and_images_must_be_as_many(tmp_path):
    files = idx_files() | {"train-labels-idx1-ubyte.gz": gzip.compress(idx(np.zeros(3, np.uint8)))}
    with pytest.raises(InputError, match="3 labels for 4 images"):
        read("mnist", str(as_folder(tmp_path, files)))


def test_a_label_outside_the_classes_is_refused_or_skipped_and_counted(tmp_path):
    path = str(as_folder(tmp_path, idx_files((0, 1, 10, 9))))
    with pytest.raises(InputError, match="label 10 of image 2 is outside the classes 0 to 9"):
        read("mnist", path)
    images = read("mnist", path, skip_bad=True)
    assert images.skipped == 2
    assert images.y.tolist() == [0, 1, 9] * 2
    assert images.notes[-1].startswith("2 skipped, the first: ")


def test_size_stretches_the_images(tmp_path):
    path = str(as_folder(tmp_path, idx_files()))
    assert read("mnist", path, size=8).x.shape == (8, 1, 8, 8)
    with pytest.raises(InputError, match="size=0"):
        read("mnist", path, size=0)
