"""The folder of one run: names of its files, prefixes of the tensors in them, header and lock."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from uefl.core.errors import InputError
from uefl.experiment.files import write_text

RESULTS_VERSION_KEY = "results_version"


class RunFolder:
    """The files of one run. A finished run is never overwritten; an unfinished one is resumed from its checkpoint."""

    HEADER_FILE = "run.json"  # settings, versions, data
    RECORDS_FILE = "records.jsonl"  # one line per round
    CHECKPOINT_FILE = "checkpoint.safetensors"  # until the run is finished
    SERVER_FILE = "server.safetensors"  # the last checkpoint of a finished run
    MODEL_FILE = "model.safetensors"  # all that predictions need
    FIGURE_FILE = "figure.png"
    SUMMARY_FILE = "summary.json"  # written last: it marks a finished run
    LOCK_FILE = ".lock"

    MODEL_PREFIX = "model/"  # the server's model
    METHOD_PREFIX = "method/"  # the server's method state
    CLIENTS_PREFIX = "clients/"  # then the name of a silo: its client state
    ACCESS = "access"  # the ledger of codewords

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header_path, self.summary_path = path / self.HEADER_FILE, path / self.SUMMARY_FILE
        self.records_path, self.checkpoint_path = path / self.RECORDS_FILE, path / self.CHECKPOINT_FILE
        self.server_path = path / self.SERVER_FILE
        self.model_path, self.figure_path = path / self.MODEL_FILE, path / self.FIGURE_FILE

    @property
    def has_header(self) -> bool:
        """Whether a run was started in this folder."""
        return self.header_path.exists()

    @property
    def is_finished(self) -> bool:
        """Whether the run has ended and its results are complete."""
        return self.summary_path.exists()

    def read_header(self) -> dict[str, Any]:
        """Read settings, versions and data of the run."""
        return check_results_format(_read_json(self.header_path), self.path)

    def write_header(self, header: Mapping[str, Any]) -> None:
        write_text(self.header_path, json.dumps(header, indent=1) + "\n")

    def read_summary(self) -> dict[str, Any]:
        """Read the summary of a finished run."""
        return _read_json(self.summary_path)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        write_text(self.summary_path, json.dumps(summary, indent=1) + "\n")

    def remove_header(self) -> None:
        """Remove a run that has no results yet."""
        for name in (self.HEADER_FILE, self.LOCK_FILE):
            (self.path / name).unlink()
        self.path.rmdir()

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes out; the operating system releases the lock when the process ends."""
        file = os.open(self.path / self.LOCK_FILE, os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            raise InputError(f"{self.path} is in use by another process") from None
        try:
            yield
        finally:
            os.close(file)


def check_results_format(header: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return a header, or raise an error if version 0.1, which used other names, wrote it."""
    if RESULTS_VERSION_KEY not in header:
        raise InputError(
            f"{path} was written by uefl 0.1, whose results this version cannot read; "
            "run again with another --out, or use uefl 0.1"
        )
    return header


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values: dict[str, Any] = json.loads(path.read_text())
    except ValueError as e:
        raise InputError(f"{path} is damaged ({e}); delete it and run again") from None
    return values
