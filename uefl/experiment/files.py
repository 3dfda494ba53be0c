"""Files that are replaced in one step, so that a killed process leaves the old or the new version."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from uefl.core.errors import InputError, ResumableError

# By name, since Windows lacks some of them.
_DISK_ERROR_NAMES = ("ENOSPC", "EDQUOT", "EROFS", "EACCES", "EPERM", "EIO", "EFBIG")
DISK_ERRORS = {getattr(errno, name) for name in _DISK_ERROR_NAMES if hasattr(errno, name)}
PRIVATE_FOLDER_MODE, PRIVATE_FILE_MODE = 0o700, 0o600  # readable by the owner only


def make_private_folder(folder: Path) -> Path:
    """Create a folder that only its owner can enter; the mode of an existing folder stays."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=PRIVATE_FOLDER_MODE, exist_ok=True)
    return folder


def ensure_writable_folder(folder: Path) -> Path:
    """Create a folder, or raise an error of one line that gives the reason why nothing can be written to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, "no permission to write")
    except OSError as e:
        raise InputError(f"cannot write to {folder}: {(e.strerror or str(e)).lower()}") from None
    return folder


@contextmanager
def explain_disk_errors(folder: Path) -> Iterator[None]:
    """Turn an error such as a full disk into one line: what was complete is on the disk, so the run can be resumed."""
    try:
        yield
    except OSError as e:
        if e.errno is None or e.errno not in DISK_ERRORS:
            raise
        reason = os.strerror(e.errno).lower()
        raise ResumableError(f"cannot write to {folder}: {reason}; run the same command again to resume") from e


@contextmanager
def explain_write_errors(folder: Path) -> Iterator[None]:
    """Turn a full disk or a read-only folder into an error of one line; what is complete stays."""
    try:
        yield
    except OSError as e:
        if e.errno is None or e.errno not in DISK_ERRORS:
            raise
        raise InputError(
            f"cannot write to {folder}: {os.strerror(e.errno).lower()}; completed rounds are kept, "
            "and the same command resumes after them"
        ) from None


def write_text(path: Path, text: str) -> None:
    """Replace a text file in one step."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, contents: bytes, *, keep_as: Path | None = None) -> None:
    """Replace a file in one step; a write that fails leaves the old version and no temporary file.

    With `keep_as`, the old version gets that name. A kill between the two steps leaves it there.
    """
    temporary = make_temporary_path(path)
    try:
        temporary.write_bytes(contents)
        if keep_as and path.exists():
            flush_file(temporary)
            os.replace(path, keep_as)
        replace_file(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def keep_old_version(path: Path) -> Path:
    """Copy a file that will be replaced to a new name, such as calibration-1.json, and return it."""
    number = 1
    while (kept := path.with_stem(f"{path.stem}-{number}")).exists():
        number += 1
    write_bytes(kept, path.read_bytes())
    return kept


def make_temporary_path(path: Path) -> Path:
    """Return the name under which this process writes the next version of a file."""
    return path.with_name(f".{path.name}.{os.getpid()}")


def flush_file(path: Path) -> None:
    """Wait until a file is on the disk."""
    with path.open("rb+") as file:  # for writing, as Windows requires
        os.fsync(file.fileno())


def replace_file(temporary: Path, path: Path) -> None:
    """Move a complete file to its place: on the disk first, so that a crash cannot leave an empty one."""
    flush_file(temporary)
    temporary.replace(path)
    if os.name == "posix":  # elsewhere, a folder cannot be opened
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
