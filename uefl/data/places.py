"""Where data may lie: what the user names, UEFL_DATA, the cache folder, and where the system puts it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path


def cache_folder() -> Path:
    """The folder for downloads and decoded images: UEFL_DATA where it can be written, else the XDG cache."""
    given = os.environ.get("UEFL_DATA")
    return Path(given) if given and _writable(Path(given)) else _xdg()


def found(names: Iterable[str], system: Iterable[str] = ()) -> Path | None:
    """The first of these relative names that exists in UEFL_DATA or the cache, or of these system places."""
    names = tuple(names)
    given = os.environ.get("UEFL_DATA")
    roots = [*([Path(given)] if given else []), _xdg()]
    places = [root / name for root in roots for name in names] + [Path(place) for place in system]
    return next((place for place in places if os.path.exists(place)), None)


def _xdg() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "uefl"


def _writable(folder: Path) -> bool:
    """A folder without write permission is a library and stays untouched, also by root, whom nothing else stops."""
    while not os.path.exists(folder) and folder != folder.parent:
        folder = folder.parent
    try:
        return bool(folder.stat().st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH)) and os.access(folder, os.W_OK)
    except OSError:
        return False
