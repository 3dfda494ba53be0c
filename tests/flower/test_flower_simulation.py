"""The same federation on Flower's simulation runtime, with real worker processes."""

import subprocess
import sys
from pathlib import Path

import pytest


def simulated(what: str, state: Path) -> str:
    script = Path(__file__).with_name("simulated.py")
    done = subprocess.run([sys.executable, script, what, state], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_simulation_agrees_with_the_serial_engine(tmp_path):
    simulated("agrees", tmp_path)


@pytest.mark.real
def test_a_simulation_whose_processes_die_stops_with_a_clear_line(tmp_path):
    assert "0 of 3 silos answered well, 2 are needed, asked 2 times" in simulated("dies", tmp_path)
