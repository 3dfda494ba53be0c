"""Download one file from its public URL: resume an interrupted download, check it, then move it into place."""

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

from uefl.core.errors import InputError

BLOCK_BYTES = 1 << 16
TIMEOUT_SECONDS = 20.0  # seconds without a byte


class RemoteFile(NamedTuple):
    """A file to download."""

    url: str
    digest: str  # MD5 (32 digits), or the first digits of the SHA-256

    @property
    def file_name(self) -> str:
        return self.url.rpartition("/")[2]


def fetch_file(remote_file: RemoteFile, path: Path, *, show_progress: bool = False) -> None:
    """Download one file; resume from what an earlier attempt left in `<file>.part`."""
    part = path.with_name(path.name + ".part")
    num_existing = part.stat().st_size if part.exists() else 0
    if num_existing and has_digest(part, remote_file.digest):  # complete, but the process was killed before the move
        os.replace(part, path)
        return
    with _open_url(remote_file.url, num_existing) as response:
        resumed = response.status == 206
        length = response.headers.get("Content-Length")
        num_total = int(length) + (num_existing if resumed else 0) if length else None
        with part.open("ab" if resumed else "wb") as out:
            for block in _read_with_progress(
                response, path.name, num_existing if resumed else 0, num_total, show_progress
            ):
                out.write(block)
            out.flush()
            os.fsync(out.fileno())
    num_received = part.stat().st_size
    if num_total is not None and num_received < num_total:
        raise OSError(f"the connection was lost after {num_received} of {num_total} bytes; run again to resume")
    if not has_digest(part, remote_file.digest):
        part.unlink()  # otherwise the next attempt would resume from wrong bytes
        raise InputError(
            f"{remote_file.url}: the downloaded file does not match the published checksum {remote_file.digest}"
        )
    os.replace(part, path)


def _open_url(url: str, num_existing: int) -> HTTPResponse:
    """Request the missing bytes; if the server does not support ranges or has none left, request the whole file."""
    headers = {"User-Agent": "uefl"} | ({"Range": f"bytes={num_existing}-"} if num_existing else {})
    try:
        response: HTTPResponse = urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=TIMEOUT_SECONDS
        )
    except urllib.error.HTTPError as e:
        e.close()
        if num_existing and e.code == 416:
            return _open_url(url, 0)
        raise
    return response


def _read_with_progress(
    response: HTTPResponse, name: str, num_existing: int, num_total: int | None, show_progress: bool
) -> Iterator[bytes]:
    console = Console(stderr=True)
    columns = (TextColumn(name), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not (show_progress and console.is_terminal)
    ) as bar:
        task = bar.add_task(name, total=num_total, completed=num_existing)
        while block := _read_block(response):
            yield block
            bar.update(task, advance=len(block))


def _read_block(response: HTTPResponse) -> bytes:
    """Return the next bytes; newer Python versions raise at a premature end and attach the last bytes to the error."""
    try:
        return response.read(BLOCK_BYTES)
    except IncompleteRead as e:
        return e.partial


def has_digest(file: Path, digest: str) -> bool:
    """Return whether a file has the published checksum."""
    with file.open("rb") as data:
        algorithm = "md5" if len(digest) == 32 else "sha256"
        computed = hashlib.file_digest(data, lambda: hashlib.new(algorithm, usedforsecurity=False))
        return computed.hexdigest().startswith(digest)
