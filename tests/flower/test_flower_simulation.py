"""The same federation on Flower's simulation runtime, with real worker processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def simulated(what: str, state: Path) -> str:
    script = Path(__file__).with_name("simulated.py")
    path = os.pathsep.join([str(script.parent), os.environ.get("PYTHONPATH", "")])  # workers import tests too
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, script, what, state], capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_simulation_agrees_with_the_serial_engine(tmp_path):
    simulated("agrees", tmp_path)


@pytest.mark.real
def test_a_simulation_whose_processes_die_stops_with_a_clear_line(tmp_path):
    assert "0 of 3 silos answered well, 2 are needed, asked 2 times" in simulated("dies", tmp_path)


@pytest.mark.real
def test_poisoned_replies_are_refused_and_named_in_a_simulation(tmp_path):
    simulated("lies", tmp_path)


@pytest.mark.real
def test_a_straggler_in_a_simulation_does_not_disturb_the_rounds_that_follow(tmp_path):
    simulated("straggles", tmp_path)
