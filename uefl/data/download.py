"""Files from their official address: resumed where they broke off, checked, and moved into place only when whole."""

from __future__ import annotations

import fcntl
import hashlib
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from http.client import HTTPException, HTTPResponse, IncompleteRead
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from uefl.data.addresses import Address
from uefl.errors import InputError

BLOCK = 1 << 16
PATIENCE = 20.0  # seconds without a byte


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


def fetch_file(address: Address, to: Path, *, progress: bool = False) -> None:
    """Download one file, going on from what an earlier attempt left in `<file>.part`."""
    part = to.with_name(to.name + ".part")
    have = part.stat().st_size if part.exists() else 0
    with _asked(address.url, have) as response:
        resumed = response.status == 206
        length = response.headers.get("Content-Length")
        total = int(length) + (have if resumed else 0) if length else None
        with part.open("ab" if resumed else "wb") as out:
            for block in _shown(response, to.name, have if resumed else 0, total, progress):
                out.write(block)
            out.flush()
            os.fsync(out.fileno())
    got = part.stat().st_size
    if total is not None and got < total:
        raise OSError(f"the connection broke off after {got} of {total} bytes; run again to go on")
    if _digest(part, address.digest) != address.digest:
        part.unlink()  # or the next attempt would go on from the wrong bytes
        raise InputError(f"{address.url}: the file does not have the published checksum {address.digest}")
    os.replace(part, to)


def _asked(url: str, have: int) -> HTTPResponse:
    """Ask for the bytes still missing; a server that knows no ranges, or finds none left, is asked for all."""
    headers = {"User-Agent": "uefl"} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        response: HTTPResponse = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=PATIENCE)
    except urllib.error.HTTPError as e:
        e.close()
        if have and e.code == 416:
            return _asked(url, 0)
        raise
    return response


def _shown(response: HTTPResponse, name: str, have: int, total: int | None, progress: bool) -> Iterator[bytes]:
    console = Console(stderr=True)
    columns = (TextColumn(name), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not (progress and console.is_terminal)) as bar:
        task = bar.add_task(name, total=total, completed=have)
        while block := _block(response):
            yield block
            bar.update(task, advance=len(block))


def _block(response: HTTPResponse) -> bytes:
    """The next bytes; newer Pythons raise at a premature end and hand over the last bytes with the error."""
    try:
        return response.read(BLOCK)
    except IncompleteRead as e:
        return e.partial


def _digest(file: Path, like: str) -> str:
    with file.open("rb") as data:
        kind = "md5" if len(like) == 32 else "sha256"
        return hashlib.file_digest(data, lambda: hashlib.new(kind, usedforsecurity=False)).hexdigest()


def _by_hand(name: str, addresses: Sequence[Address], folder: Path, e: Exception) -> str:
    """One line for a machine without network: which file to put where."""
    reason = getattr(e, "reason", None) or e
    source = addresses[0].url.rpartition("/")[0]
    files = ", ".join(address.file for address in addresses)
    return f"{name} could not be downloaded ({reason}); put {files} from {source} into {folder}"
