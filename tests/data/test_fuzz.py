"""Whatever bytes arrive, an importer answers with images or with one line; what once broke stays as an example."""

import io
import os
import pickle
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from making import as_folder, as_tar, as_zip, cifar_files, encoded, gtsrb_files, idx_files, pixels, png, python2_batch
from PIL import Image

from uefl.data.pixels import decoded
from uefl.data.sources import read
from uefl.data.unpickle import unpickled
from uefl.errors import InputError

EXAMPLES = int(os.environ.get("UEFL_FUZZ", "40"))
bounded = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=EXAMPLES <= 40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)
changes = st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), max_size=6)
cuts = st.one_of(st.just(1.0), st.floats(0, 1))


def damaged(data, flips, cut):
    """The bytes with some of them replaced, and the end gone."""
    changed = bytearray(data)
    for at, value in flips:
        if changed:
            changed[at % len(changed)] = value
    return bytes(changed[: int(cut * len(changed))])


def outcome(call, *arguments, **options):
    """What a call gives, and the line it refuses with."""
    try:
        return call(*arguments, **options), ""
    except InputError as e:
        return None, str(e)


def answers(name, path, **options):
    """Images that hold together, or one line."""
    images, line = outcome(read, name, str(path), progress=False, **options)
    assert line.isprintable(), "one line, and nothing a terminal would obey"
    if images is None:
        return
    n = len(images.y)
    assert n > 0
    assert images.x.dtype == torch.uint8
    assert images.x.shape[0] == n == len(images.test)
    assert images.x.shape[1] in (1, 3)
    assert 0 <= images.y.min() <= images.y.max() < len(images.classes)
    if images.silo is not None:
        assert 0 <= images.silo.min() <= images.silo.max() < len(images.silos)


TREE = {f"{s}/{p}/{c}/1.png": png(n) for n, (s, p, c) in enumerate(
    (s, p, c) for s in ("a", "b") for p in ("train", "test") for c in ("x", "y"))}  # fmt: skip
IDX, RAW = idx_files(), idx_files(packed=False)


@bounded
@given(st.sampled_from(sorted(IDX) + sorted(RAW)), changes, cuts, st.booleans())
def test_idx_files(name, flips, cut, skip_bad):
    files = IDX if name in IDX else RAW
    with tempfile.TemporaryDirectory() as folder:
        as_folder(Path(folder), files | {name: damaged(files[name], flips, cut)})
        answers("mnist", folder, skip_bad=skip_bad)


@bounded
@given(changes, cuts, st.booleans())
def test_zip_archives(flips, cut, skip_bad):
    with tempfile.TemporaryDirectory() as folder:
        path = as_zip(Path(folder) / "t.zip", TREE)
        path.write_bytes(damaged(path.read_bytes(), flips, cut))
        answers("folder", path, skip_bad=skip_bad)


parts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=0, max_size=6)
names = st.lists(st.one_of(parts, st.sampled_from(["train", "test", "x", "..", "."])), min_size=1, max_size=5)


@bounded
@given(st.lists(names, min_size=1, max_size=5), st.booleans(), st.sampled_from(["folder", "pacs", "gtsrb", "cifar10"]))
@example([["9" * 5000, "x"], ["8", "x"]], False, "folder")  # too long a number for int()
def test_names_in_archives(paths, skip_bad, name):
    with tempfile.TemporaryDirectory() as folder:
        files = {"/".join(p) + ".png": png(i) for i, p in enumerate(paths)}
        path = as_zip(Path(folder) / "t.zip", files)
        answers(name, path, skip_bad=skip_bad, size=8)


USUAL = ("PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP", "TGA", "PPM", "JPEG2000", "ICO", "PCX", "SGI", "DDS", "AVIF")
KINDS = {kind: encoded(pixels(3), kind) for kind in USUAL if kind in Image.SAVE}


@bounded
@pytest.mark.filterwarnings("ignore")  # as the importer itself does around all decoding
@given(st.sampled_from(sorted(KINDS)), changes, cuts, st.sampled_from([None, 4]))
def test_single_images(kind, flips, cut, size):
    found, line = outcome(decoded, damaged(KINDS[kind], flips, cut), size)
    assert "\n" not in line
    if found is None:
        return
    arrived = found[0]
    assert arrived.dtype == np.uint8
    assert arrived.ndim == 3
    assert arrived.shape[0] in (1, 3)


PICKLES = [python2_batch(), *(pickle.dumps({"data": pixels(1, (2, 30)), "labels": [1]}, p) for p in range(6))]


@bounded
@given(st.sampled_from(PICKLES), changes, cuts)
def test_pickles(data, flips, cut):
    found, line = outcome(unpickled, damaged(data, flips, cut), "here")
    assert "\n" not in line
    assert line or isinstance(found, dict)


@bounded
@given(st.sampled_from(sorted(cifar_files())), changes, cuts, st.booleans())
def test_cifar_archives(name, flips, cut, inside):
    files = cifar_files()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "c.tar.gz"
        if inside:
            files[name] = damaged(files[name], flips, cut)
        as_tar(path, files)
        if not inside:
            path.write_bytes(damaged(path.read_bytes(), flips, cut))
        answers("cifar10", path)


cells = st.one_of(st.sampled_from(["1.png", "2.png", "cat", "dog", "train", "test", ""]), st.text(max_size=5))


@bounded
@given(st.lists(st.lists(cells, max_size=6), max_size=6), st.booleans())
@example([["1.png", "9" * 5000, "a"], ["2.png", "8", "a"]], False)
@example([["1.png", "9" * 200_000, "a"]], True)  # longer than the csv module's fields may be
def test_lists(rows, skip_bad):
    text = "path,label,silo,split\n" + "\n".join(",".join(row) for row in rows)
    with tempfile.TemporaryDirectory() as folder:
        as_folder(Path(folder), {"1.png": png(1), "2.png": png(2), "l.csv": text.encode("utf-8", "replace")})
        answers("folder", Path(folder) / "l.csv", skip_bad=skip_bad)


@bounded
@given(changes, cuts, st.booleans())
def test_traffic_sign_tables(flips, cut, skip_bad):
    files = gtsrb_files((0, 1))
    with tempfile.TemporaryDirectory() as folder:
        name = "GT-final_test.csv"
        as_folder(Path(folder), files | {name: damaged(files[name], flips, cut)})
        answers("gtsrb", folder, skip_bad=skip_bad)


def test_a_tar_of_links_and_devices_holds_no_batches(tmp_path):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for kind, name in ((tarfile.SYMTYPE, "data_batch_1"), (tarfile.FIFOTYPE, "data_batch_2")):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd"
            archive.addfile(member)
    (tmp_path / "c.tar.gz").write_bytes(out.getvalue())
    with pytest.raises(InputError, match="no member 'data_batch_1'"):
        read("cifar10", str(tmp_path / "c.tar.gz"))
