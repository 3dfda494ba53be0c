"""`uefl data show`: counts and a figure."""

from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from synthetic_images import make_synthetic_images
from typer.testing import CliRunner

from uefl.cli.data import group
from uefl.core.errors import InputError
from uefl.data.config import DataConfig
from uefl.data.defaults import get_default_config
from uefl.data.preview import draw_silos, make_count_table


def print_counts(config: DataConfig) -> str:
    images = make_synthetic_images(12000, test_fraction=0.2)
    console = Console(width=120, file=StringIO())
    with console.capture() as captured:
        console.print(make_count_table(config.make_silos(images, 0), images))
    return captured.get()


def test_table_names_every_silo_and_the_totals() -> None:
    text = print_counts(DataConfig())
    for silo in ("D1-1", "D2-2", "D3-3"):
        assert silo in text
    assert "3564" in text
    assert "10 of 10" in text


def test_first_of_a_hundred_silos_are_shown_and_all_counted() -> None:
    text = print_counts(get_default_config("mnist5k", "dirichlet-fedcr"))
    assert "D1-024" in text
    assert "D1-025" not in text
    assert "the first 24 of 100 silos" in text


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("partitioner", ["domains", "leave-one-domain-out", "pathological"])
def test_every_partition_can_be_drawn(partitioner: str, channels: int, tmp_path: Path) -> None:
    images = make_synthetic_images(12000, channels=channels)
    silos = get_default_config("mnist5k", partitioner).make_silos(images, 0)
    path = draw_silos(silos, images, tmp_path / "silos.png")
    assert np.asarray(Image.open(path)).std() > 10


def test_figure_is_never_overwritten(tmp_path: Path) -> None:
    images = make_synthetic_images()
    silos = DataConfig(num_silos=(1, 1, 1)).make_silos(images, 0)
    first = draw_silos(silos, images, tmp_path / "silos.png")
    before = first.read_bytes()
    assert draw_silos(silos, images, tmp_path / "silos.png").name == "silos-2.png"
    assert draw_silos(silos, images, tmp_path / "silos.png").name == "silos-3.png"
    assert first.read_bytes() == before


def test_invalid_figure_path_is_rejected(tmp_path: Path) -> None:
    images = make_synthetic_images()
    silos = DataConfig(num_silos=(1, 1, 1)).make_silos(images, 0)
    with pytest.raises(InputError, match=r"unknown image format '\.xyz'; known: \.png"):
        draw_silos(silos, images, tmp_path / "silos.xyz")
    with pytest.raises(InputError, match="cannot write"):
        draw_silos(silos, images, tmp_path / "nowhere" / "silos.png")
    assert list(tmp_path.iterdir()) == []


def test_command_shows_counts_warnings_and_the_path_of_the_figure(tmp_path: Path) -> None:
    out = tmp_path / "a.png"
    result = CliRunner().invoke(
        group, ["show", "mnist5k", "partitioner=pathological", "classes_per_silo=1", "num_silos=10", "--out", str(out)]
    )
    assert result.exit_code == 0, result.exception
    assert "D1-10" in result.output
    assert "10 of 10 silos have training examples of only one class" in " ".join(result.output.split())
    assert "a.png" in result.output.replace("\n", "")
    assert out.exists()


@pytest.mark.parametrize(
    "arguments",
    [["minst"], ["mnist5k", "partitioner=slices"], ["mnist5k", "speed=3"], ["mnist5k", "train_per_silo=many"]],
)
def test_invalid_arguments_are_input_errors(arguments: list[str]) -> None:
    result = CliRunner().invoke(group, ["show", *arguments])
    assert isinstance(result.exception, InputError)
