"""A folder and a zip archive look alike: names, folders and bytes. Nothing is ever unpacked to disk."""

from __future__ import annotations

import os
import stat
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Protocol

from uefl.data.reading import Reading
from uefl.errors import InputError

LARGEST = 1 << 30  # bytes of one member; above it an archive is a bomb or not a data set
CLUTTER = ("__MACOSX", "Thumbs.db", "desktop.ini")  # what operating systems leave behind


class Files(Protocol):
    """Where an importer reads from."""

    where: str  # as the user wrote it, for messages
    names: list[str]  # of files, sorted, with /
    folders: list[str]  # also the empty ones, sorted

    def read(self, name: str) -> bytes: ...
    def size(self, name: str) -> int: ...


class Folder:
    """Files below a folder; hidden ones and the clutter of operating systems are not seen."""

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        self._path = path
        self.names: list[str] = []
        self.folders: list[str] = []
        for here, folders, names in walked(path):
            below = Path(here).relative_to(path)
            self.folders += [(below / f).as_posix() for f in folders]
            self.names += [(below / f).as_posix() for f in names]
        self.names.sort()
        self.folders.sort()

    def read(self, name: str) -> bytes:
        return read_bytes(self._path / name, f"{self.where}: {name}")

    def size(self, name: str) -> int:
        try:
            return (self._path / name).stat().st_size
        except OSError:
            return 0  # `read` will say why


class Zip:
    """Members of a zip archive. A name that would leave the archive's folder is bad, though nothing is unpacked."""

    def __init__(self, path: Path, reading: Reading) -> None:
        self.where = str(path)
        try:
            self._archive = zipfile.ZipFile(path)
        except OSError as e:
            raise InputError(f"{path}: {e.strerror or e}") from e
        except Exception as e:  # a broken directory raises whatever its bytes lead to: BadZipFile, struct.error, ...
            raise InputError(f"{path}: not a zip archive, or a truncated one ({e})") from e
        self._lock = threading.Lock()  # zipfile counts its open members without one
        self._members: dict[str, zipfile.ZipInfo] = {}
        folders: set[str] = set()
        for member in self._archive.infolist():
            name = member.filename
            if _leaves(name):
                reading.bad(f"{path}: member {name!r} has an absolute path or '..'")
            elif any(_clutter(part) for part in PurePosixPath(name).parts):
                continue
            elif member.is_dir():
                folders.add(name.rstrip("/"))
            else:
                self._members[PurePosixPath(name).as_posix()] = member
        folders |= {p.as_posix() for name in self._members for p in PurePosixPath(name).parents if p.name}
        self.names, self.folders = sorted(self._members), sorted(folders)

    def read(self, name: str) -> bytes:
        if self.size(name) > LARGEST:
            raise InputError(f"{self.where}: {name}: {self.size(name)} bytes is too large")
        try:
            with self._lock:
                return self._archive.read(self._members[name])
        except Exception as e:  # zlib, lzma, bz2, encryption, checksum and header errors share no ancestor
            raise InputError(f"{self.where}: {name}: cannot be unpacked ({e or type(e).__name__})") from e

    def size(self, name: str) -> int:
        return self._members[name].file_size


def opened(path: Path, reading: Reading) -> Files:
    """The folder or zip archive at this path."""
    try:
        folder = path.is_dir()
        regular = folder or stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError) as e:
        raise InputError(f"{path}: {getattr(e, 'strerror', None) or e}") from e
    if not regular:
        raise InputError(f"{path}: neither a file nor a folder")
    return Folder(path) if folder else Zip(path, reading)


def walked(path: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """`os.walk` in order, without clutter; links to folders are followed, since a silo may be mounted elsewhere."""
    for here, folders, names in os.walk(path, onerror=_refuse, followlinks=True):
        folders[:] = sorted(f for f in folders if not _clutter(f) and not _loops(here, f))
        yield here, folders, [name for name in names if not _clutter(name)]


def _loops(here: str, folder: str) -> bool:
    """Whether a folder is a link to one that holds it."""
    link = os.path.join(here, folder)
    return os.path.islink(link) and Path(os.path.realpath(here)).is_relative_to(os.path.realpath(link))


def read_bytes(path: Path, where: str) -> bytes:
    """A regular file's bytes; a pipe or a device would keep us waiting forever."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise InputError(f"{where}: not a regular file")
        return path.read_bytes()
    except OSError as e:
        raise InputError(f"{where}: {e.strerror}") from e


def _refuse(e: OSError) -> None:
    raise InputError(f"{e.filename}: {e.strerror}")


def _clutter(part: str) -> bool:
    return part in CLUTTER or (part.startswith(".") and part not in (".", ".."))


def _leaves(name: str) -> bool:
    flat = name.replace("\\", "/")
    return flat.startswith("/") or ".." in flat.split("/") or flat[1:2] == ":"
