"""Runs with the engine `processes` from the command line: interrupted, killed and resumed to the bits of `serial`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import TINY_SETTINGS, call_with_mistake, drop_seconds, read_change_times

from uefl.core.errors import InputError
from uefl.experiment.parsing import parse_experiments
from uefl.experiment.run import run
from uefl.experiment.run_folder import RunFolder

SETTINGS = [*TINY_SETTINGS, "batch_norm=personal"]  # every silo has a state of its own
COMMAND = [sys.executable, "-m", "uefl.cli.main", "run", *SETTINGS, "--engine", "processes", "--workers", "2"]


def wait_for(is_done, what: str) -> None:
    deadline = time.monotonic() + 120
    while not is_done():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)


def list_children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def stop_after_a_round(out: Path, number: int) -> int:
    """Start the run, send a signal to its process group after one more round, and return its exit code."""
    with subprocess.Popen(
        [*COMMAND, "--out", str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            return stop_process(process, out, number)
        finally:
            process.kill()  # a process that is left behind would fail another test


def stop_process(process: subprocess.Popen[bytes], out: Path, number: int) -> int:
    """Send a signal to the process after its next checkpoint, and wait until it and its workers have ended."""
    pattern = f"*/{RunFolder.CHECKPOINT_FILE}"
    before = read_change_times(out, pattern)

    def has_new_checkpoint() -> bool:
        return process.poll() is not None or bool(read_change_times(out, pattern).items() - before.items())

    wait_for(has_new_checkpoint, "a checkpoint")
    workers = list_children(process.pid)
    assert len(workers) == 2
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        os.kill(process.pid, number)
    _, errors = process.communicate(timeout=300)
    assert b"Traceback" not in errors
    wait_for(lambda: not any(map(is_running, workers)), "the end of the workers")
    return process.returncode


def test_an_interrupted_and_killed_run_leaves_no_process_and_ends_with_the_bits_of_serial(tmp_path: Path) -> None:
    (experiment,) = parse_experiments(SETTINGS, ["uefl"], "default").values()
    whole = RunFolder(run(experiment, tmp_path / "serial", engine="serial"))
    out = tmp_path / "processes"
    assert stop_after_a_round(out, signal.SIGINT) == 130
    assert stop_after_a_round(out, signal.SIGKILL) == -signal.SIGKILL
    starts = []
    listen = lambda event: starts.append(event["round"]) if event["kind"] == "start" else None  # noqa: E731
    folder = RunFolder(run(experiment, out, engine="processes", num_workers=1, on_event=listen))
    assert starts[0] >= 2, "the run resumes from its checkpoint"
    assert folder.read_header()["engine"] == "processes"
    assert folder.model_path.read_bytes() == whole.model_path.read_bytes()
    assert folder.server_path.read_bytes() == whole.server_path.read_bytes()
    assert [*map(drop_seconds, folder.read_records())] == [*map(drop_seconds, whole.read_records())]


def test_a_run_may_be_resumed_with_another_engine_of_the_same_bits_only(tmp_path: Path) -> None:
    (experiment,) = parse_experiments(SETTINGS, ["uefl"], "default").values()

    def stop(event) -> None:
        if event["kind"] == "trained":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(experiment, tmp_path, engine="serial", on_event=stop)
    with pytest.raises(InputError, match="was started with engine serial, but engine is now stacked"):
        run(experiment, tmp_path, engine="stacked")
    with pytest.raises(KeyboardInterrupt):
        run(experiment, tmp_path, engine="processes", num_workers=1, on_event=stop)


def test_settings_of_processes_that_make_no_sense_are_one_line(tmp_path: Path) -> None:
    out = ("--out", str(tmp_path))
    message = call_with_mistake("run", *SETTINGS, "--engine", "processes", "--workers", "-1", *out)
    assert message == "workers=-1 must be at least 0"
    message = call_with_mistake("compare", *SETTINGS, "--engine", "processes", "--workers", "2", *out)
    assert message == "engine=processes gives all cores to one run; use engine=serial for 2 at once"
