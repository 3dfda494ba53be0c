"""Download all files of a data set into a folder that appears only when it is complete."""

from __future__ import annotations

import os
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path

from uefl.core.errors import InputError
from uefl.core.fetch import RemoteFile, fetch_file


def download_dataset(
    name: str, remote_files: Sequence[RemoteFile], folder: Path, *, show_progress: bool = False
) -> Path:
    """Download all files of a data set into `folder`, which appears only when all of them are complete."""
    partial_folder = folder.with_name(f".{folder.name}.download")
    try:
        partial_folder.mkdir(parents=True, exist_ok=True)
        from filelock import FileLock

        with FileLock(folder.with_name(f".{folder.name}.lock")):  # two runs must not write the same .part file
            if folder.exists():
                return folder
            for remote_file in remote_files:
                path = partial_folder / remote_file.file_name
                if not path.exists():
                    fetch_file(remote_file, path, show_progress=show_progress)
            os.replace(partial_folder, folder)
    except (OSError, HTTPException, ValueError) as e:
        if isinstance(e, InputError):
            raise
        raise InputError(_explain_manual_download(name, remote_files, folder, e)) from e
    return folder


def _explain_manual_download(name: str, remote_files: Sequence[RemoteFile], folder: Path, e: Exception) -> str:
    """Return one line for a machine without network: which files to put where."""
    reason = getattr(e, "reason", None) or e
    base_url = remote_files[0].url.rpartition("/")[0]
    file_names = ", ".join(remote_file.file_name for remote_file in remote_files)
    return f"{name} could not be downloaded ({reason}); put {file_names} from {base_url} into {folder}"
