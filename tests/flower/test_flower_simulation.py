"""The same federation on Flower's simulation runtime, with real worker processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def run_scenario(scenario: str, state_folder: Path) -> str:
    script = Path(__file__).with_name("simulation_scenarios.py")
    python_path = os.pathsep.join([str(script.parent), os.environ.get("PYTHONPATH", "")])  # workers import tests too
    completed = subprocess.run(
        [sys.executable, script, scenario, state_folder],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": python_path},
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def test_a_simulation_agrees_with_the_serial_engine(tmp_path):
    run_scenario("agreement", tmp_path)


@pytest.mark.real
def test_a_simulation_whose_processes_die_stops_with_a_clear_message(tmp_path):
    message = run_scenario("dying-nodes", tmp_path)
    assert "0 of 3 silos sent a valid reply in 2 attempts; 2 are required" in message


@pytest.mark.real
def test_poisoned_replies_are_rejected_with_a_reason_in_a_simulation(tmp_path):
    run_scenario("poisoned-replies", tmp_path)


@pytest.mark.real
def test_a_straggler_in_a_simulation_does_not_affect_later_rounds(tmp_path):
    run_scenario("straggler", tmp_path)
