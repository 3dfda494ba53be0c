"""German traffic signs: the official folders of PPM images with their CSV files, or a tree {train,test}/<class>/.

Images are stretched to 32×32 with the margin of about a tenth that the official images have around the sign. The CSV
files also give the sign's own box (Roi); we do not crop to it, as in the tree layout that others publish.
"""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace
from pathlib import Path, PurePosixPath

from uefl.data.entries import Entry, imported
from uefl.data.files import Files, Folder, Zip, opened
from uefl.data.images import Images
from uefl.data.reading import Reading
from uefl.data.tree import from_files
from uefl.errors import InputError

SIZE = 32
CLASSES = {"": 0} | {str(c): c for c in range(1, 43)}  # by their digits, leading zeros apart
TRAINING = re.compile(r"(^|/)(Training|Final_Training/Images)/\d{5}/GT-\d{5}\.csv$")
TEST = re.compile(r"(^|/)GT-final_test\.csv$")


class Several:
    """The official archives lying in one folder, seen as one tree."""

    def __init__(self, where: str, parts: list[Files]) -> None:
        self.where = where
        self._owner = {name: part for part in parts for name in part.names}
        self.names = sorted(self._owner)
        self.folders: list[str] = []

    def read(self, name: str) -> bytes:
        return self._owner[name].read(name)

    def size(self, name: str) -> int:
        return self._owner[name].size(name)


def gtsrb(path: Path, reading: Reading) -> Images:
    """43 kinds of traffic signs in colour."""
    files = opened(path, reading)
    archives = [n for n in files.names if n.endswith(".zip") and "/" not in n] if isinstance(files, Folder) else []
    if archives:
        files = Several(files.where, [Zip(path / n, reading) for n in archives])
    if not any(TRAINING.search(n) or TEST.search(n) for n in files.names):
        return from_files("gtsrb", files, reading, owners="")
    reading = replace(reading, size=reading.size or SIZE)  # shares the counts with the caller's
    return imported("gtsrb", files, _entries(files, reading), reading)


def _entries(files: Files, reading: Reading) -> list[Entry]:
    entries: list[Entry] = []
    for listing in files.names:
        test = bool(TEST.search(listing))
        if test or TRAINING.search(listing):
            entries += _listed(files, listing, reading, test=test)
    if not all(any(entry.test is split for entry in entries) for split in (False, True)):
        raise InputError(
            f"{files.where}: needs the training images with GT-<class>.csv and the test's GT-final_test.csv"
        )
    return sorted(entries)


def _listed(files: Files, listing: str, reading: Reading, *, test: bool) -> list[Entry]:
    """The images that one CSV file names; test images lie in Final_Test/Images, wherever their list lies."""
    beside = {PurePosixPath(n).name: n for n in files.names if n.endswith(".ppm") and _belongs(n, listing, test=test)}
    entries = []
    try:
        rows = list(csv.DictReader(io.StringIO(files.read(listing).decode("utf-8-sig")), delimiter=";", strict=True))
    except (csv.Error, UnicodeDecodeError) as e:
        raise InputError(f"{files.where}: {listing}: not a CSV file ({e})") from e
    for row in rows:
        file, label = row.get("Filename"), row.get("ClassId")
        if file is None or label is None:
            raise InputError(f"{files.where}: {listing}: no column 'Filename' or 'ClassId'")
        if label.lstrip("0") not in CLASSES:
            reading.bad(f"{files.where}: {listing}: class '{label}' of {file} is not 0 to 42")
        elif file not in beside:
            reading.bad(f"{files.where}: {listing}: {file} is not there")
        else:
            entries.append(Entry(beside[file], f"{CLASSES[label.lstrip('0')]:02d}", test))
    return entries


def _belongs(name: str, listing: str, *, test: bool) -> bool:
    parent = PurePosixPath(name).parent
    return parent.parts[-2:] == ("Final_Test", "Images") if test else parent == PurePosixPath(listing).parent
