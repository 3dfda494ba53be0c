"""Find data files: in the folder that UEFL_DATA names, in the user's cache, or where the system installs them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path


def get_cache_folder() -> Path:
    """Return the folder for downloads and decoded images: UEFL_DATA if it is writable, else the user's cache."""
    data_folder = _get_data_folder()
    return data_folder if data_folder and _is_writable(data_folder) else _get_user_cache()


def find_data(relative_paths: Iterable[str], system_paths: Iterable[str] = ()) -> Path | None:
    """Return the first existing path: relative to UEFL_DATA, relative to the user's cache, or a system path."""
    relative_paths = tuple(relative_paths)
    roots = [root for root in (_get_data_folder(), _get_user_cache()) if root]
    candidates = [root / path for root in roots for path in relative_paths] + [Path(path) for path in system_paths]
    return next((path for path in candidates if os.path.exists(path)), None)


def _get_data_folder() -> Path | None:
    """Return the folder that UEFL_DATA names, with `~` expanded."""
    value = os.environ.get("UEFL_DATA")
    return Path(os.path.expanduser(value)) if value else None


def _get_user_cache() -> Path:
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")) / "uefl"


def _is_writable(folder: Path) -> bool:
    """Return whether a folder, or its nearest existing parent, has write permission; root also respects the mode."""
    while not os.path.exists(folder) and folder != folder.parent:
        folder = folder.parent
    try:
        return bool(folder.stat().st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH)) and os.access(folder, os.W_OK)
    except OSError:
        return False
