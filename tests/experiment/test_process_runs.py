"""Runs with the engine `processes` from the command line: interrupted, killed and resumed to the bits of `serial`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path

import pytest
from harness import TINY_SETTINGS, TINY_SETTINGS_NO_CODEBOOK, call_with_mistake, drop_seconds, read_change_times

from uefl.core.errors import InputError
from uefl.experiment.parsing import parse_experiments
from uefl.experiment.run import run
from uefl.experiment.run_folder import RunFolder

SETTINGS = [*TINY_SETTINGS, "batch_norm=personal"]  # every silo has a state of its own
COMMAND = [sys.executable, "-m", "uefl.cli.main", "run", "--engine", "processes", "--workers", "2"]


def wait_for(is_done, what: str, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
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


def stop_after_a_round(settings: Sequence[str], out: Path, number: int) -> int:
    """Start the run, send a signal to its process group after one more round, and return its exit code."""
    with subprocess.Popen(
        [*COMMAND, *settings, "--out", str(out)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
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


@pytest.mark.parametrize(
    ("settings", "numbers"),
    [
        (["uefl", *SETTINGS], [signal.SIGINT, signal.SIGKILL]),
        (["scaffold", *TINY_SETTINGS_NO_CODEBOOK], [signal.SIGKILL]),  # a control variate per silo, and the server's
    ],
    ids=["uefl", "scaffold"],
)
def test_an_interrupted_and_killed_run_leaves_no_process_and_ends_with_the_bits_of_serial(
    settings: list[str], numbers: list[int], tmp_path: Path
) -> None:
    (experiment,) = parse_experiments(settings, [], "default").values()
    whole = RunFolder(run(experiment, tmp_path / "serial", engine="serial"))
    out = tmp_path / "processes"
    for number in numbers:
        assert stop_after_a_round(settings, out, number) == (130 if number == signal.SIGINT else -signal.SIGKILL)
    starts = []
    listen = lambda event: starts.append(event["round"]) if event["kind"] == "start" else None  # noqa: E731
    folder = RunFolder(run(experiment, out, engine="processes", num_workers=1, on_event=listen))
    assert starts[0] >= len(numbers), "the run resumes from its checkpoint"
    assert folder.read_header()["engine"] == "processes"
    assert folder.model_path.read_bytes() == whole.model_path.read_bytes()
    assert folder.server_path.read_bytes() == whole.server_path.read_bytes()
    assert [*map(drop_seconds, folder.read_records())] == [*map(drop_seconds, whole.read_records())]


def list_workers_of_runs(process: subprocess.Popen[bytes]) -> list[list[int]]:
    """Return the workers of each parallel run of a comparison that has them."""
    with suppress(FileNotFoundError):  # a process that has just ended
        return [workers for run_ in list_children(process.pid) if (workers := list_children(run_))]
    return []


def has_data(pid: int) -> bool:
    """Return whether a worker maps the shared memory of data and broadcast: it is about to train."""
    maps = Path(f"/proc/{pid}/maps")
    return maps.exists() and maps.read_text().count("memfd:uefl") >= 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_runs_of_a_comparison_share_the_cores_and_leave_no_process(number: int, tmp_path: Path) -> None:
    """On a machine that pretends to have four cores, `auto` gives each of two runs two; the epoch does not end."""
    pretend = "from uefl.engines.processes import worker_pool; worker_pool.count_cores = lambda: 4"
    program = [sys.executable, "-c", f"{pretend}; from uefl.cli.main import main; main()"]
    settings = [*(s for s in TINY_SETTINGS if s != "epochs=1"), "epochs=1000000"]
    command = [*program, "compare", "scaffold", "uefl", *settings, "--out", str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            wait_for(
                lambda: (
                    [*map(len, list_workers_of_runs(process))] == [2, 2]
                    and all(has_data(worker) for workers in list_workers_of_runs(process) for worker in workers)
                ),
                "two workers per run",
            )
            time.sleep(0.5)  # until they train: from then on, runs and workers have nothing to send
            processes = [*list_children(process.pid), *chain.from_iterable(list_workers_of_runs(process))]
            if number == signal.SIGINT:
                os.killpg(process.pid, number)  # as a terminal does
            else:
                os.kill(process.pid, number)
            _, errors = process.communicate(timeout=20)
            wait_for(lambda: not any(map(is_running, processes)), "the end of runs and workers", seconds=20)
        finally:
            with suppress(ProcessLookupError):  # processes that are left behind would fail another test
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL)
    assert b"Traceback" not in errors


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
    assert message == "engine=processes gives all cores to one run; use engine=auto for 2 at once"
