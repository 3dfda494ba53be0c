"""Files that are replaced in one step, so that a killed process leaves the old or the new version."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from uefl.core.errors import InputError

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


def write_text(path: Path, text: str) -> None:
    """Replace a text file in one step."""
    temporary = make_temporary_path(path)
    temporary.write_text(text)
    replace_file(temporary, path)


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
