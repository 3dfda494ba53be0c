"""A process that trains several seeds in one stack is killed; the same call resumes them to the same bits."""

from __future__ import annotations

import multiprocessing as mp
import signal
from pathlib import Path

import pytest
from harness import TINY_SETTINGS, drop_seconds
from test_process_runs import wait_for

from uefl.experiment.checkpoint import read_round
from uefl.experiment.experiment import Experiment
from uefl.experiment.grouped_runs import run_group
from uefl.experiment.parsing import parse_experiments
from uefl.experiment.run import Event
from uefl.experiment.run_folder import RunFolder

SETTINGS = ["uefl", *TINY_SETTINGS, "batch_norm=personal"]  # every silo has a state of its own
FIRST_ROUNDS = 2  # of 5, before the process is killed


def parse_seeds() -> dict[str, Experiment]:
    runs: dict[str, Experiment] = {}
    for seed in (3, 4):
        (runs[f"seed {seed}"],) = parse_experiments([*SETTINGS, f"seed={seed}"], [], "default").values()
    return runs


def ignore(_name: str, _event: Event) -> None: ...


def run_seeds(out: Path) -> None:
    run_group(parse_seeds(), out, engine="stacked", on_event=ignore)


def kill_after_some_rounds(out: Path) -> None:
    """Start the seeds in a process, and kill it when each has a checkpoint of some rounds."""
    process = mp.get_context("spawn").Process(target=run_seeds, args=(out,))
    process.start()

    def have_all_checkpoints() -> bool:
        rounds = [read_round(path) for path in out.glob(f"*/{RunFolder.CHECKPOINT_FILE}")]
        return not process.is_alive() or (len(rounds) == 2 and min(rounds) >= FIRST_ROUNDS)

    try:
        wait_for(have_all_checkpoints, "a checkpoint of every seed")
    finally:
        process.kill()
        process.join()
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="Windows ends a process in another way")
def test_seeds_of_a_killed_process_resume_and_end_with_the_bits_of_an_uninterrupted_stack(tmp_path: Path) -> None:
    kill_after_some_rounds(tmp_path / "killed")
    starts: list[int] = []

    def listen(_name: str, event: Event) -> None:
        if event["kind"] == "start":
            starts.append(event["round"])

    resumed = run_group(parse_seeds(), tmp_path / "killed", engine="stacked", on_event=listen)
    assert len(starts) == 2
    assert starts[0] == starts[1] >= FIRST_ROUNDS, "both seeds resume after the same round"
    whole = run_group(parse_seeds(), tmp_path / "whole", engine="stacked", on_event=ignore)
    for name, folder in whole.items():
        one, other = RunFolder(folder), RunFolder(resumed[name])
        assert {path.name for path in one.path.iterdir()} == {path.name for path in other.path.iterdir()}
        assert one.model_path.read_bytes() == other.model_path.read_bytes()
        assert one.server_path.read_bytes() == other.server_path.read_bytes()
        assert [*map(drop_seconds, one.read_records())] == [*map(drop_seconds, other.read_records())]
