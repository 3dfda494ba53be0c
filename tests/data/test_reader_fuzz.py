"""For any bytes, a reader returns images or raises an error of one line; bytes that once failed stay as examples."""

import io
import os
import pickle
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from file_factories import (
    encode_image,
    make_cifar_files,
    make_gtsrb_files,
    make_idx_files,
    make_pixels,
    make_png,
    make_python2_batch,
    write_folder,
    write_tar,
    write_zip,
)
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image

from uefl.core.errors import InputError
from uefl.data.readers.decode import decode_image
from uefl.data.readers.safe_pickle import unpickle_dict
from uefl.data.sources import read_images

EXAMPLES = int(os.environ.get("UEFL_FUZZ", "40"))
fuzz_settings = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=EXAMPLES <= 40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)
changes = st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), max_size=6)
kept_fractions = st.one_of(st.just(1.0), st.floats(0, 1))


def damage(data, flips, kept_fraction):
    """Replace some bytes and remove the end."""
    damaged = bytearray(data)
    for position, value in flips:
        if damaged:
            damaged[position % len(damaged)] = value
    return bytes(damaged[: int(kept_fraction * len(damaged))])


def call_reader(function, *arguments, **options):
    """Return the result of a call, or None, and its error message, or an empty string."""
    try:
        return function(*arguments, **options), ""
    except InputError as e:
        return None, str(e)


def check_reader(name, path, **options):
    """Check that a reader returns consistent images or an error of one printable line."""
    images, line = call_reader(read_images, name, str(path), show_progress=False, **options)
    assert line.isprintable(), "one line without control characters"
    if images is None:
        return
    n = len(images.y)
    assert n > 0
    assert images.x.dtype == torch.uint8
    assert images.x.shape[0] == n == len(images.is_test)
    assert images.x.shape[1] in (1, 3)
    assert 0 <= images.y.min() <= images.y.max() < len(images.classes)
    if images.silo_ids is not None:
        assert 0 <= images.silo_ids.min() <= images.silo_ids.max() < len(images.silos)


CLASS_FOLDERS = {f"{s}/{p}/{c}/1.png": make_png(n) for n, (s, p, c) in enumerate(
    (s, p, c) for s in ("a", "b") for p in ("train", "test") for c in ("x", "y"))}  # fmt: skip
IDX, RAW = make_idx_files(), make_idx_files(compressed=False)


@fuzz_settings
@given(st.sampled_from(sorted(IDX) + sorted(RAW)), changes, kept_fractions, st.booleans())
def test_idx_files(name, flips, kept_fraction, skip_bad):
    files = IDX if name in IDX else RAW
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder), files | {name: damage(files[name], flips, kept_fraction)})
        check_reader("mnist", folder, skip_bad=skip_bad)


@fuzz_settings
@given(changes, kept_fractions, st.booleans())
def test_zip_archives(flips, kept_fraction, skip_bad):
    with tempfile.TemporaryDirectory() as folder:
        path = write_zip(Path(folder) / "t.zip", CLASS_FOLDERS)
        path.write_bytes(damage(path.read_bytes(), flips, kept_fraction))
        check_reader("folder", path, skip_bad=skip_bad)


parts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=0, max_size=6)
names = st.lists(st.one_of(parts, st.sampled_from(["train", "test", "x", "..", "."])), min_size=1, max_size=5)


@fuzz_settings
@given(st.lists(names, min_size=1, max_size=5), st.booleans(), st.sampled_from(["folder", "pacs", "gtsrb", "cifar10"]))
@example([["9" * 5000, "x"], ["8", "x"]], False, "folder")  # a number that is too long for int()
def test_names_in_archives(paths, skip_bad, name):
    with tempfile.TemporaryDirectory() as folder:
        files = {"/".join(p) + ".png": make_png(i) for i, p in enumerate(paths)}
        path = write_zip(Path(folder) / "t.zip", files)
        check_reader(name, path, skip_bad=skip_bad, image_size=8)


FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP", "TGA", "PPM", "JPEG2000", "ICO", "PCX", "SGI", "DDS", "AVIF")
ENCODED_IMAGES = {format: encode_image(make_pixels(3), format) for format in FORMATS if format in Image.SAVE}


@fuzz_settings
@pytest.mark.filterwarnings("ignore")  # as the reader does around all decoding
@given(st.sampled_from(sorted(ENCODED_IMAGES)), changes, kept_fractions, st.sampled_from([None, 4]))
def test_single_images(format, flips, kept_fraction, image_size):
    decoded, line = call_reader(decode_image, damage(ENCODED_IMAGES[format], flips, kept_fraction), image_size)
    assert "\n" not in line
    if decoded is None:
        return
    pixels = decoded[0]
    assert pixels.dtype == np.uint8
    assert pixels.ndim == 3
    assert pixels.shape[0] in (1, 3)


PICKLES = [make_python2_batch(), *(pickle.dumps({"data": make_pixels(1, (2, 30)), "labels": [1]}, p) for p in range(6))]


@fuzz_settings
@given(st.sampled_from(PICKLES), changes, kept_fractions)
def test_pickles(data, flips, kept_fraction):
    content, line = call_reader(unpickle_dict, damage(data, flips, kept_fraction), "here")
    assert "\n" not in line
    assert line or isinstance(content, dict)


@fuzz_settings
@given(st.sampled_from(sorted(make_cifar_files())), changes, kept_fractions, st.booleans())
def test_cifar_archives(name, flips, kept_fraction, damage_member):
    files = make_cifar_files()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c.tar.gz"
        if damage_member:
            files[name] = damage(files[name], flips, kept_fraction)
        write_tar(path, files)
        if not damage_member:
            path.write_bytes(damage(path.read_bytes(), flips, kept_fraction))
        check_reader("cifar10", path)


cells = st.one_of(st.sampled_from(["1.png", "2.png", "cat", "dog", "train", "test", ""]), st.text(max_size=5))


@fuzz_settings
@given(st.lists(st.lists(cells, max_size=6), max_size=6), st.booleans())
@example([["1.png", "9" * 5000, "a"], ["2.png", "8", "a"]], False)
@example([["1.png", "9" * 200_000, "a"]], True)  # longer than the limit of the csv module
def test_manifests(rows, skip_bad):
    text = "path,label,silo,split\n" + "\n".join(",".join(row) for row in rows)
    with tempfile.TemporaryDirectory() as folder:
        write_folder(
            Path(folder), {"1.png": make_png(1), "2.png": make_png(2), "l.csv": text.encode("utf-8", "replace")}
        )
        check_reader("folder", Path(folder) / "l.csv", skip_bad=skip_bad)


@fuzz_settings
@given(changes, kept_fractions, st.booleans())
def test_gtsrb_csv_files(flips, kept_fraction, skip_bad):
    files = make_gtsrb_files((0, 1))
    with tempfile.TemporaryDirectory() as folder:
        name = "GT-final_test.csv"
        write_folder(Path(folder), files | {name: damage(files[name], flips, kept_fraction)})
        check_reader("gtsrb", folder, skip_bad=skip_bad)


def test_tar_of_links_and_devices_has_no_batches(tmp_path):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for kind, name in ((tarfile.SYMTYPE, "data_batch_1"), (tarfile.FIFOTYPE, "data_batch_2")):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd"
            archive.addfile(member)
    (tmp_path / "c.tar.gz").write_bytes(out.getvalue())
    with pytest.raises(InputError, match="no member 'data_batch_1'"):
        read_images("cifar10", str(tmp_path / "c.tar.gz"))
