import os
import pickle

import numpy as np
import pytest
import torch
from making import as_folder, as_tar, as_zip, cifar_files, pixels, png, python2_batch

from uefl.data.sources import read
from uefl.data.unpickle import unpickled
from uefl.errors import InputError


def test_packed_and_unpacked_archives_are_the_same_images(tmp_path):
    packed = read("cifar10", str(as_tar(tmp_path / "cifar-10-python.tar.gz", cifar_files())))
    folder = read("cifar10", str(as_folder(tmp_path / "data", cifar_files())))
    inside = as_folder(
        tmp_path / "cifar10", {"cifar-10-python.tar.gz": (tmp_path / "cifar-10-python.tar.gz").read_bytes()}
    )
    for other in (folder, read("cifar10", str(inside))):
        assert torch.equal(packed.x, other.x)
        assert torch.equal(packed.y, other.y)
    assert packed.x.shape == (12, 3, 32, 32)
    assert packed.test.tolist() == [False] * 10 + [True] * 2
    assert packed.classes[0] == "class00"
    assert torch.equal(packed.x[2], torch.from_numpy(pixels(1, (2, 3072))[0].reshape(3, 32, 32)))


def test_the_hundred_have_fine_labels(tmp_path):
    images = read("cifar100", str(as_tar(tmp_path / "c.tar.gz", cifar_files(100, fine=True))))
    assert len(images.classes) == 100
    assert images.y.tolist() == [0, 1, 0, 1]


def test_a_tree_will_do_as_well(tmp_path):
    files = {f"{s}/{c}/{i}.png": png(n, (32, 32, 3)) for n, (s, c, i) in enumerate(
        (s, c, i) for s in ("train", "test") for c in ("apple", "bear") for i in range(2))}  # fmt: skip
    images = read("cifar100", str(as_zip(tmp_path / "cifar100.zip", files)))
    assert images.classes == ("apple", "bear")
    assert images.test.sum() == 4
    wrapped = read("cifar100", str(as_zip(tmp_path / "w.zip", {f"cifar/{k}": v for k, v in files.items()})))
    assert wrapped.silo is None
    assert torch.equal(wrapped.x, images.x)


def test_pickles_of_python_2_are_read():
    found = unpickled(python2_batch(), "batch")
    assert np.array_equal(found["data"], pixels(7, (2, 3072)))
    assert found["labels"] == [0, 1]


class Evil:
    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_wants_to_run_something_is_refused(tmp_path, protocol):
    mark = tmp_path / "mark"
    for evil in (Evil(os.system, f"touch {mark}"), Evil(eval, f"open({str(mark)!r}, 'w')"), Evil(os.mkdir, str(mark))):
        files = cifar_files() | {"cifar-10-batches-py/data_batch_3": pickle.dumps({b"data": evil}, protocol=protocol)}
        with pytest.raises(InputError, match=r"data_batch_3: refused or damaged pickle \(it asks for "):
            read("cifar10", str(as_tar(tmp_path / "c.tar.gz", files)))
    assert not mark.exists()


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
        python2_batch()[:-200],
    ],
)
def test_other_pickles_are_refused(data):
    with pytest.raises(InputError, match=r"^here: refused or damaged pickle"):
        unpickled(data, "here")


def batch(**changes):
    return pickle.dumps({"data": pixels(1, (2, 3072)), "labels": [0, 1]} | changes, protocol=2)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (batch(labels=[0, 10]), "label 10 of image 1 is outside the 10 classes"),
        (batch(labels=[0]), "'labels' is no list of 2 integers"),
        (batch(labels=[0, 1 << 80]), "'labels' is no list of 2 integers"),
        (batch(data=pixels(1, (2, 3))), "'data' is no array of rows of 3072 bytes"),
        (batch(data=b"x"), "'data' is no array of rows of 3072 bytes"),
    ],
)
def test_a_wrong_batch_is_named(tmp_path, data, reason):
    files = cifar_files() | {"cifar-10-batches-py/test_batch": data}
    with pytest.raises(InputError, match=f"test_batch: {reason}"):
        read("cifar10", str(as_tar(tmp_path / "c.tar.gz", files)))


def test_a_truncated_archive_or_a_missing_member_is_refused(tmp_path):
    path = as_tar(tmp_path / "c.tar.gz", cifar_files())
    path.write_bytes(path.read_bytes()[:20_000])
    with pytest.raises(InputError, match=r"c.tar.gz: not a tar archive, or a truncated one"):
        read("cifar10", str(path))
    files = cifar_files()
    del files["cifar-10-batches-py/data_batch_4"]
    with pytest.raises(InputError, match="no member 'data_batch_4'"):
        read("cifar10", str(as_tar(tmp_path / "d.tar.gz", files)))
