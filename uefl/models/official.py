"""Official ImageNet weights: torchvision's public files, fetched once, checked by the hash in their name."""

from __future__ import annotations

import os
from http.client import HTTPException
from pathlib import Path

from uefl.download import Address, fetch_file, genuine
from uefl.errors import InputError

ADDRESS = "https://download.pytorch.org/models/"


def weights_folder() -> Path:
    """Where weights are kept: with the user's data if they said where, else in the user's cache."""
    if data := os.environ.get("UEFL_DATA"):
        return Path(data).expanduser() / "weights"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "uefl" / "weights"


def official_weights(name: str) -> Path:
    """A file of torchvision's, from the cache or else from its public address."""
    path = weights_folder() / name
    digest = Path(name).stem.rpartition("-")[2]  # resnet18-f37072fd.pth: how its SHA-256 begins
    if not path.exists():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fetch_file(Address(ADDRESS + name, digest), path, progress=True)
        except (OSError, HTTPException) as error:
            raise InputError(f"cannot fetch {ADDRESS}{name} ({error}); put that file at {path}") from error
    elif not genuine(path, digest):
        raise InputError(f"{path}: damaged, it does not have the hash in its name; delete it to fetch it again")
    return path
