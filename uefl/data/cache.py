"""Cache decoded images as safetensors under a hash of their source; a cached file is memory-mapped."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from uefl.core.checksum import compute_checksum
from uefl.core.errors import InputError
from uefl.data.images import Images
from uefl.data.readers.archives import walk_folder

DECODER_VERSION = 1  # raise it when decoding gives other pixels: old files are then not used
READ_BLOCK_BYTES = 1 << 22
STALE_SECONDS = 86_400.0  # age at which the temporary folder of another process is removed


def hash_content(path: Path, *settings: object) -> str:
    """Hash what determines the decoded images: the bytes of a file, or names, sizes and times in a folder; settings."""
    digest = hashlib.sha256(json.dumps([DECODER_VERSION, *map(str, settings)]).encode())
    try:
        if path.is_dir():
            for name, size, mtime_ns in sorted(_list_files(path)):
                digest.update(f"{name}\0{size}\0{mtime_ns}\n".encode("utf-8", "surrogateescape"))
        elif not path.is_file() and path.exists():
            raise InputError(f"{path}: neither a file nor a folder")
        else:
            with path.open("rb") as file:
                while block := file.read(READ_BLOCK_BYTES):
                    digest.update(block)
    except (OSError, ValueError) as e:
        if isinstance(e, InputError):
            raise
        raise InputError(f"{path}: {getattr(e, 'strerror', None) or e}") from e
    return digest.hexdigest()[:32]


def load(file: Path) -> Images | None:
    """Return the images of a cached file, or None if the file does not exist or is damaged."""
    try:
        with safe_open(file, framework="pt") as cached:
            fields_json, checksum = json.loads((cached.metadata() or {})["images"])
            tensors = {name: cached.get_tensor(name) for name in cached.keys()}  # noqa: SIM118, not a dict
        if checksum != compute_checksum(fields_json, tensors):
            return None
        values: dict[str, Any] = json.loads(fields_json)
        return Images(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()} | tensors)
    except (OSError, SafetensorError, AttributeError, KeyError, TypeError, ValueError):
        return None


def store(images: Images, file: Path) -> None:
    """Write the images into a temporary folder, then move the complete file: a reader never sees a part of it."""
    values = {f.name: getattr(images, f.name) for f in fields(images)}
    tensors = {name: v.contiguous() for name, v in values.items() if isinstance(v, Tensor)}
    fields_json = json.dumps({name: v for name, v in values.items() if v is not None and name not in tensors})
    file.parent.parent.mkdir(parents=True, exist_ok=True)
    file.parent.mkdir(mode=0o700, exist_ok=True)  # images of a silo are readable by their owner only
    _remove_stale_folders(file.parent)
    # A folder, because safetensors itself writes to an unknown temporary name beside the file.
    temporary_folder = Path(tempfile.mkdtemp(prefix=f".{file.stem}-", suffix=".tmp", dir=file.parent))
    try:
        temporary_file = temporary_folder / file.name
        save_file(
            tensors, temporary_file, {"images": json.dumps([fields_json, compute_checksum(fields_json, tensors)])}
        )
        temporary_file.chmod(0o600)
        _fsync_path(temporary_file)
        os.replace(temporary_file, file)
        _fsync_path(file.parent)
    finally:  # also after an interrupt: no incomplete file remains
        shutil.rmtree(temporary_folder, ignore_errors=True)


def _list_files(folder: Path) -> list[tuple[str, int, int]]:
    rows = []
    for parent, _, names in walk_folder(folder):
        for name in names:
            file = os.path.join(parent, name)
            status = os.stat(file, follow_symlinks=os.path.exists(file))  # the reader reports a dangling link
            rows.append((os.path.relpath(file, folder), status.st_size, status.st_mtime_ns))
    return rows


def _fsync_path(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove_stale_folders(folder: Path) -> None:
    """Remove temporary folders of processes that were killed."""
    for stale_folder in folder.glob(".*.tmp"):
        with suppress(OSError):
            if time.time() - stale_folder.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(stale_folder)
