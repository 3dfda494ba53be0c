"""Decoded once, kept as safetensors under the hash of what it was decoded from; the second load is a memory map."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
import zlib
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from uefl.data.files import walked
from uefl.data.images import Images
from uefl.errors import InputError

VERSION = 1  # of the decoder: a change in what pixels come out makes new files
BLOCK = 1 << 22
STALE = 86_400.0  # seconds after which another process's temporary folder is a dead one's


def content_hash(path: Path, *settings: object) -> str:
    """What decides the decoded images: a file by its bytes, a folder by names, sizes and times; and the settings."""
    state = hashlib.sha256(json.dumps([VERSION, *map(str, settings)]).encode())
    try:
        if path.is_dir():
            for name, size, changed in sorted(_listing(path)):
                state.update(f"{name}\0{size}\0{changed}\n".encode("utf-8", "surrogateescape"))
        elif not path.is_file() and path.exists():
            raise InputError(f"{path}: neither a file nor a folder")
        else:
            with path.open("rb") as file:
                while block := file.read(BLOCK):
                    state.update(block)
    except (OSError, ValueError) as e:
        if isinstance(e, InputError):
            raise
        raise InputError(f"{path}: {getattr(e, 'strerror', None) or e}") from e
    return state.hexdigest()[:32]


def load(file: Path) -> Images | None:
    """The images in a cached file, or None where there is none, or a damaged one."""
    try:
        with safe_open(file, framework="pt") as cached:
            about, checksum = json.loads((cached.metadata() or {})["images"])
            tensors = {name: cached.get_tensor(name) for name in cached.keys()}  # noqa: SIM118, it is no dict
        if checksum != _checksum(about, tensors):
            return None
        told: dict[str, Any] = json.loads(about)
        return Images(**{k: tuple(v) if isinstance(v, list) else v for k, v in told.items()} | tensors)
    except (OSError, SafetensorError, AttributeError, KeyError, TypeError, ValueError):
        return None


def store(images: Images, file: Path) -> None:
    """Write the images in a folder of their own and move them to their name whole: a reader sees all or nothing."""
    values = {f.name: getattr(images, f.name) for f in fields(images)}
    tensors = {name: v.contiguous() for name, v in values.items() if isinstance(v, Tensor)}
    about = json.dumps({name: v for name, v in values.items() if v is not None and name not in tensors})
    file.parent.mkdir(parents=True, exist_ok=True)
    _sweep(file.parent)
    # A folder, because safetensors writes beside the name it is given under a name it does not tell.
    aside = Path(tempfile.mkdtemp(prefix=f".{file.stem}-", suffix=".tmp", dir=file.parent))
    try:
        whole = aside / file.name
        save_file(tensors, whole, {"images": json.dumps([about, _checksum(about, tensors)])})
        whole.chmod(0o666 & ~_umask())  # safetensors makes it private, but a data folder may be a group's
        _flush(whole)
        os.replace(whole, file)
        _flush(file.parent)
    finally:  # also after an interrupt: nothing half-written stays
        shutil.rmtree(aside, ignore_errors=True)


def _listing(folder: Path) -> list[tuple[str, int, int]]:
    rows = []
    for here, _, names in walked(folder):
        for name in names:
            file = os.path.join(here, name)
            at = os.stat(file, follow_symlinks=os.path.exists(file))  # a dangling link is the importer's to refuse
            rows.append((os.path.relpath(file, folder), at.st_size, at.st_mtime_ns))
    return rows


def _checksum(about: str, tensors: dict[str, Tensor]) -> int:
    """CRC-32, at gigabytes a second: it finds rot, not malice, and what is cached is the user's own."""
    state = zlib.crc32(about.encode())
    for name in sorted(tensors):
        state = zlib.crc32(tensors[name].numpy().data, zlib.crc32(name.encode(), state))
    return state


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sweep(folder: Path) -> None:
    """Remove what killed processes left."""
    for left in folder.glob(".*.tmp"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > STALE:
                shutil.rmtree(left)
