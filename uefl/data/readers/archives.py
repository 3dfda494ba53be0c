"""Read a folder or a zip archive through one interface; nothing is unpacked to disk."""

from __future__ import annotations

import os
import stat
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Protocol

from uefl.core.errors import InputError
from uefl.data.readers.context import ReadContext

MAX_FILE_BYTES = 1 << 30  # of one member; a larger one is a zip bomb or no data set
IGNORED_NAMES = ("__MACOSX", "Thumbs.db", "desktop.ini")  # files that operating systems add


class Files(Protocol):
    """The files that a reader reads."""

    display_path: str  # the user's path, for messages
    names: list[str]  # relative paths of files with /, sorted
    folders: list[str]  # relative paths of folders, also empty ones, sorted

    def read(self, name: str) -> bytes: ...
    def size(self, name: str) -> int: ...


class Folder:
    """Files below a folder, without hidden files and those that operating systems add."""

    def __init__(self, path: Path) -> None:
        self.display_path = str(path)
        self._path = path
        self.names: list[str] = []
        self.folders: list[str] = []
        for folder, folders, names in walk_folder(path):
            parent = Path(folder).relative_to(path)
            self.folders += [(parent / name).as_posix() for name in folders]
            self.names += [(parent / name).as_posix() for name in names]
        self.names.sort()
        self.folders.sort()

    def read(self, name: str) -> bytes:
        return read_bytes(self._path / name, f"{self.display_path}: {name}")

    def size(self, name: str) -> int:
        try:
            return (self._path / name).stat().st_size
        except OSError:
            return 0  # `read` will raise the error


class ZipArchive:
    """Members of a zip archive; names that point outside the archive are rejected, though nothing is unpacked."""

    def __init__(self, path: Path, context: ReadContext) -> None:
        self.display_path = str(path)
        try:
            self._archive = zipfile.ZipFile(path)
        except OSError as e:
            raise InputError(f"{path}: {e.strerror or e}") from e
        except Exception as e:  # a damaged directory can raise any exception: BadZipFile, struct.error, …
            raise InputError(f"{path}: not a zip archive, or truncated ({e})") from e
        self._lock = threading.Lock()  # zipfile does not lock its count of open members
        self._members: dict[str, zipfile.ZipInfo] = {}
        folders: set[str] = set()
        for member in self._archive.infolist():
            name = member.filename
            if _escapes_archive(name):
                context.skip_or_raise(f"{path}: member {name!r} has an absolute path or '..'")
            elif any(_is_ignored(part) for part in PurePosixPath(name).parts):
                continue
            elif member.is_dir():
                folders.add(name.rstrip("/"))
            else:
                self._members[PurePosixPath(name).as_posix()] = member
        folders |= {p.as_posix() for name in self._members for p in PurePosixPath(name).parents if p.name}
        self.names, self.folders = sorted(self._members), sorted(folders)

    def read(self, name: str) -> bytes:
        if self.size(name) > MAX_FILE_BYTES:
            raise InputError(f"{self.display_path}: {name}: {self.size(name)} bytes, more than {MAX_FILE_BYTES}")
        try:
            with self._lock:
                return self._archive.read(self._members[name])
        except Exception as e:  # zlib, lzma, bz2, encryption, checksum and header errors have no common base class
            raise InputError(f"{self.display_path}: {name}: cannot be unpacked ({e or type(e).__name__})") from e

    def size(self, name: str) -> int:
        return self._members[name].file_size


def open_files(path: Path, context: ReadContext) -> Files:
    """Open the folder or zip archive at a path."""
    try:
        is_folder = path.is_dir()
        is_readable = is_folder or stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError) as e:
        raise InputError(f"{path}: {getattr(e, 'strerror', None) or e}") from e
    if not is_readable:
        raise InputError(f"{path}: neither a file nor a folder")
    return Folder(path) if is_folder else ZipArchive(path, context)


def walk_folder(path: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Walk a folder in sorted order without ignored names; links to folders are followed, as silos may be mounted."""
    for folder, folders, names in os.walk(path, onerror=_raise_input_error, followlinks=True):
        folders[:] = sorted(name for name in folders if not _is_ignored(name) and not _is_link_loop(folder, name))
        yield folder, folders, [name for name in names if not _is_ignored(name)]


def _is_link_loop(parent: str, name: str) -> bool:
    """Return whether a folder is a link to one of its parents."""
    link = os.path.join(parent, name)
    return os.path.islink(link) and Path(os.path.realpath(parent)).is_relative_to(os.path.realpath(link))


def read_bytes(path: Path, display_path: str) -> bytes:
    """Read a regular file; a pipe or a device is rejected, because reading it might never end."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise InputError(f"{display_path}: not a regular file")
        return path.read_bytes()
    except OSError as e:
        raise InputError(f"{display_path}: {e.strerror}") from e


def _raise_input_error(e: OSError) -> None:
    raise InputError(f"{e.filename}: {e.strerror}")


def _is_ignored(name: str) -> bool:
    return name in IGNORED_NAMES or (name.startswith(".") and name not in (".", ".."))


def _escapes_archive(name: str) -> bool:
    posix_name = name.replace("\\", "/")
    return posix_name.startswith("/") or ".." in posix_name.split("/") or posix_name[1:2] == ":"
