"""What tests need of the machine: without a permission a test is skipped, but in CI, where nothing may be, it fails."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

IS_CI = os.environ.get("CI", "").lower() in ("1", "true")


def skip_or_fail(reason: str) -> NoReturn:
    """Skip a test on the machine of a developer, and fail it in CI."""
    if IS_CI:
        pytest.fail(reason)
    pytest.skip(reason)


def require_root(purpose: str) -> None:
    """Skip or fail a test that only root can run."""
    if os.geteuid() != 0:
        skip_or_fail(f"{purpose} need root")


@contextmanager
def mount_small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Put a folder with its present files on a disk of this size for the block."""
    require_root("small disks")
    content = folder.with_name(f"{folder.name}.content")
    folder.rename(content)
    folder.mkdir(mode=0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", folder], check=True)
    try:
        subprocess.run(["cp", "-a", f"{content}/.", folder], check=True)
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill_disk(folder: Path) -> Path:
    """Write a file until its disk is full; deleting the file frees the space."""
    file = folder / "ballast"
    with file.open("wb", buffering=0) as stream:
        for size in (1 << 16, 1 << 12, 1):
            while True:
                try:
                    stream.write(b"x" * size)
                except OSError:
                    break
    return file
