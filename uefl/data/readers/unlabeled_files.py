"""List files to predict: images in folders, zip archives and CSV lists, or CSV tables; also one by one."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from uefl.core.errors import InputError
from uefl.data.readers.archives import Files, open_files, read_bytes
from uefl.data.readers.context import ReadContext
from uefl.data.readers.decode import SUFFIXES
from uefl.data.readers.manifest import ManifestFiles, read_rows

TABLE_SUFFIXES = (".csv", ".tsv")


class UnlabeledFile(NamedTuple):
    """A file with its name for the user, and how its bytes are read."""

    name: str
    files: Files | None  # None: a single file
    path: str

    def read(self) -> bytes:
        """Return the bytes; an `InputError` names the file."""
        return read_bytes(Path(self.path), self.name) if self.files is None else self.files.read(self.path)


def list_unlabeled_files(paths: Sequence[Path], context: ReadContext) -> list[UnlabeledFile]:
    """List the image files of all paths in the given order; `context` notes files that are no images by their name."""
    listed = [file for path in paths for file in _list_path(path, context)]
    if not listed:
        raise InputError(f"{', '.join(map(str, paths))}: no images found")
    return listed


def _list_path(path: Path, context: ReadContext) -> list[UnlabeledFile]:
    suffix = path.suffix.lower()
    if suffix == ".csv":
        files = ManifestFiles(path)
        rows = enumerate(read_rows(path, ("path",)), 2)
        names = [(row["path"] or "").strip() for number, row in rows if _has_path(row, number, path, context)]
        return [UnlabeledFile(name, files, name) for name in names]
    if path.is_dir() or suffix == ".zip":
        return _list_members(path, SUFFIXES, "image", context)
    return _list_single_file(path)


def list_table_files(paths: Sequence[Path], context: ReadContext) -> list[UnlabeledFile]:
    """List the CSV files of all paths in the given order; `context` notes files that are no tables by their name."""
    listed = []
    for path in paths:
        has_members = path.is_dir() or path.suffix.lower() == ".zip"
        listed += _list_members(path, TABLE_SUFFIXES, "table", context) if has_members else _list_single_file(path)
    if not listed:
        raise InputError(f"{', '.join(map(str, paths))}: no tables found; their names end in .csv or .tsv")
    return listed


def _list_members(path: Path, suffixes: Collection[str], kind: str, context: ReadContext) -> list[UnlabeledFile]:
    opened = open_files(path, context)
    names = [name for name in opened.names if PurePosixPath(name).suffix.lower() in suffixes]
    if len(names) < len(opened.names):
        context.note_counts[f"files skipped: no {kind} by their name"] += len(opened.names) - len(names)
    return [UnlabeledFile(f"{path}/{name}", opened, name) for name in names]


def _list_single_file(path: Path) -> list[UnlabeledFile]:
    if not path.exists():
        raise InputError(f"{path}: no such file or folder")
    return [UnlabeledFile(str(path), None, str(path))]


def _has_path(row: dict[str, str], number: int, path: Path, context: ReadContext) -> bool:
    has_path = bool((row["path"] or "").strip()) and "\0" not in row["path"]
    if not has_path:
        context.skip_or_raise(f"{path}: row {number}: 'path' is empty or contains a zero byte")
    return has_path
