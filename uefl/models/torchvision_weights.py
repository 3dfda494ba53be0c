"""Official ImageNet weights: torchvision's public files, downloaded once and verified by the hash in their name."""

from __future__ import annotations

from http.client import HTTPException
from pathlib import Path

from uefl.core.errors import InputError
from uefl.core.fetch import RemoteFile, fetch_file, has_digest
from uefl.core.paths import find_data, get_cache_folder

BASE_URL = "https://download.pytorch.org/models/"


def weights_folder() -> Path:
    """Return the folder for downloaded weights."""
    return get_cache_folder() / "weights"


def fetch_torchvision_weights(file_name: str) -> Path:
    """Return a file of torchvision weights, from the cache or from its public URL."""
    path = find_data([f"weights/{file_name}"]) or weights_folder() / file_name
    digest = Path(file_name).stem.rpartition("-")[2]  # resnet18-f37072fd.pth: the first digits of its SHA-256
    if not path.exists():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fetch_file(RemoteFile(BASE_URL + file_name, digest), path, show_progress=True)
        except (OSError, HTTPException) as error:
            raise InputError(f"cannot download {BASE_URL}{file_name} ({error}); save that file as {path}") from error
    elif not has_digest(path, digest):
        raise InputError(f"{path} is damaged: its hash is not the one in its name; delete it to download it again")
    return path
