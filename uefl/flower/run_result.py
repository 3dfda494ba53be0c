"""The result of the last run at the coordinator: `flwr run` exits with 0 whatever its server app does.

The server app writes the result, and the script of the coordinator ends with its exit code.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from uefl.core.errors import InputError, ResumableError
from uefl.experiment.files import ensure_writable_folder, write_text

RESULT_FILE = "result.json"  # in the folder of run folders
EXIT_FAILED, EXIT_INPUT_ERROR, EXIT_RESUMABLE = 1, 2, 3


class RunResult(NamedTuple):
    """How the last run ended: `running`, `finished`, `stopped` (it can be resumed) or `failed`."""

    status: str
    exit_code: int
    message: str = ""
    folder: str = ""
    time: str = ""


@contextmanager
def record_result(root: Path) -> Iterator[dict[str, Any]]:
    """Write the result of the run in this block; the block sets `folder` in the dictionary that it receives."""
    details: dict[str, Any] = {"folder": ""}
    write_result(root, RunResult("running", EXIT_RESUMABLE, "the server app ended without a result"))
    try:
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
    now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    write_text(
        ensure_writable_folder(root) / RESULT_FILE, json.dumps(result._replace(time=now)._asdict(), indent=1) + "\n"
    )


def read_result(root: Path) -> RunResult:
    """Return the result of the last run in a folder of run folders."""
    path = root / RESULT_FILE
    try:
        return RunResult(**json.loads(path.read_text()))
    except FileNotFoundError:
        return RunResult("failed", EXIT_FAILED, f"{path} does not exist: no server app was started")
    except (OSError, TypeError, ValueError) as e:
        return RunResult("failed", EXIT_FAILED, f"{path} cannot be read: {e}")
