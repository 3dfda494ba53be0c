"""Files that are replaced in one step, so that a killed process leaves the old or the new version."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from uefl.core.errors import InputError, ResumableError

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG)
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
        if e.errno not in DISK_ERRORS:
            raise
        reason = os.strerror(e.errno).lower()
        raise ResumableError(f"cannot write to {folder}: {reason}; run the same command again to resume") from e


def write_text(path: Path, text: str) -> None:
    """Replace a text file in one step."""
    with open_replacement(path) as temporary:
        temporary.write_text(text)


@contextmanager
def open_replacement(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces a file after the block; a block that fails leaves the file as it was."""
    temporary = make_temporary_path(path)
    try:
        yield temporary
        replace_file(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # on a full disk, the incomplete file would keep the last space


def make_temporary_path(path: Path) -> Path:
    """Return the name under which this process writes the next version of a file."""
    return path.with_name(f".{path.name}.{os.getpid()}")


def replace_file(temporary: Path, path: Path) -> None:
    """Move a complete file to its place: on the disk first, so that a crash cannot leave an empty one."""
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
