import os
import pickle

import numpy as np
import pytest
import torch
from file_factories import (
    make_cifar_files,
    make_pixels,
    make_png,
    make_python2_batch,
    write_folder,
    write_tar,
    write_zip,
)

from uefl.core.errors import InputError
from uefl.data.readers.safe_pickle import unpickle_dict
from uefl.data.sources import read_images


def test_packed_and_unpacked_archives_give_the_same_images(tmp_path):
    packed = read_images("cifar10", str(write_tar(tmp_path / "cifar-10-python.tar.gz", make_cifar_files())))
    folder = read_images("cifar10", str(write_folder(tmp_path / "data", make_cifar_files())))
    inside = write_folder(
        tmp_path / "cifar10", {"cifar-10-python.tar.gz": (tmp_path / "cifar-10-python.tar.gz").read_bytes()}
    )
    for other in (folder, read_images("cifar10", str(inside))):
        assert torch.equal(packed.x, other.x)
        assert torch.equal(packed.y, other.y)
    assert packed.x.shape == (12, 3, 32, 32)
    assert packed.is_test.tolist() == [False] * 10 + [True] * 2
    assert packed.classes[0] == "class00"
    assert torch.equal(packed.x[2], torch.from_numpy(make_pixels(1, (2, 3072))[0].reshape(3, 32, 32)))


def test_cifar100_has_fine_labels(tmp_path):
    images = read_images("cifar100", str(write_tar(tmp_path / "c.tar.gz", make_cifar_files(100, fine=True))))
    assert len(images.classes) == 100
    assert images.y.tolist() == [0, 1, 0, 1]


def test_class_folders_are_read_too(tmp_path):
    files = {f"{s}/{c}/{i}.png": make_png(n, (32, 32, 3)) for n, (s, c, i) in enumerate(
        (s, c, i) for s in ("train", "test") for c in ("apple", "bear") for i in range(2))}  # fmt: skip
    images = read_images("cifar100", str(write_zip(tmp_path / "cifar100.zip", files)))
    assert images.classes == ("apple", "bear")
    assert images.is_test.sum() == 4
    wrapped = read_images("cifar100", str(write_zip(tmp_path / "w.zip", {f"cifar/{k}": v for k, v in files.items()})))
    assert wrapped.silo_ids is None
    assert torch.equal(wrapped.x, images.x)


def test_python2_pickles_are_read():
    content = unpickle_dict(make_python2_batch(), "batch")
    assert np.array_equal(content["data"], make_pixels(7, (2, 3072)))
    assert content["labels"] == [0, 1]


class MaliciousCall:
    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", range(6))
def test_pickle_that_runs_code_is_rejected(tmp_path, protocol):
    marker = tmp_path / "marker"
    for call in (
        MaliciousCall(os.system, f"touch {marker}"),
        MaliciousCall(eval, f"open({str(marker)!r}, 'w')"),
        MaliciousCall(os.mkdir, str(marker)),
    ):
        files = make_cifar_files() | {
            "cifar-10-batches-py/data_batch_3": pickle.dumps({b"data": call}, protocol=protocol)
        }
        with pytest.raises(InputError, match=r"data_batch_3: unsafe or damaged pickle \(it refers to "):
            read_images("cifar10", str(write_tar(tmp_path / "c.tar.gz", files)))
    assert not marker.exists()


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps([1, 2], protocol=2),
        pickle.dumps({b"data": np.array([{}], dtype=object)}, protocol=2),
        pickle.dumps({b"data": np.zeros(3)}, protocol=2),
        b"\x80\x02}r\xff\xff\xff\x7f" * 3,  # a memo index for which the unpickler in C would allocate 32 GB
        b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x04\x00\x00\x00zlib\x86R.",
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n(K\x05tR}b.",
        b"",
        make_python2_batch()[:-200],
    ],
)
def test_unsafe_or_damaged_pickle_is_rejected(data):
    with pytest.raises(InputError, match=r"^here: unsafe or damaged pickle"):
        unpickle_dict(data, "here")


def pickle_batch(**changes):
    return pickle.dumps({"data": make_pixels(1, (2, 3072)), "labels": [0, 1]} | changes, protocol=2)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (pickle_batch(labels=[0, 10]), "label 10 of image 1 must be 0 to 9"),
        (pickle_batch(labels=[0]), "'labels' must be a list of 2 integers"),
        (pickle_batch(labels=[0, 1 << 80]), "'labels' must be a list of 2 integers"),
        (pickle_batch(data=make_pixels(1, (2, 3))), "'data' must be an array with rows of 3072 bytes"),
        (pickle_batch(data=b"x"), "'data' must be an array with rows of 3072 bytes"),
    ],
)
def test_error_names_the_invalid_batch(tmp_path, data, reason):
    files = make_cifar_files() | {"cifar-10-batches-py/test_batch": data}
    with pytest.raises(InputError, match=f"test_batch: {reason}"):
        read_images("cifar10", str(write_tar(tmp_path / "c.tar.gz", files)))


def test_truncated_archive_or_missing_member_is_rejected(tmp_path):
    path = write_tar(tmp_path / "c.tar.gz", make_cifar_files())
    path.write_bytes(path.read_bytes()[:20_000])
    with pytest.raises(InputError, match=r"c.tar.gz: not a tar archive, or truncated"):
        read_images("cifar10", str(path))
    files = make_cifar_files()
    del files["cifar-10-batches-py/data_batch_4"]
    with pytest.raises(InputError, match="no member 'data_batch_4'"):
        read_images("cifar10", str(write_tar(tmp_path / "d.tar.gz", files)))
