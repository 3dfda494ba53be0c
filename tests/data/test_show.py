"""`uefl data show`: counts and a picture."""

from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from synthetic_images import synthetic
from typer.testing import CliRunner

from uefl.commands.data import app
from uefl.data import Data, defaults
from uefl.data.show import counts, picture
from uefl.errors import InputError


def printed(data: Data) -> str:
    images = synthetic(12000, test=0.2)
    console = Console(width=120, file=StringIO())
    with console.capture() as captured:
        console.print(counts(data.divide(images, 0), images))
    return captured.get()


def test_counts_name_every_silo_and_add_up() -> None:
    text = printed(Data())
    for silo in ("D1-1", "D2-2", "D3-3"):
        assert silo in text
    assert "3564" in text
    assert "10 of 10" in text


def test_a_hundred_silos_are_counted_and_the_first_shown() -> None:
    text = printed(defaults("mnist5k", "fedcr"))
    assert "D1-024" in text
    assert "D1-025" not in text
    assert "the first 24 of 100 silos" in text


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("cut", ["domains", "held-out", "classes"])
def test_every_cut_can_be_drawn(cut: str, channels: int, tmp_path: Path) -> None:
    images = synthetic(12000, channels=channels)
    written = picture(defaults("mnist5k", cut).divide(images, 0), images, tmp_path / "silos.png")
    assert np.asarray(Image.open(written)).std() > 10


def test_a_picture_is_never_overwritten(tmp_path: Path) -> None:
    images = synthetic()
    silos = Data(silos=(1, 1, 1)).divide(images, 0)
    first = picture(silos, images, tmp_path / "silos.png")
    before = first.read_bytes()
    assert picture(silos, images, tmp_path / "silos.png").name == "silos-2.png"
    assert picture(silos, images, tmp_path / "silos.png").name == "silos-3.png"
    assert first.read_bytes() == before


def test_bad_picture_paths_are_refused(tmp_path: Path) -> None:
    images = synthetic()
    silos = Data(silos=(1, 1, 1)).divide(images, 0)
    with pytest.raises(InputError, match=r"unknown picture format '\.xyz'; known: \.png"):
        picture(silos, images, tmp_path / "silos.xyz")
    with pytest.raises(InputError, match="cannot write"):
        picture(silos, images, tmp_path / "nowhere" / "silos.png")
    assert list(tmp_path.iterdir()) == []


def test_the_command_shows_counts_warnings_and_where_the_picture_is(tmp_path: Path) -> None:
    out = tmp_path / "a.png"
    found = CliRunner().invoke(app, ["show", "mnist5k", "cut=classes", "labels=1", "silos=10", "--out", str(out)])
    assert found.exit_code == 0, found.exception
    assert "D1-10" in found.output
    assert "10 of 10 silos train with one class only" in found.output
    assert "a.png" in found.output.replace("\n", "")
    assert out.exists()


@pytest.mark.parametrize(
    "bad", [["minst"], ["mnist5k", "cut=slices"], ["mnist5k", "speed=3"], ["mnist5k", "train=many"]]
)
def test_bad_arguments_are_input_errors(bad: list[str]) -> None:
    found = CliRunner().invoke(app, ["show", *bad])
    assert isinstance(found.exception, InputError)
