"""The folders of data, decoded images and weights."""

from pathlib import Path

import pytest

from uefl.core.paths import find_data, get_cache_folder
from uefl.models.torchvision_weights import weights_folder


def test_uefl_data_with_a_tilde_is_one_folder_for_data_and_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("UEFL_DATA", "~/d")
    (tmp_path / "d" / "mnist").mkdir(parents=True)
    assert get_cache_folder() == tmp_path / "d"
    assert weights_folder() == tmp_path / "d" / "weights"
    assert find_data(["mnist"]) == tmp_path / "d" / "mnist"


def test_without_uefl_data_the_user_cache_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UEFL_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert get_cache_folder() == tmp_path / ".cache" / "uefl"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert get_cache_folder() == tmp_path / "xdg" / "uefl"
    assert weights_folder() == tmp_path / "xdg" / "uefl" / "weights"
