"""The result of the last run at the coordinator: `flwr run` exits with 0 whatever its server app does.

The server app writes the result, and the script of the coordinator ends with its exit code.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from uefl.core.errors import InputError, ResumableError
from uefl.experiment.files import ensure_writable_folder, explain_disk_errors, write_text

RESULT_FILE = "result.json"  # in the folder of run folders
KILLED_MESSAGE = "the server app was killed; run the same command again to resume after the last complete round"
EXIT_FAILED, EXIT_INPUT_ERROR, EXIT_RESUMABLE = 1, 2, 3


class RunResult(NamedTuple):
    """How the last run ended: `running`, `finished`, `stopped` (it can be resumed) or `failed`."""

    status: str
    exit_code: int
    message: str = ""
    folder: str = ""
    time: str = ""
    pid: int = 0  # of the server app, while it runs


@contextmanager
def record_result(root: Path) -> Iterator[dict[str, Any]]:
    """Write the result of the run in this block; the block sets `folder` in the dictionary that it receives."""
    details: dict[str, Any] = {"folder": ""}
    with explain_disk_errors(root):
        write_result(root, RunResult("running", EXIT_RESUMABLE, "the server app runs", pid=os.getpid()))
    try:
        with explain_disk_errors(root):
            yield details
    except BaseException as e:
        status, exit_code = classify_error(e)
        write_result(root, RunResult(status, exit_code, str(e) or type(e).__name__))
        raise
    write_result(root, RunResult("finished", 0, folder=str(details["folder"])))


def classify_error(error: BaseException) -> tuple[str, int]:
    """Return status and exit code of a run that an error ended."""
    if isinstance(error, InputError):
        return "failed", EXIT_INPUT_ERROR
    if isinstance(error, ResumableError) or not isinstance(error, Exception):
        return "stopped", EXIT_RESUMABLE
    return "failed", EXIT_FAILED


def write_result(root: Path, result: RunResult) -> None:
    """Write the result of the last run."""
    now, path = time.strftime("%Y-%m-%dT%H:%M:%S%z"), ensure_writable_folder(root) / RESULT_FILE
    text = json.dumps(result._replace(time=now)._asdict(), indent=1) + "\n"
    try:
        write_text(path, text)
    except OSError:
        if not path.exists():
            raise
        with path.open("r+") as file:  # on a full disk there is still the space of the previous result
            file.write(text)
            file.truncate()


def is_running(pid: int) -> bool:
    """Return whether a process runs on this machine; one that has ended and waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except OSError:
        return False


def read_result(root: Path) -> RunResult:
    """Return the result of the last run in a folder of run folders."""
    path = root / RESULT_FILE
    try:
        result = RunResult(**json.loads(path.read_text()))
        if result.status == "running" and not is_running(result.pid):
            return result._replace(status="stopped", message=KILLED_MESSAGE)
        return result
    except FileNotFoundError:
        return RunResult("failed", EXIT_FAILED, f"{path} does not exist: no server app was started")
    except (OSError, TypeError, ValueError) as e:
        return RunResult("failed", EXIT_FAILED, f"{path} cannot be read: {e}")
