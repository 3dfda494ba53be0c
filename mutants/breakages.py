"""Read the list of breakages, and replace their text in a copy of the repository."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
LISTS = sorted(Path(__file__).parent.glob("*.toml"))  # one file per floor of the package


class Breakage(NamedTuple):
    """A small replacement of text in one file that makes the package wrong."""

    name: str
    file: str
    old: str  # occurs exactly once in the file
    new: str
    reason: str  # what is wrong with the broken code
    tests: tuple[str, ...]  # node ids; pytest stops at the first that fails


def read_breakages() -> list[Breakage]:
    """Read all breakages, sorted by file and in the order of each file."""
    tables = {name: table for path in LISTS for name, table in tomllib.loads(path.read_text()).items()}
    return [Breakage(name=name, **{**table, "tests": tuple(table["tests"])}) for name, table in tables.items()]


def find_mismatch(breakage: Breakage, root: Path = ROOT) -> str:
    """Return why a breakage cannot be applied, or an empty string."""
    path = root / breakage.file
    if not path.exists():
        return f"{breakage.file} does not exist"
    count = path.read_text().count(breakage.old)
    return "" if count == 1 else f"its old text occurs {count} times in {breakage.file}, not once"


@contextmanager
def apply_breakage(breakage: Breakage, root: Path) -> Iterator[None]:
    """Replace the text in a copy of the repository, and restore it with its time, by which Python trusts its cache."""
    path = root / breakage.file
    text, times = path.read_text(), path.stat()
    path.write_text(text.replace(breakage.old, breakage.new))
    try:
        yield
    finally:
        path.write_text(text)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
