"""One file from its public address: resumed where it broke off, checked, and moved into place only when whole."""

from __future__ import annotations

import hashlib
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPResponse, IncompleteRead
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from uefl.errors import InputError

BLOCK = 1 << 16
PATIENCE = 20.0  # seconds without a byte


class Address(NamedTuple):
    """One file to be had."""

    url: str
    digest: str  # MD5 (32 digits), or SHA-256 or how it begins

    @property
    def file(self) -> str:
        return self.url.rpartition("/")[2]


def fetch_file(address: Address, to: Path, *, progress: bool = False) -> None:
    """Download one file, going on from what an earlier attempt left in `<file>.part`."""
    part = to.with_name(to.name + ".part")
    have = part.stat().st_size if part.exists() else 0
    if have and genuine(part, address.digest):  # whole, but killed before it was moved
        os.replace(part, to)
        return
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
    if not genuine(part, address.digest):
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


def genuine(file: Path, digest: str) -> bool:
    """Whether a file is the one that was published."""
    with file.open("rb") as data:
        kind = "md5" if len(digest) == 32 else "sha256"
        found = hashlib.file_digest(data, lambda: hashlib.new(kind, usedforsecurity=False))
        return found.hexdigest().startswith(digest)
