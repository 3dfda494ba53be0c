"""Read the images that a CSV manifest `path,label,silo[,split]` lists; paths are absolute or relative to it.

A further column may name what stays together, such as a patient.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from uefl.core.errors import InputError
from uefl.data.images import Images
from uefl.data.readers.archives import read_bytes
from uefl.data.readers.context import ReadContext
from uefl.data.readers.labeled_files import LabeledFile, decode_files

COLUMNS = ("path", "label", "silo")
SPLIT_NAMES = {"": False, "train": False, "test": True}


class ManifestFiles:
    """Files by the paths that a manifest gives them."""

    def __init__(self, path: Path) -> None:
        self.display_path = str(path)
        self._folder = path.parent
        self.names: list[str] = []
        self.folders: list[str] = []

    def read(self, name: str) -> bytes:
        return read_bytes(self._folder / name, f"{self.display_path}: {name}")

    def size(self, name: str) -> int:
        try:
            return (self._folder / name).stat().st_size
        except OSError:
            return 0  # `read` will raise the error


def read_manifest(name: str, path: Path, context: ReadContext) -> Images:
    """Read the images that a manifest lists; it may refer to any file that the user can read."""
    rows = read_rows(path)
    labeled_files: list[LabeledFile] = []
    for number, row in enumerate(rows, 2):
        if context.group and context.group not in row:
            raise InputError(f"{path}: no column '{context.group}', which group names; it has {', '.join(row)}")
        if error := _find_row_error(row, context.group):
            context.skip_or_raise(f"{path}: row {number}: {error}")
            continue
        split = (row.get("split") or "").strip().lower()
        labeled_files.append(
            LabeledFile(
                row["path"].strip(),
                row["label"].strip(),
                SPLIT_NAMES[split],
                row["silo"].strip(),
                (row[context.group] or "").strip() if context.group else "",
            )
        )
    return decode_files(name, ManifestFiles(path), sorted(labeled_files), context, owner_kind="silo")


def list_file_stamps(path: Path) -> list[str]:
    """Return size and time of every listed file: the bytes of the manifest do not change with an image."""
    stamps = []
    for row in read_rows(path):
        try:
            status = (path.parent / (row["path"] or "").strip()).stat()
        except (OSError, ValueError):
            continue  # the reader will raise the error
        stamps.append(f"{status.st_size} {status.st_mtime_ns}")
    return stamps


def read_rows(path: Path, columns: Sequence[str] = COLUMNS) -> list[dict[str, str]]:
    """Read the rows of a manifest that has at least these columns."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, strict=True)
            missing = [column for column in columns if column not in (reader.fieldnames or ())]
            if missing:
                raise InputError(
                    f"{path}: no column '{missing[0]}', but {', '.join(reader.fieldnames or ())}; a list of images has "
                    f"the columns {','.join(COLUMNS)}[,split]; rows of numbers are read by the data set `table`"
                )
            return list(reader)
    except OSError as e:
        raise InputError(f"{path}: {e.strerror}") from e
    except (csv.Error, UnicodeDecodeError) as e:
        raise InputError(f"{path}: not a CSV file in UTF-8 ({e})") from e


def _find_row_error(row: dict[str, str], group: str) -> str:
    """Return what is wrong with a row, or an empty string."""
    for column in (*COLUMNS, *((group,) if group else ())):
        if not (row[column] or "").strip():
            return f"'{column}' is empty"
    if "\0" in row["path"]:
        return "'path' contains a zero byte"
    split = (row.get("split") or "").strip()
    return "" if split.lower() in SPLIT_NAMES else f"split '{split}' must be train or test"
