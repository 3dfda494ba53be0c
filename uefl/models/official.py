"""Official ImageNet weights: torchvision's public files, fetched once, checked by the hash in their name."""

from __future__ import annotations

import os
import sys
from hashlib import file_digest
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from rich.console import Console
from rich.progress import DownloadColumn, Progress

from uefl.errors import InputError

ADDRESS = "https://download.pytorch.org/models/"
_TIMEOUT = 30  # seconds without a byte
_COMPLETE = 416  # HTTP: the range asked for starts at the end of the file


def weights_folder() -> Path:
    """Where weights are kept: with the user's data if they said where, else in the user's cache."""
    if data := os.environ.get("UEFL_DATA"):
        return Path(data).expanduser() / "weights"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "uefl" / "weights"


def official_weights(name: str) -> Path:
    """A file of torchvision's, from the cache or else from its public address."""
    path = weights_folder() / name
    if not path.exists():
        part = path.with_name(f"{name}.part")  # a broken download goes on from here next time
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _download(ADDRESS + name, part)
        except (OSError, HTTPException) as error:
            raise InputError(f"cannot fetch {ADDRESS}{name} ({error}); put that file at {path}") from error
        if not _genuine(part, name):
            part.unlink()
            raise InputError(f"{ADDRESS}{name}: what arrived does not have the hash in the file's name; try again")
        part.replace(path)
    elif not _genuine(path, name):
        raise InputError(f"{path}: damaged, it does not have the hash in its name; delete it to fetch it again")
    return path


def _genuine(path: Path, name: str) -> bool:
    """Whether the SHA-256 begins as the name says: resnet18-f37072fd.pth."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest().startswith(Path(name).stem.rpartition("-")[2])


def _download(address: str, part: Path) -> None:
    """Fetch what is still missing of a file."""
    have = part.stat().st_size if part.exists() else 0
    request = Request(address, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        answer = urlopen(request, timeout=_TIMEOUT)
    except HTTPError as error:
        if have and error.code == _COMPLETE:
            return
        raise
    bar = Progress(
        *Progress.get_default_columns(),
        DownloadColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with answer, part.open("ab" if answer.status == 206 else "wb") as file, bar:
        total = file.tell() + answer.length if answer.length else None
        task = bar.add_task(part.stem, total=total, completed=file.tell())
        while chunk := answer.read(1 << 20):
            file.write(chunk)
            bar.advance(task, len(chunk))
        if total and file.tell() < total:
            raise OSError(f"the connection broke after {file.tell()} of {total} bytes, run again to go on")
