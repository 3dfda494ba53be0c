import gzip

import numpy as np
import pytest
import torch
from file_factories import encode_idx, make_idx_files, make_pixels, write_folder, write_zip

from uefl.core.errors import InputError
from uefl.data.sources import read_images


def test_compressed_uncompressed_and_zipped_files_give_the_same_images(tmp_path):
    compressed = read_images("mnist", str(write_folder(tmp_path / "gz", make_idx_files())))
    uncompressed = read_images("mnist", str(write_folder(tmp_path / "raw", make_idx_files(compressed=False))))
    zipped = read_images(
        "mnist", str(write_zip(tmp_path / "m.zip", {f"MNIST/raw/{k}": v for k, v in make_idx_files().items()}))
    )
    for other in (uncompressed, zipped):
        assert torch.equal(compressed.x, other.x)
        assert torch.equal(compressed.y, other.y)
    assert compressed.x.shape == (8, 1, 4, 4)
    assert compressed.y.tolist() == [0, 1, 2, 9] * 2
    assert compressed.is_test.tolist() == [False] * 4 + [True] * 4
    assert torch.equal(compressed.x[:4, 0], torch.from_numpy(make_pixels(0, (4, 4, 4))))


def test_letters_start_at_zero_and_are_upright(tmp_path):
    files = {f"gzip/{k}": v for k, v in make_idx_files((0, 25), prefix="emnist-letters-", first_label=1).items()}
    folder = write_folder(tmp_path / "emnist", {})
    folder.mkdir()
    write_zip(folder / "gzip.zip", files)
    images = read_images("emnist-letters", str(folder))
    assert [images.classes[y] for y in images.y.tolist()] == ["a", "z"] * 2
    assert torch.equal(images.x[0, 0], torch.from_numpy(make_pixels(0, (2, 4, 4))[0].T.copy()))
    assert torch.equal(read_images("emnist-letters", str(folder / "gzip.zip")).x, images.x)


def test_letter_label_zero_is_rejected(tmp_path):
    files = make_idx_files((0, 25), prefix="emnist-letters-", first_label=0)
    with pytest.raises(InputError, match=r"train-labels.*label 0 of image 0 must be 1 to 26"):
        read_images("emnist-letters", str(write_folder(tmp_path, files)))


DAMAGED_FILES = {
    "not an IDX file, its magic number is 89504e47": lambda _: b"\x89PNG\r\n\x1a\n" + bytes(40),
    "not an IDX file, its magic number is 00000801": lambda _: encode_idx(np.zeros(3, np.uint8)),
    "not an IDX file, its magic number is missing": lambda _: b"",
    "truncated": lambda data: gzip.compress(gzip.decompress(data)[:-1]),
    "longer than its header declares": lambda data: gzip.compress(gzip.decompress(data) + b"\0"),
    "truncated or damaged": lambda data: data[:-12],
    "truncated or damaged (Err": lambda data: data[:-20] + bytes(12) + data[-8:],
    "the header declares": lambda _: bytes((0, 0, 8, 3)) + b"\xff" * 12,
}


@pytest.mark.parametrize("reason", DAMAGED_FILES)
def test_error_names_the_damaged_file_and_the_reason(tmp_path, reason):
    files = make_idx_files()
    files["t10k-images-idx3-ubyte.gz"] = DAMAGED_FILES[reason](files["t10k-images-idx3-ubyte.gz"])
    with pytest.raises(InputError, match=r"t10k-images-idx3-ubyte\.gz: ") as e:
        read_images("mnist", str(write_folder(tmp_path, files)))
    assert reason.split(" (")[0] in str(e.value)


def test_error_names_the_missing_file(tmp_path):
    files = make_idx_files()
    del files["t10k-labels-idx1-ubyte.gz"]
    with pytest.raises(InputError, match="no file t10k-labels-idx1-ubyte"):
        read_images("mnist", str(write_folder(tmp_path, files)))


def test_numbers_of_labels_and_images_must_agree(tmp_path):
    files = make_idx_files() | {"train-labels-idx1-ubyte.gz": gzip.compress(encode_idx(np.zeros(3, np.uint8)))}
    with pytest.raises(InputError, match="3 labels for 4 images"):
        read_images("mnist", str(write_folder(tmp_path, files)))


def test_invalid_label_is_rejected_or_skipped_and_counted(tmp_path):
    path = str(write_folder(tmp_path, make_idx_files((0, 1, 10, 9))))
    with pytest.raises(InputError, match="label 10 of image 2 must be 0 to 9"):
        read_images("mnist", path)
    images = read_images("mnist", path, skip_bad=True)
    assert images.num_skipped == 2
    assert images.y.tolist() == [0, 1, 9] * 2
    assert images.notes[-1].startswith("2 skipped, the first: ")


def test_image_size_resizes_the_images(tmp_path):
    path = str(write_folder(tmp_path, make_idx_files()))
    assert read_images("mnist", path, image_size=8).x.shape == (8, 1, 8, 8)
    with pytest.raises(InputError, match="image_size=0"):
        read_images("mnist", path, image_size=0)
