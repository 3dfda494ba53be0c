"""The user's own list: a CSV `path,label,silo[,split]`, paths relative to the list or absolute."""

from __future__ import annotations

import csv
from pathlib import Path

from uefl.data.entries import Entry, imported
from uefl.data.files import read_bytes
from uefl.data.images import Images
from uefl.data.reading import Reading
from uefl.errors import InputError

COLUMNS = ("path", "label", "silo")
SPLITS = {"": False, "train": False, "test": True}


class Listed:
    """Files by the paths a list gives them."""

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        self._folder = path.parent
        self.names: list[str] = []
        self.folders: list[str] = []

    def read(self, name: str) -> bytes:
        return read_bytes(self._folder / name, f"{self.where}: {name}")

    def size(self, name: str) -> int:
        try:
            return (self._folder / name).stat().st_size
        except OSError:
            return 0  # `read` will say why


def manifest(name: str, path: Path, reading: Reading) -> Images:
    """Read the images that a list names. The user's own file may point anywhere the user can read."""
    rows = _rows(path)
    entries: list[Entry] = []
    for number, row in enumerate(rows, 2):
        wrong = _wrong(row)
        if wrong:
            reading.bad(f"{path}: row {number}: {wrong}")
            continue
        split = (row.get("split") or "").strip().lower()
        entries.append(Entry(row["path"].strip(), row["label"].strip(), SPLITS[split], row["silo"].strip()))
    return imported(name, Listed(path), sorted(entries), reading, owners="silo")


def stamps(path: Path) -> list[str]:
    """Size and time of every listed file: the list's own bytes do not tell when an image was changed."""
    lines = []
    for row in _rows(path):
        try:
            at = (path.parent / (row["path"] or "").strip()).stat()
        except (OSError, ValueError):
            continue  # the importer will say why
        lines.append(f"{at.st_size} {at.st_mtime_ns}")
    return lines


def _rows(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, strict=True)
            missing = [c for c in COLUMNS if c not in (reader.fieldnames or ())]
            if missing:
                raise InputError(f"{path}: no column '{missing[0]}'; a list has {','.join(COLUMNS)}[,split]")
            return list(reader)
    except OSError as e:
        raise InputError(f"{path}: {e.strerror}") from e
    except (csv.Error, UnicodeDecodeError) as e:
        raise InputError(f"{path}: not a CSV file in UTF-8 ({e})") from e


def _wrong(row: dict[str, str]) -> str:
    """What is wrong with a row, or nothing."""
    for column in COLUMNS:
        if not (row[column] or "").strip():
            return f"'{column}' is empty"
    if "\0" in row["path"]:
        return "'path' holds a zero byte"
    split = (row.get("split") or "").strip()
    return "" if split.lower() in SPLITS else f"split '{split}' is neither train nor test"
