"""The folder of one run: names of its files, prefixes of the tensors in them, header and lock."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uefl.core.errors import InputError
from uefl.experiment.files import write_text

if TYPE_CHECKING:
    from uefl.experiment.records import Record

RECORDS_CHECKSUM_KEY = "records_checksum"  # of the summary: CRC-32 of the records when the run finished
RESULTS_VERSION_KEY = "results_version"
PARENT, JOINED = "parent", "joined"  # of the header of a run that a silo joined: the run before, and all that joined
_RESULTS_VERSION_KEY_0_1 = "results"
_START_AGAIN = "move the run folder away to start again"


class RunFolder:
    """The files of one run. A finished run is never overwritten; an unfinished one is resumed from its checkpoint."""

    HEADER_FILE = "run.json"  # settings, versions, data
    RECORDS_FILE = "records.jsonl"  # one line per round
    CHECKPOINT_FILE = "checkpoint.safetensors"  # until the run is finished, as the one before it
    SERVER_FILE = "server.safetensors"  # the last checkpoint of a finished run
    MODEL_FILE = "model.safetensors"  # all that predictions need
    HELD_OUT_FILE = "held-out.safetensors"  # what the models predict for the calibration examples of silos
    CALIBRATION_FILE = "calibration.json"  # temperatures and thresholds that `uefl calibrate` found
    FIGURE_FILE = "figure.png"
    COMPARISON_FILE = "compare.json"  # the names of the compared runs, in the folder of a comparison
    SILOS_FIGURE_FILE = "silos.png"  # of a comparison
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
        self.held_out_path, self.calibration_path = path / self.HELD_OUT_FILE, path / self.CALIBRATION_FILE

    @staticmethod
    def get_previous_path(checkpoint_path: Path) -> Path:
        """Return where the checkpoint before a checkpoint is kept."""
        return checkpoint_path.with_name(f"previous-{checkpoint_path.name}")

    @property
    def checkpoint_paths(self) -> tuple[Path, Path]:
        """The last checkpoint and the one before it."""
        return self.checkpoint_path, self.get_previous_path(self.checkpoint_path)

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
        """Write the summary, with a checksum of the records that it is computed from."""
        if self.records_path.exists():
            summary = {**summary, RECORDS_CHECKSUM_KEY: zlib.crc32(self.records_path.read_bytes())}
        write_text(self.summary_path, json.dumps(summary, indent=1) + "\n")

    def read_records(self) -> list[Record]:
        """Read the records; those of a finished run must be complete and as they were when it finished."""
        from uefl.experiment.records import read_records  # imports torch, which names of files do not need

        if not self.is_finished:
            return read_records(self.records_path)
        summary = self.read_summary()
        rest = f"the model and {self.SUMMARY_FILE} remain; restore it, or {_START_AGAIN}"
        if not self.records_path.exists():
            raise InputError(f"{self.records_path} is missing, though the run is finished; {rest}")
        records = read_records(self.records_path)
        if len(records) != summary.get("rounds", len(records)):
            raise InputError(
                f"{self.records_path} is damaged (it has {len(records)} complete lines, but the run finished with "
                f"{summary['rounds']}); {rest}"
            )
        checksum = zlib.crc32(self.records_path.read_bytes())
        if checksum != summary.get(RECORDS_CHECKSUM_KEY, checksum):  # earlier versions wrote none
            raise InputError(f"{self.records_path} is damaged (it has changed since the run finished); {rest}")
        return records

    def remove_header(self) -> None:
        """Remove a run that has no results yet."""
        for name in (self.HEADER_FILE, self.LOCK_FILE):
            (self.path / name).unlink(missing_ok=True)
        self.path.rmdir()

    @property
    def is_in_use(self) -> bool:
        """Whether a process works in this folder."""
        if not (self.path / self.LOCK_FILE).exists():
            return False
        try:
            with self.lock():
                return False
        except InputError:
            return True

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes out; the operating system releases the lock when the process ends."""
        from filelock import FileLock, Timeout

        lock = FileLock(self.path / self.LOCK_FILE)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise InputError(f"{self.path} is in use by another process") from None
        try:
            yield
        finally:
            lock.release()


def check_results_format(header: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return a header, or raise an error if version 0.1, which used other names, wrote it."""
    if not {RESULTS_VERSION_KEY, _RESULTS_VERSION_KEY_0_1} & header.keys():
        raise InputError(f"{path} is damaged (it has no '{RESULTS_VERSION_KEY}'); restore it, or {_START_AGAIN}")
    if RESULTS_VERSION_KEY not in header:
        raise InputError(
            f"{path} was written by uefl 0.1, whose results this version cannot read; "
            "run again with another --out, or use uefl 0.1"
        )
    return header


def _read_json(path: Path) -> dict[str, Any]:
    """Read a table of values; the error says that deleting a damaged file loses nothing: it is written again."""
    try:
        values = json.loads(path.read_text())
        if not isinstance(values, dict):
            raise ValueError("not a table of values")
    except OSError as e:
        raise InputError(f"cannot read {path}: {(e.strerror or str(e)).lower()}") from None
    except ValueError as e:
        raise InputError(f"{path} is damaged ({e}); delete it and run again, which writes it anew") from None
    return values
