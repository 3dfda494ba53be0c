"""All files of a data set from their official address: a folder that appears only when it is whole."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path

from uefl.download import Address, fetch_file
from uefl.errors import InputError


def fetch(name: str, addresses: Sequence[Address], folder: Path, *, progress: bool = False) -> Path:
    """Put all files of a data set into `folder`, which appears only when they are all there."""
    waiting = folder.with_name(f".{folder.name}.download")
    try:
        waiting.mkdir(parents=True, exist_ok=True)
        with folder.with_name(f".{folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two runs that start together must not write one .part
            if folder.exists():
                return folder
            for address in addresses:
                if not (waiting / address.file).exists():
                    fetch_file(address, waiting / address.file, progress=progress)
            os.replace(waiting, folder)
    except (OSError, HTTPException, ValueError) as e:
        if isinstance(e, InputError):
            raise
        raise InputError(_by_hand(name, addresses, folder, e)) from e
    return folder


def _by_hand(name: str, addresses: Sequence[Address], folder: Path, e: Exception) -> str:
    """One line for a machine without network: which file to put where."""
    reason = getattr(e, "reason", None) or e
    source = addresses[0].url.rpartition("/")[0]
    files = ", ".join(address.file for address in addresses)
    return f"{name} could not be downloaded ({reason}); put {files} from {source} into {folder}"
