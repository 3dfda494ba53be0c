"""Trees of images, in a folder or a zip archive: folders say the class, the split and the owner.

<class>/…                        no owner, no split
train/<class>/… test/<class>/…   the source's own split
<owner>/<class>/…                a silo, or a domain as in PACS
<owner>/{train,test}/<class>/…   a silo with its own split
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from uefl.data.entries import Entry, imported
from uefl.data.files import Files, opened
from uefl.data.images import Images
from uefl.data.pixels import SUFFIXES
from uefl.data.reading import Reading
from uefl.errors import InputError

SPLITS = {"train": False, "test": True}
LAYOUTS = "<class>/, {train,test}/<class>/, <silo>/<class>/ or <silo>/{train,test}/<class>/"


def tree(name: str, path: Path, reading: Reading, *, owners: str = "silo") -> Images:
    """Read a tree; a wrapping folder around all of it is looked through. Owners are "silo", "domain" or nothing."""
    return from_files(name, opened(path, reading), reading, owners=owners)


def from_files(name: str, files: Files, reading: Reading, *, owners: str = "silo") -> Images:
    """Read a tree from a folder or archive that is already open."""
    pictures = [n for n in files.names if PurePosixPath(n).suffix.lower() in SUFFIXES]
    if len(pictures) < len(files.names):
        reading.counts["files passed over: not images by their name"] = len(files.names) - len(pictures)
    if not pictures:
        raise InputError(f"{files.where}: no image found below it; a tree is {LAYOUTS}")
    above = {n: PurePosixPath(n).parts[:-1] for n in pictures}
    wrapped = _wrapping(list(above.values()), owners)
    entries = _entries(files, {n: parts[wrapped:] for n, parts in above.items()}, reading)
    if any(entry.owner for entry in entries):
        _refuse_empty(files, entries, wrapped, reading)
        return imported(name, files, entries, reading, owners=owners or "silo")
    return imported(name, files, entries, reading)


def _wrapping(folders: Sequence[tuple[str, ...]], owners: str) -> int:
    """How many folders all images share before the layout begins."""
    wrapped = 0
    while True:
        inner = [parts[wrapped:] for parts in folders]
        shared = len({parts[:1] for parts in inner}) == 1
        depth = min(len(parts) for parts in inner)
        if not shared or depth < 2 or inner[0][0].lower() in SPLITS:
            return wrapped
        split_next = all(parts[1].lower() in SPLITS for parts in inner)
        if depth == 2 or (depth == 3 and split_next and owners):
            return wrapped  # a lone owner is an owner
        wrapped += 1


def _entries(files: Files, above: dict[str, tuple[str, ...]], reading: Reading) -> list[Entry]:
    depth = Counter(len(parts) for parts in above.values()).most_common(1)[0][0]
    split_at = _split_level(files, [parts for parts in above.values() if len(parts) == depth], depth)
    entries = []
    for file, parts in above.items():
        if len(parts) != depth:
            reading.bad(f"{files.where}: {file}: {len(parts)} folders deep where most images are {depth}")
            continue
        test = split_at is not None and SPLITS[parts[split_at].lower()]
        owner = "" if depth == 1 or split_at == 0 else parts[0]
        entries.append(Entry(file, parts[-1], test, owner))
    return entries


def _split_level(files: Files, above: Sequence[tuple[str, ...]], depth: int) -> int | None:
    """Which folder level says train or test, if any."""
    if depth not in (1, 2, 3):
        raise InputError(f"{files.where}: images stand {depth} folders deep; a tree is {LAYOUTS}")
    if depth == 1:
        return None
    level = depth - 2
    names = {parts[level] for parts in above}
    strange = sorted(n for n in names if n.lower() not in SPLITS)
    if not strange:
        return level
    if depth == 3 or len(strange) < len(names):
        raise InputError(
            f"{files.where}: folder '{strange[0]}' stands where train and test do; a tree is {LAYOUTS}, "
            "and validation comes out of training"
        )
    return None


def _refuse_empty(files: Files, entries: Sequence[Entry], wrapped: int, reading: Reading) -> None:
    """A silo's folder without any image is a mistake, not a small silo."""
    owners = {entry.owner for entry in entries}
    wrapper = PurePosixPath(entries[0].file).parts[:wrapped]
    for folder in files.folders:
        parts = PurePosixPath(folder).parts
        if len(parts) == wrapped + 1 and parts[:wrapped] == wrapper and parts[-1] not in owners:
            reading.bad(f"{files.where}: silo '{parts[-1]}' has no image")
